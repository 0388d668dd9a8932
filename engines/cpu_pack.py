"""Packs a step graph's weights for this CPU through ONNX Runtime, a few layers at a time.

ONNX Runtime saves packed weights with a model when asked to, but only after it has packed the whole model in memory.
Here it is given small models instead: some of the graph's matrix products with nothing between them. Each leaves a
file with their weights, original and packed; the step graph is then written to point into those files. On load ONNX
Runtime packs each weight again, finds the result in the file by its hash, compares it, and maps that: a weight that
would be packed otherwise than foreseen here stays private, and nothing else happens. It can't be kept from packing
and comparing: a file that holds something else than the packed original is refused (as of version 1.32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import onnx
from onnx import TensorProto, helper

from clover.engines.bundle import Bundle

PACKED_OPS = ("MatMulNBits", "QMoE", "MoE", "MatMul", "Gemm")
PART_BYTES = 512 * 2**20  # weights in memory at once; a larger one comes alone
OTHER_FILE = "other.bin"
_ALIGNMENT = 64
_COPY_BYTES = 8 * 2**20


def packable_bytes(bundle: Bundle) -> int:
    """Bytes of the weights that ONNX Runtime would hold packed in private memory."""
    external, nodes = _read_graph(bundle)[1:]
    return sum(_nbytes(external[n]) for node in nodes for n in node.input if n in external)


def cache_bytes(bundle: Bundle) -> int:
    """Room to ask for before packing: every weight, and those that are packed once more, scales folded in."""
    external = _read_graph(bundle)[1]
    return sum(map(_nbytes, external.values())) + packable_bytes(bundle) * 9 // 8


def pack_weights(bundle: Bundle, directory: Path, written: Callable[[Path], object]) -> bytes:
    """Writes the weights, original and packed, into `directory`; returns the step graph that points at them. `written`
    is told of every file as soon as it is whole.

    Raises OSError when the disk is full, and what onnxruntime raises.
    """
    model, external, nodes = _read_graph(bundle)
    inline = {t.name: t for t in model.graph.initializer if t.name not in external}
    placed: dict[str, TensorProto] = {}
    for number, group in enumerate(_groups(nodes, external)):
        for tensor in _pack_group(bundle, model, group, {**inline, **external}, directory, f"part-{number:03}"):
            if tensor.name in external:
                placed.setdefault(tensor.name, tensor)
        written(directory / f"part-{number:03}.bin")
    with (directory / OTHER_FILE).open("wb") as file:
        for name, tensor in external.items():
            if name not in placed:
                placed[name] = _copy_tensor(bundle, tensor, file)
    written(directory / OTHER_FILE)
    tensors = [placed.get(t.name, t) for t in model.graph.initializer]
    _check_places(tensors, directory)
    del model.graph.initializer[:]
    model.graph.initializer.extend(tensors)
    return bytes(model.SerializeToString())


def _read_graph(bundle: Bundle) -> tuple[onnx.ModelProto, dict[str, TensorProto], list[onnx.NodeProto]]:
    """(the model, its external tensors by name, the nodes that pack some of them)."""
    model = onnx.load_model_from_string(bundle.graph_bytes)
    external = {t.name: t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL}
    nodes = [n for n in model.graph.node if n.op_type in PACKED_OPS and any(i in external for i in n.input)]
    return model, external, nodes


def _groups(nodes: list[onnx.NodeProto], external: dict[str, TensorProto]) -> Iterator[list[onnx.NodeProto]]:
    group: list[onnx.NodeProto] = []
    held = 0
    for node in nodes:
        size = sum(_nbytes(external[n]) for n in node.input if n in external)
        if group and held + size > PART_BYTES:
            yield group
            group, held = [], 0
        group.append(node)
        held += size
    if group:
        yield group


def _pack_group(
    bundle: Bundle,
    model: onnx.ModelProto,
    nodes: list[onnx.NodeProto],
    tensors: dict[str, TensorProto],
    directory: Path,
    name: str,
) -> list[TensorProto]:
    """Has ONNX Runtime pack the weights of `nodes` into `name`.bin; returns the tensors with their places in it."""
    import onnxruntime as ort

    made = {output for node in nodes for output in node.output}
    used = dict.fromkeys(i for node in nodes for i in node.input if i)
    inputs = [_float_value(i) for i in used if i not in tensors and i not in made]
    initializers = [tensors[i] for i in used if i in tensors]
    graph = helper.make_graph(nodes, name, inputs, [_float_value(o) for o in sorted(made)], initializers)
    part = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(directory / f"{name}.onnx")
    for key, value in (
        ("model_external_initializers_file_folder_path", str(bundle.directory)),
        ("optimized_model_external_initializers_file_name", f"{name}.bin"),
        ("optimized_model_external_initializers_min_size_in_bytes", "0"),
        ("save_external_prepacked_constant_initializers", "1"),
    ):
        options.add_session_config_entry(f"session.{key}", value)
    ort.InferenceSession(part.SerializeToString(), options, providers=["CPUExecutionProvider"])
    saved = onnx.load_model(directory / f"{name}.onnx", load_external_data=False)
    (directory / f"{name}.onnx").unlink()
    return list(saved.graph.initializer)


def _float_value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def _copy_tensor(bundle: Bundle, tensor: TensorProto, file: BinaryIO) -> TensorProto:
    """Appends a tensor's bytes to OTHER_FILE; returns it pointing there."""
    entry = _entry(tensor)
    file.write(bytes(-file.tell() % _ALIGNMENT))
    copy = TensorProto()
    copy.CopyFrom(tensor)
    del copy.external_data[:]
    for key, value in (("location", OTHER_FILE), ("offset", file.tell()), ("length", entry["length"])):
        copy.external_data.add(key=key, value=str(value))
    left = int(entry["length"])
    with (bundle.directory / entry["location"]).open("rb") as source:
        source.seek(int(entry["offset"]))
        while left and (piece := source.read(min(left, _COPY_BYTES))):
            file.write(piece)
            left -= len(piece)
    return copy


def _check_places(tensors: list[TensorProto], directory: Path) -> None:
    """Raises OSError when a tensor ends beyond its file: ONNX Runtime does not always notice a full disk."""
    for tensor in tensors:
        entry = _entry(tensor)
        if not entry:
            continue
        size = (directory / entry["location"]).stat().st_size
        ends = [int(entry["offset"]) + int(entry["length"])]
        for key, value in entry.items():
            if key.startswith("prepacked"):  # "operator+hash|offset;length;alignment|…"
                ends += [sum(map(int, blob.split(";")[:2])) for blob in value.split("|")[1:]]
        if max(ends) > size:
            raise OSError(0, f"{directory / entry['location']} was not written completely")


def _entry(tensor: TensorProto) -> dict[str, str]:
    return {e.key: e.value for e in tensor.external_data}


def _nbytes(tensor: TensorProto) -> int:
    return int(_entry(tensor)["length"])
