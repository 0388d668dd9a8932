"""Floors for the time of a step: bytes over bandwidth, operations over peak, the host link for experts not on the card.

Within a layer the mixer and router come before the experts, so their times add; inside the expert product the card's
memory, the tensor cores and the host link work side by side, so the slowest counts:

    seconds = max(dense bytes / bandwidth, dense flops / peak)
            + max(card expert bytes / bandwidth, expert flops / peak, host expert bytes / link)

Vendor's peaks, no launch overhead: a kernel may come near these numbers and never beats them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clover.engines.gpus import Backend, Gpu
from clover.engines.planner.memory import Weights, kv_bytes_per_token, recurrent_bytes
from clover.engines.planner.parameters import ParameterCounts
from clover.engines.planner.routing import (
    RoutingAssumptions,
    coreset_distinct,
    expected_distinct,
    hit_rate,
    preview_distinct,
    union_distinct,
)
from clover.exporter.config import ModelConfig

Bound = Literal["memory", "compute", "host link"]
TOKENS_PER_STEP = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
DISTINCT = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Machine:
    """The model as placed on a target."""

    config: ModelConfig
    counts: ParameterCounts
    weights: Weights
    gpu: Gpu
    backend: Backend
    context: int  # tokens already committed when the step runs
    sequences: int
    experts_resident: int
    routing: RoutingAssumptions


@dataclass(frozen=True)
class StepCost:
    """One run of the step graph. Rows and bytes are over all sequences; `distinct` is experts touched per layer."""

    name: str
    rows: int
    distinct: float
    hit_rate: float
    dense_bytes: int
    card_expert_bytes: int
    host_expert_bytes: int
    dense_flops: int
    expert_flops: int
    dense_seconds: float
    expert_seconds: float
    link_seconds: float
    seconds: float
    bound: Bound


@dataclass(frozen=True)
class ThroughputRow:
    """Tokens per second (all sequences) at each tokens per step, when a preview touches `distinct` experts a layer."""

    distinct: float
    expected: bool  # the number the plan itself expects
    tokens_per_second: tuple[float, ...]


@dataclass(frozen=True)
class BlockPerformance:
    """Costs of decoding with one block size. `break_even` is None when plain decoding is faster at any number."""

    block_size: int
    denoise: StepCost
    commit_and_preview: StepCost
    autoregressive: StepCost
    verify: StepCost
    prefill: StepCost
    tokens_per_step: tuple[int, ...]
    throughput: tuple[ThroughputRow, ...]
    autoregressive_tokens_per_second: float
    break_even: float | None


def step_cost(
    m: Machine, name: str, commit: int, preview: int, logit_rows: int, distinct: float, block_size: int = 0
) -> StepCost:
    """Cost of a run with `commit` and `preview` rows per sequence and `logit_rows` logits per sequence."""
    c, sizes, counts, s = m.config, m.weights.by_class, m.counts.by_class, m.sequences
    rows = s * (commit + preview)
    # Bytes: all dense weights once, the embedding's rows, the head when logits are wanted, the states, the logits.
    head = sizes["lm_head"] or sizes["embed"]
    dense = sizes["attention"] + sizes["gdn"] + sizes["shared_expert"] + sizes["router"] + sizes["small"]
    dense += rows * sizes["embed"] // c.vocab_size
    dense += (head + 2 * s * logit_rows * c.vocab_size * 4) if logit_rows else 0
    dense += s * recurrent_bytes(c) * (2 if commit else 1)
    dense += s * (m.context + commit + preview) * kv_bytes_per_token(c, m.backend)
    # Operations: two per weight and row; attention over the context and the run's own rows; the GDN state.
    linear = counts["attention"] + counts["gdn"] + counts["shared_expert"] + counts["router"]
    flops = 2 * rows * linear + 2 * s * logit_rows * c.vocab_size * c.hidden_size
    q_width = c.num_attention_heads * c.head_dim
    flops += len(c.attention_layers) * 4 * rows * q_width * (m.context + commit + preview)
    state = c.value_width * c.linear_key_head_dim
    gdn_flops = 6 * commit * state + preview * (2 * state + 4 * block_size * c.value_width)
    flops += len(c.gdn_layers) * s * gdn_flops
    # Experts: each distinct one is read once; every row multiplies with top_k of them.
    distinct = min(distinct, float(c.num_experts))
    touched = distinct * c.num_hidden_layers * m.weights.per_expert
    resident = m.experts_resident / c.num_hidden_layers
    hits = m.routing.hit_rate
    if m.experts_resident >= m.counts.experts:
        hits = 1.0
    elif hits is None:
        hits = hit_rate(c.num_experts, resident, distinct, m.routing.popularity_skew)
    on_card, on_host = touched * hits, touched * (1 - hits)
    expert_flops = 2 * rows * c.num_experts_per_tok * m.counts.per_expert * c.num_hidden_layers

    bandwidth, peak = m.gpu.bandwidth_gbs * 1e9, m.gpu.bf16_tflops * 1e12
    link_seconds = on_host / (m.gpu.link_gbs * 1e9) if on_host else 0.0
    dense_seconds = max(dense / bandwidth, flops / peak)
    expert_seconds = max(on_card / bandwidth, expert_flops / peak)
    memory = dense / bandwidth + on_card / bandwidth
    bound: Bound = "memory" if memory >= flops / peak + expert_flops / peak else "compute"
    if link_seconds > max(expert_seconds, dense_seconds):
        bound = "host link"
    return StepCost(
        name, rows, distinct, hits, int(dense), int(on_card), int(on_host), flops, expert_flops,
        dense_seconds, expert_seconds, link_seconds, dense_seconds + max(expert_seconds, link_seconds), bound,
    )  # fmt: skip


def commit_distinct(m: Machine, rows: int) -> float:
    """Distinct experts one sequence's commit rows touch in a layer: unrestricted top-k under the block's skew."""
    c = m.config
    if rows == 1:
        return float(c.num_experts_per_tok)
    # top_p above 1 keeps every expert: the same simulation without the coreset.
    return coreset_distinct(c.num_experts, c.num_experts_per_tok, rows, 2.0, c.num_experts, m.routing.block_skew)


def block_seconds(block_size: int, tokens_per_step: float, denoise: float, commit_and_preview: float) -> float:
    """Seconds for one block that takes block_size / tokens_per_step previews, the first of them in the run that commits
    the block before."""
    return (block_size / tokens_per_step - 1) * denoise + commit_and_preview


def break_even(block_size: int, denoise: float, commit_and_preview: float, autoregressive: float) -> float | None:
    """Tokens per step at which a block takes as long as decoding its tokens one by one; None when it never does.

    Solves block_seconds(B, n) = B * autoregressive for n; n is at most B (one step per block).
    """
    steps = 1 + (block_size * autoregressive - commit_and_preview) / denoise
    return max(1.0, block_size / steps) if steps >= 1 else None


def block_performance(m: Machine, block_size: int, prefill_chunk: int) -> BlockPerformance:
    """Every kind of run with block size `block_size`, and tokens per second as a function of what is not known."""
    c, s, b, experts = m.config, m.sequences, block_size, m.config.num_experts

    def over_sequences(*distinct: float) -> float:
        return distinct[0] if s == 1 and len(distinct) == 1 else union_distinct(experts, *(distinct * s))

    preview = preview_distinct(c, b, m.routing)
    commit = commit_distinct(m, b)
    denoise = step_cost(m, "denoise", 0, b, b, over_sequences(preview), b)
    fused = step_cost(m, "commit + first preview", b, b, b, over_sequences(commit, preview), b)
    single = step_cost(m, "autoregressive", 1, 0, 1, float(c.num_experts_per_tok) if s == 1 else expected_distinct(
        experts, c.num_experts_per_tok, s))  # fmt: skip
    verify = step_cost(m, "verify a draft", b, 0, b, over_sequences(commit))
    chunk = max(1, prefill_chunk // s)
    prefill = step_cost(m, "prefill chunk", chunk, 0, 0, over_sequences(commit_distinct(m, chunk)))

    tokens = tuple(n for n in TOKENS_PER_STEP if n <= b)
    distinct_values = sorted({float(d) for d in DISTINCT if c.num_experts_per_tok <= d <= experts} | {preview})
    rows = []
    for d in distinct_values:
        step = step_cost(m, "denoise", 0, b, b, over_sequences(d), b).seconds
        first = step_cost(m, "commit + first preview", b, b, b, over_sequences(commit, d), b).seconds
        speeds = tuple(s * b / block_seconds(b, n, step, first) for n in tokens)
        rows.append(ThroughputRow(d, d == preview, speeds))
    return BlockPerformance(
        b, denoise, fused, single, verify, prefill, tokens, tuple(rows), s / single.seconds,
        break_even(b, denoise.seconds, fused.seconds, single.seconds),
    )  # fmt: skip
