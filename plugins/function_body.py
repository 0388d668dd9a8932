"""Writes an operator's ONNX function body: standard operators only, internals in float32, any activation type outside.

A runtime that has no kernel for the operator runs the body; TensorRT takes the plugin of the same name instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

from clover.exporter.graph.builder import OPSET, GraphBuilder, hash_bytes
from clover.plugins.op_spec import OpSpec


class FunctionBody(GraphBuilder):
    """GraphBuilder whose constants and attributes are nodes, since functions have no initializers."""

    def __init__(self, spec: OpSpec) -> None:
        super().__init__({})
        self._spec = spec
        self._made: dict[str, str] = {}
        self._attributes: dict[str, int] = {}  # name -> AttributeProto type
        self.scope(spec.name)

    def constant(self, array: NDArray[Any]) -> str:
        key = f"const.{array.dtype}.{'x'.join(map(str, array.shape))}.{hash_bytes(array)}"
        if key not in self._made:
            self._made[key] = self.op("Constant", value=numpy_helper.from_array(array))
        return self._made[key]

    def integer(self, name: str) -> str:
        """An integer attribute of the node as an int64 tensor of one element."""
        return self._attribute(name, AttributeProto.INT)

    def number(self, name: str) -> str:
        """A float attribute of the node as a float32 scalar."""
        return self._attribute(name, AttributeProto.FLOAT)

    def _attribute(self, name: str, kind: AttributeProto.AttributeType) -> str:
        if name not in self._made:
            output = f"{self._spec.name}.{name}"
            field = "value_int" if kind == AttributeProto.INT else "value_float"
            node = NodeProto(op_type="Constant", output=[output])
            node.attribute.append(AttributeProto(name=field, ref_attr_name=name, type=kind))
            self._nodes.append(node)
            self._attributes[name] = kind
            self._made[name] = self.reshape(output, 1) if kind == AttributeProto.INT else output
        return self._made[name]

    def shape(self, *parts: str) -> str:
        """A shape from int64 tensors of one element each."""
        return self.op("Concat", *parts, axis=0)

    def size(self, x: str, axis: int) -> str:
        """[1] int64: one dimension of x."""
        return self.op("Shape", x, start=axis, end=axis + 1)

    def like(self, x: str, other: str) -> str:
        return self.op("CastLike", x, other)

    def finish(self, *outputs: str) -> onnx.FunctionProto:
        """The finished body; `outputs` in the spec's order."""
        for value, spec in zip(outputs, self._spec.outputs, strict=True):
            self._nodes.append(helper.make_node("Identity", [value], [spec.name]))
        return helper.make_function(
            self._spec.domain,
            self._spec.name,
            list(self._spec.input_names),
            list(self._spec.output_names),
            self._nodes,
            [helper.make_opsetid("", OPSET)],
            attributes=sorted(self._attributes),
        )


def subgraph(nodes: Sequence[NodeProto], inputs: Sequence[str], outputs: Sequence[str], name: str) -> onnx.GraphProto:
    """A float32 subgraph whose shapes are left to inference."""

    def values(names: Sequence[str]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names]

    return helper.make_graph(list(nodes), name, values(inputs), values(outputs))
