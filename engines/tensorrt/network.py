"""What is read from, and mended in, a parsed network."""

from __future__ import annotations

from typing import Any

from clover.runtime.errors import CloverError

PLUGIN_LAYERS = "PLUGIN_V3"
Layer = dict[str, str]
Tensors = dict[str, tuple[str, list[int]]]  # name -> TensorRT's name of the type, and dimensions, -1 for a dynamic one


def layer_list(network: Any) -> list[Layer]:
    """Name and type of every layer; for a plugin its operator too."""
    layers = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        entry = {"name": layer.name, "type": layer.type.name}
        if layer.type.name == PLUGIN_LAYERS:
            entry["plugin"] = layer.name.rsplit(".", 2)[-2]
        layers.append(entry)
    return layers


def tensor_list(network: Any) -> Tensors:
    """Every input and output of a network."""
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    return {t.name: (t.dtype.name, list(t.shape)) for t in (*inputs, *outputs)}


def plugin_counts(layers: list[Layer], name: str) -> int:
    """How many plugin layers of one operator a network has."""
    return sum(layer["type"] == PLUGIN_LAYERS and layer["plugin"] == name for layer in layers)


def limit_attention(trt: Any, network: Any, lengths: str) -> int:
    """Tells every attention how many keys are live, from the int64 tensor `lengths` [S]; returns how many there were.

    The ONNX parser drops the operator's `nonpad_kv_seqlen` silently, and attention would read the whole KV capacity.
    Raises CloverError when there is attention and no such tensor.
    """
    outputs, tensor = [], None
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_OUTPUT:
            layer.__class__ = trt.IAttentionOutputLayer
            outputs.append(layer)
        for port in range(layer.num_outputs):
            value = layer.get_output(port)
            if value is not None and value.name == lengths:
                tensor = value
    if not outputs:
        return 0
    if tensor is None:
        raise CloverError(f"the parsed network has attention and no tensor {lengths}; this TensorRT is not supported")
    narrow = network.add_cast(tensor, trt.DataType.INT32)
    narrow.name = f"{lengths}.int32"
    for layer in outputs:
        layer.attention.key_value_lengths = narrow.get_output(0)
        if layer.attention.key_value_lengths is None:
            raise CloverError(f"{layer.name} does not take key lengths; this TensorRT version is not supported")
    return len(outputs)
