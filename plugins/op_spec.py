"""How a custom operation is described: its name, tensors and attributes, in order.

One description per op is read by the graph author, the kernels, the lowering to a backend's own ops
and the tests, so that none of them keeps its own list.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

DOMAIN = "clover"


@dataclass(frozen=True)
class TensorSpec:
    """One input or output.

    dtypes: allowed element types, ONNX spelling. Lengths may be int64 (ONNX Runtime) or int32 (GPU kernels).
    shape: symbolic dimensions; equal symbols of one op are equal sizes, () is a scalar.
    """

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[str, ...]
    doc: str
    optional: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Attributes:
    """Base of an op's attributes: every field is one ONNX attribute of the same name (int or float)."""

    def as_onnx(self) -> dict[str, Any]:
        """Attributes for `onnx.helper.make_node`."""
        return asdict(self)


@dataclass(frozen=True)
class OpSpec:
    """One operation of domain `clover`. Inputs and outputs are positional, in this order."""

    name: str
    version: int
    doc: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: type[Attributes]
    domain: str = DOMAIN

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(t.name for t in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(t.name for t in self.outputs)

    def input_index(self, name: str) -> int:
        """Position of input `name`; ValueError when the op has none."""
        return self.input_names.index(name)


LENGTH_DTYPES = ("int64", "int32")
COMMIT_LENGTH = TensorSpec("commit_length", LENGTH_DTYPES, ("S",), "rows to commit, at the front of each sequence")
ROW_LENGTH = TensorSpec(
    "row_length", LENGTH_DTYPES, ("S",), "commit rows plus preview rows; rows from here on are padding"
)
