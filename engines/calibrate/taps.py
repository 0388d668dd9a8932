"""Makes a step graph give out sums over the inputs of its matrices, reduced to one number a channel inside the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clover.engines.observed_session import give_out
from clover.exporter.calibration import calibrated_items
from clover.exporter.config import ModelConfig
from clover.runtime.errors import BundleError


@dataclass(frozen=True)
class Taps:
    """Names of graph outputs: by matrix the sums [K] of squares and magnitudes of its input's rows; by layer the experts'
    input [S*T, H] and the routing [S, T, E]. Rows of routed experts must be told apart, so theirs come out whole."""

    sums: dict[str, tuple[str, str]]
    experts: dict[int, tuple[str, str]]

    @property
    def outputs(self) -> list[str]:
        return list(dict.fromkeys(n for pair in (*self.sums.values(), *self.experts.values()) for n in pair))


def add_taps(model: Any, config: ModelConfig, where: Path) -> Taps:
    """Adds the reductions to an onnx.ModelProto. Padding rows count nothing; every row that asks for logits does.

    Raises BundleError when the graph of the bundle `where` is not built that way.
    """
    inputs = matrix_inputs(model, config, where)
    node = _author(model)
    valid = _valid_rows(node)
    axis = node.constant("calibration.axis", np.array([0], np.int64))
    reduced: dict[str, tuple[str, str]] = {}
    sums, experts = {}, {}
    for item in calibrated_items(config):
        x = inputs[item.name]
        if item.tensor_class == "experts":
            experts[item.layer or 0] = (x, f"layers.{item.layer}.routing")
            continue
        if x not in reduced:
            rows = x if item.tensor_class == "lm_head" else node("Mul", x, valid)
            reduced[x] = (
                node("ReduceSumSquare", rows, axis, keepdims=0),
                node("ReduceL1", rows, axis, keepdims=0),
            )
        sums[item.name] = reduced[x]
    taps = Taps(sums, experts)
    give_out(model, taps.outputs)
    return taps


def matrix_inputs(model: Any, config: ModelConfig, where: Path) -> dict[str, str]:
    """By matrix (its name in the weight store) the value [rows, K] that it is multiplied by, in an onnx.ModelProto.

    Both matrices of the routed experts have the input of the operator that holds them. Raises BundleError when the graph
    of the bundle `where` is not built that way.
    """
    readers = {i: n for n in model.graph.node for i in n.input}
    made = {o for n in model.graph.node for o in n.output}
    found = {}
    for item in calibrated_items(config):
        reader = readers.get(f"{item.name}.qweight") or readers.get(f"{item.name}.weight")
        if reader is not None and reader.op_type == "Cast":  # bfloat16 weights are widened first
            reader = readers.get(reader.output[0])
        routed = item.tensor_class != "experts" or f"layers.{item.layer}.routing" in made
        if reader is None or reader.input[0] not in made or not routed:
            raise BundleError(
                f"the step graph of {where} does not show what {item.name} reads; build the bundle again with this clover."
            )
        found[item.name] = str(reader.input[0])
    return found


class _author:
    """Appends nodes to a model: node("Mul", a, b) → the output's name."""

    def __init__(self, model: Any) -> None:
        from onnx import helper, numpy_helper

        self._graph, self._count = model.graph, 0
        self._make: Callable[..., Any] = helper.make_node
        self._tensor: Callable[..., Any] = numpy_helper.from_array

    def __call__(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        self._count += 1
        name = f"calibration.{op_type}.{self._count}"
        self._graph.node.append(self._make(op_type, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, name: str, value: Any) -> str:
        self._graph.initializer.append(self._tensor(value, name))
        return name


def _valid_rows(node: _author) -> str:
    """[S*T, 1] float32: 1 for rows of a sequence, 0 for padding behind them."""
    from onnx import TensorProto

    zero, one = (node.constant(f"calibration.{i}", np.array(i, np.int64)) for i in (0, 1))
    last = node.constant("calibration.last", np.array([1], np.int64))
    column = node.constant("calibration.column", np.array([-1, 1], np.int64))
    length = node("Gather", node("Shape", "token_ids"), one)
    index = node("Range", zero, length, one)  # [T]
    inside = node("Less", index, node("Unsqueeze", "row_length", last))  # [S, T]
    return node("Reshape", node("Cast", inside, to=TensorProto.FLOAT), column)
