"""What MoECoresetRouting takes and gives. Dimensions: S sequences, T rows each, E experts.

The op stands between the router and the experts, so that the experts need not know about blocks. A graph
for a model without coresets leaves it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clover.plugins.op_spec import COMMIT_LENGTH, ROW_LENGTH, Attributes, OpSpec, TensorSpec

if TYPE_CHECKING:
    from clover.exporter.config import ModelConfig

# Stands for -inf. Its softmax probability underflows to exactly 0, and unlike -inf it can't make a NaN
# (inf - inf, inf * 0) nor be mistaken for the mark a top-k kernel leaves on what it has already taken.
EXCLUDED_LOGIT = -1e30
USED_LOGIT = -1e29  # above this a routed logit marks an expert that the row may use


@dataclass(frozen=True)
class CoresetAttributes(Attributes):
    """top_k: experts each row votes for, and later uses. min_experts: the coreset is never smaller
    (all experts when the layer has fewer); at least top_k, or some of a row's experts would weigh nothing."""

    top_k: int
    min_experts: int

    @classmethod
    def from_config(cls, config: ModelConfig) -> CoresetAttributes:
        return cls(top_k=config.num_experts_per_tok, min_experts=config.coreset_min_experts)


SPEC = OpSpec(
    name="MoECoresetRouting",
    version=1,
    doc="Router logits in, router logits out: in preview rows, experts outside the block's coreset get "
    "EXCLUDED_LOGIT. Commit rows pass through. Padding rows may hold anything finite (the reference writes 0).",
    inputs=(
        TensorSpec("logits", ("float32",), ("S", "T", "E"), "router logits"),
        COMMIT_LENGTH,
        ROW_LENGTH,
        TensorSpec("top_p", ("float32",), ("S",), "share of the votes a coreset has to reach; 1 or more: all experts"),
    ),
    outputs=(TensorSpec("routed_logits", ("float32",), ("S", "T", "E"), "restricted router logits"),),
    attributes=CoresetAttributes,
)
