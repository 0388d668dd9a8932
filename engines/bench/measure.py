"""Replies of one engine under several settings, interleaved, and what they add up to."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from clover.runtime.clover import Clover
from clover.runtime.decoder import TokensEvent
from clover.runtime.loop import StepTimes, decode
from clover.runtime.options import DecodeOptions
from clover.runtime.session import SequenceRows


@dataclass(frozen=True)
class Run:
    """One reply. Seconds; first: to the first token given out, None for an empty reply. plan: of its steps (see Plans)."""

    prompt: int
    prompt_tokens: int
    tokens: int
    steps: int
    blocks: int
    seconds: float
    engine_seconds: float
    first: float | None
    plan: int = 0


class Plans:
    """What replies ran, step by step, each different sequence of steps once."""

    def __init__(self) -> None:
        self.found: list[tuple[SequenceRows, ...]] = []
        self._known: dict[tuple[object, ...], int] = {}

    def add(self, rows: Sequence[SequenceRows]) -> int:
        """The number of this sequence of steps."""
        key = tuple(
            (r.commit, r.tentative, r.undo, r.coreset_top_p, r.tokens.tobytes(), r.logit_rows.tobytes()) for r in rows
        )
        if key not in self._known:
            self._known[key] = len(self.found)
            self.found.append(tuple(rows))
        return self._known[key]


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and extremes."""

    median: float
    low: float
    high: float
    quarter: float
    three_quarters: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None for no values."""
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], values[0], values[0], values[0], values[0])
        quarter, _, three_quarters = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), min(values), max(values), quarter, three_quarters)


@dataclass(frozen=True)
class Summary:
    """One setting over all prompts and repetitions. `tokens_per_step` and `steps_per_block` are of all runs together, their
    spreads of each run's. `ratio`: tokens/s against the first setting, paired by run."""

    name: str
    runs: int
    tokens: int
    tokens_per_second: Spread | None
    first_token_ms: Spread | None
    tokens_per_step: float
    tokens_per_step_spread: Spread | None
    steps_per_block: float | None  # None: no blocks in this mode
    steps_per_block_spread: Spread | None
    python_share: float
    ratio: Spread | None

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def run_once(
    engine: Clover, prompt: Sequence[int], options: DecodeOptions, number: int, plans: Plans | None = None
) -> Run:
    """One reply in slot 0, from an empty state. `plans` takes its steps: an append a step, while the clock runs."""
    decoder, first = engine.decoder(prompt, options), None
    times = StepTimes(rows=None if plans is None else [])
    began = time.perf_counter()
    engine.session.reset(0)
    for event in decode(engine.session, decoder, 0, times):
        if first is None and isinstance(event, TokensEvent):
            first = time.perf_counter() - began
    seconds, c = time.perf_counter() - began, decoder.counts
    steps = c.steps + c.prefill_steps
    plan = plans.add(times.rows) if plans is not None and times.rows is not None else 0
    return Run(number, len(prompt), c.response_tokens, steps, c.blocks, seconds, times.session, first, plan)


def measure(
    engine: Clover,
    prompts: Sequence[Sequence[int]],
    settings: Mapping[str, DecodeOptions],
    *,
    repeats: int,
    seed: int = 0,
    plans: Plans | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[Run]]:
    """`repeats` rounds over all prompts, each under every setting in an order of its own, after a round that warms up.

    What disturbs the machine for a while then disturbs every setting alike. Runs of one prompt and round stand at the
    same index of every setting's list. `plans` takes the steps of them all.
    """
    runs: dict[str, list[Run]] = {name: [] for name in settings}
    order, r = list(settings), random.Random(seed)
    total = (repeats + 1) * len(prompts) * len(settings)
    done = 0
    for number in range(repeats + 1):
        for index, prompt in enumerate(prompts):
            r.shuffle(order)
            for name in order:
                run = run_once(engine, prompt, settings[name], index, plans)
                if number:
                    runs[name].append(run)
                done += 1
                if progress:
                    progress(done, total)
    return runs


def summarise(runs: Mapping[str, Sequence[Run]]) -> list[Summary]:
    """A summary of each setting; the first is what the others' ratios are against."""
    base = next(iter(runs.values()))
    out = []
    for name, own in runs.items():
        rates = [r.tokens / r.seconds for r in own if r.tokens]
        pairs = [
            (r.tokens / r.seconds) / (b.tokens / b.seconds)
            for r, b in zip(own, base, strict=True)
            if r.tokens and b.tokens
        ]
        steps, blocks, seconds = sum(r.steps for r in own), sum(r.blocks for r in own), sum(r.seconds for r in own)
        out.append(
            Summary(
                name=name,
                runs=len(own),
                tokens=sum(r.tokens for r in own),
                tokens_per_second=Spread.of(rates),
                first_token_ms=Spread.of([1e3 * r.first for r in own if r.first is not None]),
                tokens_per_step=sum(r.tokens for r in own) / max(steps, 1),
                tokens_per_step_spread=Spread.of([r.tokens / r.steps for r in own if r.steps]),
                steps_per_block=steps / blocks if blocks else None,
                steps_per_block_spread=Spread.of([r.steps / r.blocks for r in own if r.blocks]),
                python_share=1 - sum(r.engine_seconds for r in own) / seconds,
                ratio=Spread.of(pairs),
            )
        )
    return out
