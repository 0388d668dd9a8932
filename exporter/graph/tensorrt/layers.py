"""The layers of a GPU step graph.

Residual stream, norms, router, rotary positions and gates are float32: at tens of rows they cost nothing beside the
weights. Matrix products, KV cache and conv ring are in the activation type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from clover.exporter.config import ModelConfig
from clover.exporter.graph.tensorrt.builder import TypedBuilder
from clover.exporter.graph.tensorrt.rows import DeviceRows
from clover.exporter.precision import PrecisionPlan, TensorClass
from clover.plugins.bidirectional_gdn.spec import SPEC as GDN
from clover.plugins.bidirectional_gdn.spec import GatedDeltaNetAttributes
from clover.plugins.moe_coreset_routing.spec import SPEC as ROUTING
from clover.plugins.moe_coreset_routing.spec import CoresetAttributes
from clover.plugins.moe_experts.spec import INT4_ZERO_POINT, ExpertsAttributes
from clover.plugins.moe_experts.spec import SPEC as EXPERTS

FLOAT16_MAX = 65504.0

Rope = tuple[str, str]  # cos and sin tables [capacity, rotary_dim / 2] float32


@dataclass(frozen=True)
class DeviceLayers:
    """Authors one model's layers. Hidden states [N, H] are float32, N = S * T."""

    b: TypedBuilder
    config: ModelConfig
    precision: PrecisionPlan
    rows: DeviceRows
    capacity: int

    # -- dense -------------------------------------------------------------------------------

    def linear(self, x: str, name: str, kind: TensorClass) -> str:
        """x [N, K] in the activation type times the stored rows [M, K] -> [N, M] in the activation type."""
        return self.b.op("Gemm", x, self._matrix(name, kind), transB=1)

    def exact_linear(self, x: str, name: str) -> str:
        """x [N, K] float32 times stored float32 rows [M, K] -> float32: what is never quantised."""
        return self.b.op("Gemm", x, self.b.weight(f"{name}.weight"), transB=1)

    def norm(self, x: str, name: str) -> str:
        """RMSNorm of float32 x over its last axis, times the stored factor."""
        b = self.b
        return b.op("RMSNormalization", x, b.weight(f"{name}.weight"), epsilon=self.config.rms_norm_eps, axis=-1)

    def logits(self, x: str) -> str:
        """Final hidden states [N, H] float32 -> logits [N, V] float32.

        An INT4 head multiplies in float16 where nothing can overflow: logits near 20 are 1/8 apart in bfloat16, which
        ties tokens and moves confidences; float16 keeps three bits more at the same speed.
        """
        b = self.b
        if self.precision["lm_head"] == "int4" and b.low == TensorProto.BFLOAT16 and self._head_fits_float16():
            matrix = b.int4_weight("lm_head", self.precision.group_size, half=True)
            return b.to_float(b.op("Gemm", b.op("Cast", x, to=TensorProto.FLOAT16), matrix, transB=1))
        return b.from_low(self.linear(b.to_low(x), "lm_head", "lm_head"))

    def _head_fits_float16(self) -> bool:
        """Whether the head's scales are exact in float16, and no state or logit can leave its range."""
        scales, width = self.b.floats("lm_head.scales"), self.config.hidden_size
        # a normalised row has length √H, times the norm's largest factor; a weight is at most 8 scales
        longest = width**0.5 * float(np.abs(self.b.floats("final_norm.weight")).max())
        largest_logit = longest * width**0.5 * INT4_ZERO_POINT * float(np.abs(scales).max())
        exact = bool((scales.astype(np.float16).astype(np.float32) == scales).all())
        return exact and max(longest, largest_logit) < FLOAT16_MAX

    def embed(self) -> str:
        """[N, H] float32. A row is taken out of the table before it is dequantised further: the table stays packed."""
        b = self.b
        rows = b.op("Gather", self._matrix("embed", "embed"), b.reshape(self.rows.token_ids, -1), axis=0)
        return b.from_low(rows)

    def _matrix(self, name: str, kind: TensorClass) -> str:
        if self.precision[kind] == "int4":
            return self.b.int4_weight(name, self.precision.group_size)
        return self.b.low_weight(f"{name}.weight")

    def _per_sequence(self, x: str) -> str:
        """[N, ...] -> [S, T, ...]."""
        rows = self.rows
        return self.b.op("Reshape", x, self.b.op("Concat", rows.sequences, rows.length, self.b.ints(-1), axis=0))

    # -- token mixers ------------------------------------------------------------------------

    def gdn(self, layer: int, hidden: str) -> str:
        """Gated delta net: normalised hidden [N, H] float32 -> [N, H] float32."""
        b, c, g = self.b, self.config, f"layers.{layer}.gdn."
        heads = c.linear_num_value_heads
        conv_shape: Sequence[int | str] = ["S", c.conv_history, c.conv_channels]
        recurrent_shape: Sequence[int | str] = ["S", heads, c.linear_key_head_dim, c.linear_value_head_dim]
        conv = b.input(f"conv.{layer}", conv_shape, b.low)
        recurrent = b.input(f"recurrent.{layer}", recurrent_shape)
        projected = self._per_sequence(self.linear(b.to_low(hidden), f"{g}in_proj", "gdn"))
        qkv, z = b.ops("Split", 2, projected, b.ints(c.conv_channels, c.value_width), axis=2)
        gates = self._per_sequence(b.to_low(self.exact_linear(hidden, f"{g}ab_proj")))
        a, beta = b.ops("Split", 2, gates, b.ints(heads, heads), axis=2)
        mixed, new_conv, new_recurrent = b.custom(
            GDN, GatedDeltaNetAttributes.from_config(c).as_onnx(),
            qkv, a, beta, conv, recurrent, b.low_weight(f"{g}conv.weight"), b.low_weight(f"{g}conv_right.weight"),
            *(b.weight(f"{g}{n}.weight") for n in ("decay_rate", "dt_bias", "logit_scale", "history_bias", "history_c")),
            self.rows.commit_length, self.rows.row_length,
        )  # fmt: skip
        b.output(new_conv, f"next.conv.{layer}", conv_shape, b.low)
        b.output(new_recurrent, f"next.recurrent.{layer}", recurrent_shape)
        per_head = b.reshape(b.from_low(mixed), 0, 0, heads, c.linear_value_head_dim)
        gate = b.silu(b.reshape(b.from_low(z), 0, 0, heads, c.linear_value_head_dim))
        gated = b.op("Mul", self.norm(per_head, f"{g}norm"), gate)
        flat = b.to_low(b.reshape(gated, -1, c.value_width))
        return b.from_low(self.linear(flat, f"{g}out_proj", "gdn"))

    def attention(self, layer: int, hidden: str, rope: Rope) -> str:
        """Full attention: normalised hidden [N, H] float32 -> [N, H] float32."""
        b, c, g, rows = self.b, self.config, f"layers.{layer}.attention.", self.rows
        heads, kv_heads, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        shape: Sequence[int | str] = ["S", kv_heads, self.capacity, d]
        keys, values = b.input(f"keys.{layer}", shape, b.low), b.input(f"values.{layer}", shape, b.low)
        flat = self._per_sequence(self.linear(b.to_low(hidden), f"{g}qkv_proj", "attention"))
        widths = b.ints(heads * d, heads * d, kv_heads * d, kv_heads * d)
        q, gate, k, v = b.ops("Split", 4, flat, widths, axis=2)

        def rotated(x: str, kind: str, n: int) -> str:  # [S, T, n * D] -> [S, n, T, D]
            x = self.norm(b.reshape(b.from_low(x), 0, 0, n, d), f"{g}{kind}_norm")
            x = b.op("Transpose", x, perm=[0, 2, 1, 3])
            cos, sin = rope
            x = b.op("RotaryEmbedding", x, cos, sin, rows.absolute, rotary_embedding_dim=c.rotary_dim)
            return b.to_low(x)

        q, k = rotated(q, "q", heads), rotated(k, "k", kv_heads)
        v = b.op("Transpose", b.reshape(v, 0, 0, kv_heads, d), perm=[0, 2, 1, 3])
        new_keys = b.op("TensorScatter", keys, k, rows.position, axis=2)
        new_values = b.op("TensorScatter", values, v, rows.position, axis=2)
        mixed = b.op("Attention", q, new_keys, new_values, rows.visible, "", "", rows.kv_length, scale=d**-0.5)
        b.output(new_keys, f"next.keys.{layer}", shape, b.low)
        b.output(new_values, f"next.values.{layer}", shape, b.low)
        mixed = b.reshape(b.op("Transpose", mixed, perm=[0, 2, 1, 3]), 0, 0, heads * d)
        gated = b.op("Mul", b.from_low(mixed), b.op("Sigmoid", b.from_low(gate)))
        flat = b.to_low(b.reshape(gated, -1, heads * d))
        return b.from_low(self.linear(flat, f"{g}o_proj", "attention"))

    # -- experts -----------------------------------------------------------------------------

    def moe(self, layer: int, hidden: str, top_p: str) -> tuple[str, str]:
        """Routed experts and the gated shared expert: normalised hidden [N, H] float32 -> [N, H] float32, and how
        many rows chose each expert [E] int32."""
        b, c, g = self.b, self.config, f"layers.{layer}.moe."
        shared, experts = c.shared_expert_intermediate_size, c.num_experts
        router = self.exact_linear(hidden, f"{g}router")  # [N, E + 1]: experts, then the shared expert's gate
        logits, gate = b.ops("Split", 2, router, b.ints(experts, 1), axis=1)
        if c.coreset_enabled:
            given = CoresetAttributes.from_config(c)
            attributes = replace(given, min_experts=min(max(given.min_experts, given.top_k), experts))
            (routed,) = b.custom(
                ROUTING, attributes.as_onnx(), self._per_sequence(logits), self.rows.commit_length,
                self.rows.row_length, top_p,
            )  # fmt: skip
            logits = b.reshape(routed, -1, experts)
        low = b.to_low(hidden)
        table = b.input(f"expert_table.{layer}", [4, experts], TensorProto.INT64)
        group = self.precision.group_size if self.precision["experts"] == "int4" else 0
        sizes = ExpertsAttributes.from_config(c, group).as_onnx()
        mixed, counts = b.ops(EXPERTS.name, 2, low, logits, table, domain=EXPERTS.domain, **sizes)
        both = b.from_low(self.linear(low, f"{g}shared_gate_up", "shared_expert"))
        left, right = b.ops("Split", 2, both, b.ints(shared, shared), axis=1)
        inner = b.to_low(b.op("Mul", b.silu(left), right))
        always = b.from_low(self.linear(inner, f"{g}shared_down", "shared_expert"))
        return b.op("Add", b.from_low(mixed), b.op("Mul", always, b.op("Sigmoid", gate))), counts


def rope_tables(b: TypedBuilder, c: ModelConfig, capacity: int) -> Rope:
    """cos and sin of every position [capacity, rotary_dim / 2] float32, from float64 angles.

    At position 131,071 a float32 angle is off by 0.008 rad.
    """
    inverse = 1.0 / c.rope_theta ** (np.arange(0, c.rotary_dim, 2, dtype=np.float64) / c.rotary_dim)
    angle = np.arange(capacity, dtype=np.float64)[:, None] * inverse
    return b.constant(np.cos(angle).astype(np.float32)), b.constant(np.sin(angle).astype(np.float32))
