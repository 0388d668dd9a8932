"""Replays routing traces against ways of choosing which experts are on the card, and counts bytes over the link.

A missed expert is read once over the link per step that touches it. What else crosses the link differs:
- `policy`: ResidencyPolicy's swaps between blocks; the way in is counted (as much goes out beside it, full duplex).
- `lru`: a miss replaces the least recently used expert during the step; the read is the load, so it costs no more.
  A captured step can't do this (the router's choice is known on the device only): a bound, not an option.
- `static`: the experts at the start, for ever. `best static`: the most used of the whole trace, known beforehand.
- `ideal`: Belady's rule with knowledge of the future, reading in place what is not worth keeping: no way misses less.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clover.engines.planner.routing import coreset_touched
from clover.engines.residency import Mask, ResidencyPolicy, ResidencySettings, touched_mask
from clover.runtime.errors import CloverError


@dataclass(frozen=True)
class Trace:
    """Steps in order; `block[i]` is the number of the block step i belongs to, never falling."""

    layers: int
    experts: int
    steps: tuple[Mask, ...]
    block: tuple[int, ...]


@dataclass(frozen=True)
class SyntheticSettings:
    """A made-up trace. Popularity is Zipf over a random order of each layer's experts.

    skew: how uneven use is over the whole trace. topic: how much a block prefers experts of its own (standard
    deviation of an offset to the router's logits). locality: how much of the topic the next block keeps (0: none, 1: all).
    step_locality: how much of a row's own preference stays from one step of a block to the next.
    """

    layers: int = 40
    experts: int = 256
    top_k: int = 8
    block_size: int = 32
    blocks: int = 60
    steps_per_block: int = 6
    skew: float = 0.5
    topic: float = 1.5
    locality: float = 0.9
    step_locality: float = 0.9
    top_p: float = 0.9
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one way of choosing did over a trace. Bytes are per step; a step touches `touched` experts over all layers."""

    name: str
    hit_rate: float
    touched: float
    read_bytes: float
    move_bytes: float

    @property
    def link_bytes(self) -> float:
        return self.read_bytes + self.move_bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "link_bytes": self.link_bytes}


def synthetic_trace(s: SyntheticSettings) -> Trace:
    """Blocks of `steps_per_block` previews under the coreset; a block's first run also commits the block before it."""
    rng = np.random.default_rng(s.seed)
    popularity = -s.skew * np.log(np.arange(1, s.experts + 1))
    logits = np.stack([rng.permutation(popularity) for _ in range(s.layers)])  # [layers, experts]
    topic = rng.normal(size=logits.shape)
    steps: list[Mask] = []
    block: list[int] = []
    committed: Mask | None = None
    for number in range(s.blocks):
        topic = s.locality * topic + np.sqrt(1 - s.locality**2) * rng.normal(size=topic.shape)
        shape = (s.layers, s.block_size, s.experts)
        row = rng.normal(size=shape)
        for step in range(s.steps_per_block):
            if step:
                row = s.step_locality * row + np.sqrt(1 - s.step_locality**2) * rng.normal(size=shape)
            scores = (logits + s.topic * topic)[:, None] + row  # [layers, rows, experts]
            probabilities = np.exp(scores - scores.max(-1, keepdims=True))
            probabilities /= probabilities.sum(-1, keepdims=True)
            touched: Mask = coreset_touched(probabilities, s.top_k, s.top_p, s.top_k)
            if step == 0 and committed is not None:
                touched = touched | committed
            steps.append(touched)
            block.append(number)
        committed = coreset_touched(probabilities, s.top_k, 2.0, s.experts)
    return Trace(s.layers, s.experts, tuple(steps), tuple(block))


def write_trace(path: Path, trace: Trace) -> None:
    """JSONL: {"layers": L, "experts": E}, then {"block": n, "experts": [[ids of layer 0], …]} per step."""
    lines = [json.dumps({"layers": trace.layers, "experts": trace.experts})]
    for mask, number in zip(trace.steps, trace.block, strict=True):
        lines.append(json.dumps({"block": number, "experts": [np.flatnonzero(layer).tolist() for layer in mask]}))
    temporary = path.with_name(path.name + ".part")
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_trace(path: Path) -> Trace:
    """Reads what `write_trace` writes. Raises CloverError naming the line that is wrong."""
    steps: list[Mask] = []
    block: list[int] = []
    layers = experts = 0
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CloverError(f"routing trace {path} can't be read: {error}.") from None
    for number, line in enumerate(filter(str.strip, text.splitlines()), start=1):
        try:
            value = json.loads(line)
            if number == 1:
                layers, experts = int(value["layers"]), int(value["experts"])
                continue
            ids = value["experts"]
            if len(ids) != layers or any(not 0 <= e < experts for layer in ids for e in layer):
                raise ValueError(f"not {layers} layers of ids below {experts}")
            if block and value["block"] < block[-1]:
                raise ValueError("blocks go backwards")
            steps.append(touched_mask(ids, experts))
            block.append(int(value["block"]))
        except (ValueError, KeyError, TypeError) as error:
            raise CloverError(
                f"routing trace {path}, line {number}: {error}; see docs/planner.md for the format."
            ) from None
    if not steps:
        raise CloverError(f"routing trace {path} holds no steps.")
    return Trace(layers, experts, tuple(steps), tuple(block))


def simulate(
    trace: Trace, capacity: int, bytes_per_expert: int, moves_per_block: int, settings: ResidencySettings | None = None
) -> list[Outcome]:
    """Every way of choosing over the same trace, with `capacity` experts on the card."""
    total = sum(int(mask.sum()) for mask in trace.steps)
    count = len(trace.steps)

    def outcome(name: str, misses: int, moves: int = 0) -> Outcome:
        return Outcome(
            name, 1 - misses / total if total else 1.0, total / count, misses * bytes_per_expert / count,
            moves * bytes_per_expert / count,
        )  # fmt: skip

    start = ResidencyPolicy(capacity, trace.layers, trace.experts)
    use = np.sum([mask.astype(np.float64) for mask in trace.steps], axis=0)
    best = ResidencyPolicy(capacity, trace.layers, trace.experts, initial_use=use)
    misses, moves = _policy(trace, capacity, moves_per_block, settings)
    return [
        outcome("policy", misses, moves),
        outcome("lru", _lru(trace, capacity, start.resident)),
        outcome("static", _static(trace, start.resident)),
        outcome("best static", _static(trace, best.resident)),
        outcome("ideal", _ideal(trace, capacity, start.resident)),
    ]


def _policy(trace: Trace, capacity: int, moves_per_block: int, settings: ResidencySettings | None) -> tuple[int, int]:
    policy = ResidencyPolicy(capacity, trace.layers, trace.experts, settings)
    misses = moved = 0
    for mask, number, before in zip(trace.steps, trace.block, (trace.block[0], *trace.block), strict=False):
        if number != before:
            moves = policy.plan_moves(moves_per_block)
            policy.apply(moves)
            moved += len(moves)
        misses += policy.observe(mask)
    return misses, moved


def _static(trace: Trace, resident: Mask) -> int:
    return sum(int(np.count_nonzero(mask & ~resident)) for mask in trace.steps)


def _touches(trace: Trace) -> Iterator[tuple[int, list[int]]]:
    for step, mask in enumerate(trace.steps):
        yield step, np.flatnonzero(mask).tolist()


def _lru(trace: Trace, capacity: int, resident: Mask) -> int:
    cache: OrderedDict[int, None] = OrderedDict.fromkeys(np.flatnonzero(resident).tolist())
    misses = 0
    for _, touched in _touches(trace):
        for expert in touched:
            if expert in cache:
                cache.move_to_end(expert)
                continue
            misses += 1
            if capacity:
                if len(cache) >= capacity:
                    cache.popitem(last=False)
                cache[expert] = None
    return misses


def _ideal(trace: Trace, capacity: int, resident: Mask) -> int:
    """Belady's rule: after each step, of what is on the card and what the step read, keep what is used again soonest.

    Experts have one size, and what a step read may be kept at no further cost, so nothing misses less.
    """
    never = len(trace.steps)
    number = trace.layers * trace.experts
    next_use = np.full((never + 1, number), never, dtype=np.int32)  # [step, expert]: first use at or after step
    for step in range(never - 1, -1, -1):
        next_use[step] = np.where(trace.steps[step].ravel(), step, next_use[step + 1])
    on_card = resident.ravel().copy()
    misses = 0
    for step, mask in enumerate(trace.steps):
        touched = mask.ravel()
        misses += int(np.count_nonzero(touched & ~on_card))
        candidates = np.flatnonzero(on_card | touched)
        if candidates.size > capacity:
            soonest = np.argsort(next_use[step + 1, candidates], kind="stable")[:capacity]
            candidates = candidates[soonest]
        on_card[:] = False
        on_card[candidates] = True
    return misses


def outcomes_table(outcomes: Sequence[Outcome], link_gbs: float) -> Any:
    """A table for the terminal; milliseconds are bytes over the link at its peak."""
    from rich.table import Table

    table = Table(title="Experts on the card: hit rate and bytes over the link per step")
    table.add_column("choice", no_wrap=True)
    for heading in ("hit rate", "touched", "read MB", "moved MB", "link MB", "link ms"):
        table.add_column(heading, justify="right")
    for o in outcomes:
        table.add_row(
            o.name, f"{o.hit_rate:.1%}", f"{o.touched:,.0f}", f"{o.read_bytes / 1e6:,.1f}", f"{o.move_bytes / 1e6:,.1f}",
            f"{o.link_bytes / 1e6:,.1f}", f"{o.link_bytes / link_gbs / 1e6:,.2f}" if link_gbs else "-",
        )  # fmt: skip
    return table
