"""What MoEExperts takes and gives. Dimensions: N rows, H hidden, E experts of I intermediate units, G group size.

Rows of gate_up are interleaved gate0, up0, gate1, up1, …: one tile of a kernel then holds both halves of
SwiGLU. The INT4 layout is that of ONNX Runtime's `com.microsoft::QMoE` (`swiglu_fusion=1`): two values a byte,
low nibble first, value = nibble - 8, times the scale of its group of G consecutive inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clover.plugins.op_spec import Attributes, OpSpec, TensorSpec

if TYPE_CHECKING:
    from clover.exporter.config import ModelConfig

INT4_ZERO_POINT = 8

_ACTIVATION = ("float32", "bfloat16")


@dataclass(frozen=True)
class ExpertsAttributes(Attributes):
    """top_k: experts per row. intermediate: I. group_size: G for INT4 weights, 0 for float weights."""

    top_k: int
    intermediate: int
    group_size: int

    @classmethod
    def from_config(cls, config: ModelConfig, group_size: int) -> ExpertsAttributes:
        return cls(config.num_experts_per_tok, config.moe_intermediate_size, group_size)


SPEC = OpSpec(
    name="MoEExperts",
    version=1,
    doc="Σ over a row's top_k experts of softmax(router_logits), renormalised over them, times "
    "down(SiLU(gate x) · up x). Ties between experts go to the lower index. Rows are independent.",
    inputs=(
        TensorSpec("hidden", _ACTIVATION, ("N", "H"), "normalised rows"),
        TensorSpec("router_logits", ("float32",), ("N", "E"), "routed logits; excluded experts very negative"),
        TensorSpec(
            "gate_up", ("uint8", "float32", "bfloat16"), ("E", "2*I", "H/2"), "INT4 pairs, or float [E, 2*I, H]"
        ),
        TensorSpec("gate_up_scales", _ACTIVATION, ("E", "2*I", "H/G"), "INT4 only", optional=True),
        TensorSpec("down", ("uint8", "float32", "bfloat16"), ("E", "H", "I/2"), "INT4 pairs, or float [E, H, I]"),
        TensorSpec("down_scales", _ACTIVATION, ("E", "H", "I/G"), "INT4 only", optional=True),
    ),
    outputs=(TensorSpec("mixed", _ACTIVATION, ("N", "H"), "the routed experts' weighted sum"),),
    attributes=ExpertsAttributes,
)
