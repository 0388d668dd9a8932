"""What BidirectionalGatedDeltaNet takes and gives.

Dimensions: S sequences, T rows each (commit rows, then preview rows, then padding), C = 2·Hk·Dk + Hv·Dv
convolution channels (q, then k, then v), Hk key heads of Dk, Hv value heads of Dv (value head h reads key
head h // (Hv / Hk)), K convolution taps. The projections before it, and the gated RMSNorm and output
projection after it, stay outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clover.plugins.op_spec import COMMIT_LENGTH, ROW_LENGTH, Attributes, OpSpec, TensorSpec

if TYPE_CHECKING:
    from clover.exporter.config import ModelConfig

L2_EPSILON = 1e-6  # added to Σ x² when q and k are normalised

_ACTIVATION = ("float32", "bfloat16")
_FLOAT32 = ("float32",)


@dataclass(frozen=True)
class GatedDeltaNetAttributes(Attributes):
    """num_*_heads and *_head_dim: Hk, Hv, Dk, Dv. block_size: the block size the model was trained with
    (not the one decoded with, which is row_length - commit_length). history_readout_scale: s of s·Sᵀq̂."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    block_size: int
    history_readout_scale: float

    @property
    def key_width(self) -> int:
        """Columns of q, and of k, in qkv."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Columns of v in qkv, and of the output."""
        return self.num_value_heads * self.value_head_dim

    @classmethod
    def from_config(cls, config: ModelConfig) -> GatedDeltaNetAttributes:
        return cls(
            num_key_heads=config.linear_num_key_heads,
            num_value_heads=config.linear_num_value_heads,
            key_head_dim=config.linear_key_head_dim,
            value_head_dim=config.linear_value_head_dim,
            block_size=config.block_size,
            history_readout_scale=config.history_readout_scale,
        )


SPEC = OpSpec(
    name="BidirectionalGatedDeltaNet",
    version=1,
    doc="Token mixer of a gated-delta-net layer: causal and stateful for commit rows, block-wide and "
    "state-reading for preview rows.",
    inputs=(
        TensorSpec("qkv", _ACTIVATION, ("S", "T", "C"), "projected rows before the convolution"),
        TensorSpec("a", _ACTIVATION, ("S", "T", "Hv"), "decay projection; read for commit rows only"),
        TensorSpec("b", _ACTIVATION, ("S", "T", "Hv"), "beta projection, before the sigmoid; commit rows only"),
        TensorSpec("conv_state", _ACTIVATION, ("S", "K-1", "C"), "last committed rows of qkv, oldest first"),
        TensorSpec("recurrent_state", _FLOAT32, ("S", "Hv", "Dk", "Dv"), "clean recurrent state"),
        TensorSpec("conv_weight", _ACTIVATION, ("C", "K"), "causal taps, the current row's last"),
        TensorSpec("conv_right", _ACTIVATION, ("C", "K-1"), "preview rows' taps on the rows 1 … K-1 ahead"),
        TensorSpec("decay_scale", _FLOAT32, ("Hv",), "-exp(A_log)"),
        TensorSpec("dt_bias", _FLOAT32, ("Hv",), "added to a before the softplus"),
        TensorSpec("logit_scale", _FLOAT32, ("Hv",), "scale of q̂·k̂ in the block softmax (no 1/√Dk besides)"),
        TensorSpec("history_bias", _FLOAT32, ("Hv",), "history slot's logit at the trained block size"),
        TensorSpec("history_c", _FLOAT32, ("Hv",), "times ln(n / block_size), n the sequence's preview rows"),
        COMMIT_LENGTH,
        ROW_LENGTH,
    ),
    outputs=(
        TensorSpec("o", _ACTIVATION, ("S", "T", "Hv*Dv"), "mixed rows; zero in padding rows"),
        TensorSpec("new_conv_state", _ACTIVATION, ("S", "K-1", "C"), "conv_state after the commit rows"),
        TensorSpec("new_recurrent_state", _FLOAT32, ("S", "Hv", "Dk", "Dv"), "recurrent_state after them"),
    ),
    attributes=GatedDeltaNetAttributes,
)
