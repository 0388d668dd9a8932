"""A small node-by-node ONNX author: names tensors, shares constants, points weights into the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from clover.exporter.weight_index import StoredTensor

CONTRIB = "com.microsoft"
OPSET = 24
IR_VERSION = 11
_ONNX_TYPE = {"F32": TensorProto.FLOAT, "BF16": TensorProto.BFLOAT16, "U8": TensorProto.UINT8}


class GraphBuilder:
    """Collects nodes, constants and external weights of one graph, then makes the model."""

    def __init__(self, weights: Mapping[str, StoredTensor]) -> None:
        self.weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._scope = ""
        self._count = 0

    # -- graph edges -------------------------------------------------------------------------

    def input(self, name: str, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def output(self, value: str, name: str, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT) -> str:
        """Declares the graph output `name`, which is `value` under another name from here on."""
        self.rename(value, name)
        self._outputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def rename(self, value: str, name: str) -> str:
        """Gives a computed value a stable name (validation reads hidden states by theirs)."""
        for node in self._nodes:
            for names in (node.input, node.output):
                for i, n in enumerate(names):
                    if n == value:
                        names[i] = name
        return name

    def scope(self, name: str) -> None:
        """Prefix of the names of the nodes that follow, so that a profile reads like the model."""
        self._scope = name

    # -- values ------------------------------------------------------------------------------

    def constant(self, array: NDArray[Any]) -> str:
        """A small inline constant; equal constants are one initializer."""
        name = f"const.{array.dtype}.{'x'.join(map(str, array.shape))}.{hash_bytes(array)}"
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def int_scalar(self, value: int) -> str:
        return self.constant(np.array(value, np.int64))

    def scalar(self, value: float) -> str:
        return self.constant(np.array(value, np.float32))

    def weight(self, name: str, shape: Sequence[int] | None = None) -> str:
        """A tensor of the weight store, by reference (external data); `shape` views the same bytes otherwise."""
        stored = self.weights[name]
        dims = tuple(shape or stored.shape)
        key = name if dims == stored.shape else f"{name}:{'x'.join(map(str, dims))}"
        if key not in self._initializers:
            tensor = TensorProto(
                name=key, data_type=_ONNX_TYPE[stored.dtype], dims=dims, data_location=TensorProto.EXTERNAL
            )
            for field, value in (("location", stored.file), ("offset", stored.offset), ("length", stored.nbytes)):
                tensor.external_data.add(key=field, value=str(value))
            self._initializers[key] = tensor
        return key

    def optional_weight(self, name: str) -> str:
        """A tensor of the weight store, or an operator's absent input."""
        return self.weight(name) if name in self.weights else ""

    # -- nodes -------------------------------------------------------------------------------

    def op(self, op_type: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        return self.ops(op_type, 1, *inputs, domain=domain, **attributes)[0]

    def ops(self, op_type: str, outputs: int, *inputs: str, domain: str = "", **attributes: Any) -> list[str]:
        self._count += 1
        label = f"{self._scope}.{op_type}.{self._count}"
        names = [label if outputs == 1 else f"{label}.{i}" for i in range(outputs)]
        self._nodes.append(helper.make_node(op_type, list(inputs), names, name=label, domain=domain, **attributes))
        return names

    def reshape(self, x: str, *shape: int) -> str:
        return self.op("Reshape", x, self.ints(*shape))

    def unsqueeze(self, x: str, *axes: int) -> str:
        return self.op("Unsqueeze", x, self.ints(*axes))

    def slice(self, x: str, start: str, stop: str, axis: int) -> str:
        """`start` and `stop` are int64 tensors of one element."""
        return self.op("Slice", x, start, stop, self.ints(axis))

    def to_float(self, x: str) -> str:
        return self.op("Cast", x, to=TensorProto.FLOAT)

    def silu(self, x: str) -> str:
        # QuickGelu with alpha 1 is x * sigmoid(x), in one threaded kernel
        return self.op("QuickGelu", x, domain=CONTRIB, alpha=1.0)

    # -- the whole -----------------------------------------------------------------------------

    def model(self, name: str, metadata: Mapping[str, str]) -> onnx.ModelProto:
        used = {n for node in self._nodes for n in node.input}
        initializers = [t for k, t in self._initializers.items() if k in used]
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, initializers)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="clover")
        helper.set_model_props(model, dict(metadata))
        return model


def hash_bytes(array: NDArray[Any]) -> str:
    """A short name for an array's content: equal constants get one initializer."""
    import hashlib

    return hashlib.sha256(array.tobytes()).hexdigest()[:12]
