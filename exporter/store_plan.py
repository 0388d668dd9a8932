"""Which tensors the weight store holds, in which layout, and what each is made from.

A pure function of the config and the precision plan: the writer executes it, the graph refers to it, and a
GPU engine can read the same expert store. Layouts are those of ONNX Runtime's MatMulNBits and QMoE: rows are
output channels, two INT4 values a byte, low nibble first, value = (nibble - zero point) * scale. The zero point is 8,
unless the checkpoint came with zero points of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from clover.exporter.config import ModelConfig
from clover.exporter.precision import BITS, Precision, PrecisionPlan, TensorClass

DENSE_FILE = "weights/dense.safetensors"
EXPERTS_FILE = "weights/experts.safetensors"

# How checkpoint tensors become one float32 array before it is quantised or written.
Transform = Literal[
    "copy",  # one tensor as it is
    "rows",  # tensors stacked along the rows
    "attention_qkv",  # q_proj's [head: q, gate] rows regrouped as [all q, all gate], then k, v
    "one_plus",  # RMSNorm weights are stored as the factor 1 + w
    "decay_rate",  # A_log -> -exp(A_log)
    "flat_conv",  # [C, 1, K] -> [C, K]
    "expert_gate_up",  # rows gate0, up0, gate1, up1, ... of every expert
    "expert_down",
]


@dataclass(frozen=True)
class StoreTensor:
    """One tensor of a store file. `dtype` is safetensors' name for it (F32, BF16, U8)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = {"F32": 4, "BF16": 2, "U8": 1}[self.dtype]
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class StoreItem:
    """One unit of work: checkpoint tensors in, one matrix (its values, and scales when quantised) out."""

    name: str
    file: str
    tensor_class: TensorClass | None  # None: never quantised
    precision: Precision
    transform: Transform
    sources: tuple[str, ...]
    shape: tuple[int, ...]  # of the float array: [..., rows, columns]
    group_size: int = 0
    layer: int | None = None
    zero_points: bool = False

    def tensors(self) -> tuple[StoreTensor, ...]:
        """What is written: `name.weight`, or `name.qweight`, `name.scales` and, two to a byte, `name.zero_points`."""
        if self.precision in ("fp32", "bf16"):
            dtype = "F32" if self.precision == "fp32" else "BF16"
            return (StoreTensor(f"{self.name}.weight", dtype, self.shape),)
        *rows, columns = self.shape
        groups, packed = columns // self.group_size, self.group_size * BITS[self.precision] // 8
        # QMoE and GatherBlockQuantized take rows of bytes, MatMulNBits blocks of bytes: the same memory.
        blocks = (*rows, groups, packed) if self.transform in ("rows", "attention_qkv") else (*rows, groups * packed)
        values = StoreTensor(f"{self.name}.qweight", "U8", blocks)
        scales = StoreTensor(f"{self.name}.scales", "F32", (*rows, groups))
        if not self.zero_points:
            return values, scales
        return values, scales, StoreTensor(f"{self.name}.zero_points", "U8", (*rows, (groups + 1) // 2))


def store_plan(config: ModelConfig, precision: PrecisionPlan) -> tuple[StoreItem, ...]:
    """Every item of the weight store, in the order it is written."""
    return (*_dense_items(config, precision), *_expert_items(config, precision))


def _dense_items(c: ModelConfig, precision: PrecisionPlan) -> Iterator[StoreItem]:
    def matrix(
        name: str,
        kind: TensorClass,
        shape: tuple[int, int],
        *sources: str,
        transform: Transform = "rows",
        layer: int | None = None,
    ) -> StoreItem:
        return StoreItem(
            name, DENSE_FILE, kind, precision[kind], transform, sources, shape, precision.group_size, layer,
            kind in precision.zero_points,
        )  # fmt: skip

    def small(
        name: str, shape: tuple[int, ...], *sources: str, transform: Transform = "copy", layer: int | None = None
    ) -> StoreItem:
        return StoreItem(name, DENSE_FILE, None, "fp32", transform, sources, shape, layer=layer)

    h = c.hidden_size
    yield matrix("embed", "embed", (c.vocab_size, h), "model.embed_tokens.weight", transform="copy")
    for n, kind in enumerate(c.layer_types):
        p, q = f"model.layers.{n}.", f"layers.{n}."
        yield small(f"{q}input_norm", (h,), f"{p}input_layernorm.weight", transform="one_plus", layer=n)
        if kind == "linear_attention":
            s, g = f"{p}linear_attn.", f"{q}gdn."
            heads, channels = c.linear_num_value_heads, c.conv_channels
            yield matrix(
                f"{g}in_proj",
                "gdn",
                (channels + c.value_width, h),
                f"{s}in_proj_qkv.weight",
                f"{s}in_proj_z.weight",
                layer=n,
            )
            yield matrix(f"{g}out_proj", "gdn", (h, c.value_width), f"{s}out_proj.weight", layer=n)
            yield small(
                f"{g}ab_proj", (2 * heads, h), f"{s}in_proj_a.weight", f"{s}in_proj_b.weight", transform="rows", layer=n
            )
            yield small(
                f"{g}conv", (channels, c.linear_conv_kernel_dim), f"{s}conv1d.weight", transform="flat_conv", layer=n
            )
            yield small(f"{g}conv_right", (channels, c.conv_history), f"{s}conv_right_weight", layer=n)
            yield small(f"{g}decay_rate", (heads,), f"{s}A_log", transform="decay_rate", layer=n)
            yield small(f"{g}dt_bias", (heads,), f"{s}dt_bias", layer=n)
            yield small(f"{g}norm", (c.linear_value_head_dim,), f"{s}norm.weight", layer=n)
            yield small(f"{g}logit_scale", (heads,), f"{s}bd_softmax_logit_scale", layer=n)
            yield small(f"{g}history_bias", (heads,), f"{s}bd_softmax_history_bias", layer=n)
            yield small(f"{g}history_c", (heads,), f"{s}bd_softmax_history_c", layer=n)
        else:
            s, g = f"{p}self_attn.", f"{q}attention."
            q_width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
            yield matrix(
                f"{g}qkv_proj", "attention", (2 * q_width + 2 * kv_width, h),
                f"{s}q_proj.weight", f"{s}k_proj.weight", f"{s}v_proj.weight", transform="attention_qkv", layer=n,
            )  # fmt: skip
            yield matrix(f"{g}o_proj", "attention", (h, q_width), f"{s}o_proj.weight", layer=n)
            yield small(f"{g}q_norm", (c.head_dim,), f"{s}q_norm.weight", transform="one_plus", layer=n)
            yield small(f"{g}k_norm", (c.head_dim,), f"{s}k_norm.weight", transform="one_plus", layer=n)
        s, g, shared = f"{p}mlp.", f"{q}moe.", c.shared_expert_intermediate_size
        yield small(
            f"{q}post_attention_norm", (h,), f"{p}post_attention_layernorm.weight", transform="one_plus", layer=n
        )
        yield small(
            f"{g}router",
            (c.num_experts + 1, h),
            f"{s}gate.weight",
            f"{s}shared_expert_gate.weight",
            transform="rows",
            layer=n,
        )
        yield matrix(
            f"{g}shared_gate_up", "shared_expert", (2 * shared, h),
            f"{s}shared_expert.gate_proj.weight", f"{s}shared_expert.up_proj.weight", layer=n,
        )  # fmt: skip
        yield matrix(f"{g}shared_down", "shared_expert", (h, shared), f"{s}shared_expert.down_proj.weight", layer=n)
    yield small("final_norm", (h,), "model.norm.weight", transform="one_plus")
    yield matrix("lm_head", "lm_head", (c.vocab_size, h), "lm_head.weight")


def _expert_items(c: ModelConfig, precision: PrecisionPlan) -> Iterator[StoreItem]:
    e, i, h = c.num_experts, c.moe_intermediate_size, c.hidden_size
    for n in range(c.num_hidden_layers):
        sources = (f"model.layers.{n}.mlp.experts.gate_up_proj", f"model.layers.{n}.mlp.experts.down_proj")
        for name, transform, source, shape in (
            ("gate_up", "expert_gate_up", sources[0], (e, 2 * i, h)),
            ("down", "expert_down", sources[1], (e, h, i)),
        ):
            yield StoreItem(
                f"layers.{n}.experts.{name}", EXPERTS_FILE, "experts", precision["experts"],
                "expert_gate_up" if transform == "expert_gate_up" else "expert_down",
                (source,), shape, precision.group_size, n, "experts" in precision.zero_points,
            )  # fmt: skip
