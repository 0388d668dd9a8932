"""Parameter counts from shapes: which tensors a Clover checkpoint holds, and the class each belongs to.

The classes that may be quantised are those of exporter/precision.py; `router` and `small` (norms, convolutions,
in_proj_a/b, the block-diffusion tensors, the shared expert's gate) never are. Text only: the multi-token-prediction
layers and the vision tower belong to no class.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from clover.exporter.config import ModelConfig

ParameterClass = Literal["embed", "lm_head", "attention", "gdn", "shared_expert", "experts", "router", "small"]
PARAMETER_CLASSES: tuple[ParameterClass, ...] = get_args(ParameterClass)
PER_HEAD = ("A_log", "dt_bias", "bd_softmax_logit_scale", "bd_softmax_history_bias", "bd_softmax_history_c")


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a checkpoint whose experts are fused: its name without layout prefix, shape and class."""

    name: str
    shape: tuple[int, ...]
    parameter_class: ParameterClass

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParameterCounts:
    """Number of parameters of every class. `experts` counts all routed experts of all layers."""

    by_class: Mapping[ParameterClass, int]
    per_expert: int
    experts: int  # routed experts of all layers

    @property
    def total(self) -> int:
        return sum(self.by_class.values())

    def active(self, config: ModelConfig) -> int:
        """Parameters that take part in one row: all but the embedding table and the experts not chosen."""
        routed = config.num_experts_per_tok * config.num_hidden_layers * self.per_expert
        head = self.by_class["lm_head"] or self.by_class["embed"]  # a tied head multiplies by the embedding
        rest = sum(n for c, n in self.by_class.items() if c not in ("embed", "lm_head", "experts"))
        return rest + head + routed


def checkpoint_tensors(config: ModelConfig) -> Iterator[CheckpointTensor]:
    """Every tensor of `config`'s checkpoint, named as under `model.layers.N.`, experts fused."""
    c, h = config, config.hidden_size
    q_width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    heads, channels = c.linear_num_value_heads, c.conv_channels
    yield CheckpointTensor("model.embed_tokens.weight", (c.vocab_size, h), "embed")
    for n, kind in enumerate(c.layer_types):
        p = f"model.layers.{n}."
        if kind == "linear_attention":
            a = f"{p}linear_attn."
            yield CheckpointTensor(f"{a}in_proj_qkv.weight", (channels, h), "gdn")
            yield CheckpointTensor(f"{a}in_proj_z.weight", (c.value_width, h), "gdn")
            yield CheckpointTensor(f"{a}out_proj.weight", (h, c.value_width), "gdn")
            yield CheckpointTensor(f"{a}in_proj_b.weight", (heads, h), "small")
            yield CheckpointTensor(f"{a}in_proj_a.weight", (heads, h), "small")
            yield CheckpointTensor(f"{a}conv1d.weight", (channels, 1, c.linear_conv_kernel_dim), "small")
            yield CheckpointTensor(f"{a}conv_right_weight", (channels, c.conv_history), "small")
            yield CheckpointTensor(f"{a}norm.weight", (c.linear_value_head_dim,), "small")
            for name in PER_HEAD:
                yield CheckpointTensor(f"{a}{name}", (heads,), "small")
        else:
            a = f"{p}self_attn."
            yield CheckpointTensor(f"{a}q_proj.weight", (2 * q_width, h), "attention")  # per head [q, gate]
            yield CheckpointTensor(f"{a}k_proj.weight", (kv_width, h), "attention")
            yield CheckpointTensor(f"{a}v_proj.weight", (kv_width, h), "attention")
            yield CheckpointTensor(f"{a}o_proj.weight", (h, q_width), "attention")
            yield CheckpointTensor(f"{a}q_norm.weight", (c.head_dim,), "small")
            yield CheckpointTensor(f"{a}k_norm.weight", (c.head_dim,), "small")
        m, inner, shared = f"{p}mlp.", c.moe_intermediate_size, c.shared_expert_intermediate_size
        yield CheckpointTensor(f"{m}gate.weight", (c.num_experts, h), "router")
        yield CheckpointTensor(f"{m}experts.gate_up_proj", (c.num_experts, 2 * inner, h), "experts")
        yield CheckpointTensor(f"{m}experts.down_proj", (c.num_experts, h, inner), "experts")
        yield CheckpointTensor(f"{m}shared_expert.gate_proj.weight", (shared, h), "shared_expert")
        yield CheckpointTensor(f"{m}shared_expert.up_proj.weight", (shared, h), "shared_expert")
        yield CheckpointTensor(f"{m}shared_expert.down_proj.weight", (h, shared), "shared_expert")
        yield CheckpointTensor(f"{m}shared_expert_gate.weight", (1, h), "small")
        yield CheckpointTensor(f"{p}input_layernorm.weight", (h,), "small")
        yield CheckpointTensor(f"{p}post_attention_layernorm.weight", (h,), "small")
    yield CheckpointTensor("model.norm.weight", (h,), "small")
    if not c.tie_word_embeddings:
        yield CheckpointTensor("lm_head.weight", (c.vocab_size, h), "lm_head")


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Exact counts from the shapes of `checkpoint_tensors`."""
    counts: dict[ParameterClass, int] = dict.fromkeys(PARAMETER_CLASSES, 0)
    for tensor in checkpoint_tensors(config):
        counts[tensor.parameter_class] += tensor.size
    experts = config.num_experts * config.num_hidden_layers
    return ParameterCounts(counts, counts["experts"] // experts if experts else 0, experts)


# The first pattern that matches a name decides; ignored tensors come first, since mtp.* repeats the layers' names.
_IGNORED = re.compile(r"^(model\.)?(mtp|visual)\.")
_CLASSES: tuple[tuple[re.Pattern[str], ParameterClass], ...] = (
    (re.compile(r"(^|\.)embed_tokens\.weight$"), "embed"),
    (re.compile(r"(^|\.)lm_head\.weight$"), "lm_head"),
    (re.compile(r"\.self_attn\.[qkvo]_proj\.weight$"), "attention"),
    (re.compile(r"\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.weight$"), "gdn"),
    (re.compile(r"\.mlp\.shared_expert\.(gate|up|down)_proj\.weight$"), "shared_expert"),
    (re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj|\d+\.(gate|up|down)_proj\.weight)$"), "experts"),
    (re.compile(r"\.mlp\.gate\.weight$"), "router"),
)


def parameter_class(name: str) -> ParameterClass | None:
    """The class of the checkpoint tensor `name`, in either layout; None for tensors a text-only model ignores."""
    if _IGNORED.search(name):
        return None
    return next((kind for pattern, kind in _CLASSES if pattern.search(name)), "small")
