"""Runs one reply and writes down what every step did, what it cost and which experts it touched."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.engines.conditions import engine_conditions
from clover.engines.trace.profile import PARTS, part_times
from clover.engines.trace.routing import open_routing_session, replay
from clover.runtime.clover import Clover
from clover.runtime.decoder import Decoder, StepEvent, TokenInfo, TokensEvent
from clover.runtime.options import INERT, DecodeOptions
from clover.runtime.session import SequenceRows

PROFILED_SECONDS = 5.0  # a reply that takes less is profiled several times
PROFILED_RUNS = 5
OF_BLOCKS = ("block_size", "threshold", "coreset_top_p")
STEP_KINDS = ("commit", "commit and preview", "preview")


@dataclass(frozen=True)
class TracedStep:
    """One step. block, step: 0 where it drew no block. Times in milliseconds."""

    commit: int
    preview: int
    logit_rows: int
    engine_ms: float
    python_ms: float
    block: int
    step: int

    @property
    def kind(self) -> str:
        """One of STEP_KINDS."""
        if not self.preview:
            return "commit"
        return "commit and preview" if self.commit else "preview"


@dataclass(frozen=True)
class TracedPart:
    """Time in one part of the model, in milliseconds by kind of step."""

    part: str
    ms: Mapping[str, float]


@dataclass(frozen=True)
class TracedBlock:
    """A block's development: for each position its token, the step that filled it (0: never) and its confidence."""

    block: int
    steps: int
    texts: tuple[str, ...]
    filled_at: tuple[int, ...]
    confidence: tuple[float, ...]


@dataclass(frozen=True)
class TracedExperts:
    """Experts that the preview rows of a step touch in one layer, over all steps: mean, least and most.

    `free_*`: what the same rows would touch if each took its own best, without the coreset.
    """

    layer: int
    mean: float
    least: int
    most: int
    free_mean: float
    free_least: int
    free_most: int


@dataclass(frozen=True)
class Trace:
    """All of it, ready to be drawn."""

    conditions: Mapping[str, Any]
    prompt: str
    text: str
    tokens: tuple[tuple[str, float, int], ...]  # text, probability, step
    blocks: tuple[TracedBlock, ...]
    steps: tuple[TracedStep, ...]
    parts: tuple[TracedPart, ...]  # empty where the engine is not ONNX Runtime on this CPU
    experts: tuple[TracedExperts, ...]
    experts_in_all: int
    experts_per_token: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def record(
    engine: Clover,
    prompt: Sequence[int],
    options: DecodeOptions,
    *,
    threads: int | None = None,
    provider: str | None = None,
    progress: Callable[[str], None] = lambda phase: None,
) -> Trace:
    """One reply to a prompt of token ids: once to warm up and once timed. The timed run's steps are then run again on the
    CPU, with the profiler on where the engine runs there too, and with the routing given out. `threads` and `provider` as
    the engine was loaded with. `progress` gets each phase."""
    progress("warming up")
    _run(engine, prompt, options)
    progress("timing")
    steps, rows, events, tokens = _run(engine, prompt, options)
    conditions = engine_conditions(engine.bundle, threads, provider)
    config, context = engine.bundle.manifest.config, engine.session.max_context
    profiled: list[dict[str, float]] = []
    if conditions["provider"] == "cpu":
        progress("profiling")
        brief = sum(s.engine_ms for s in steps) < 1e3 * PROFILED_SECONDS
        repeats = PROFILED_RUNS if brief else 1
        profiled = part_times(engine.bundle, rows, max_context=context, threads=threads, repeats=repeats)
    progress("counting experts")
    most = max((len(r.tokens) for r in rows), default=0)
    routed = open_routing_session(engine.bundle, max_context=context, threads=threads, max_rows=most)
    try:
        replay(routed, rows)
        touched = np.array(routed.touched)  # [steps, layers, 2]
    finally:
        routed.close()
    return Trace(
        conditions={
            **conditions,
            "mode": options.mode,
            **{name: getattr(options, name) for name in OF_BLOCKS if name not in INERT.get(options.mode, ())},
            "prompt_tokens": len(prompt),
            "reply_tokens": len(tokens),
        },
        prompt=_text(engine, prompt),
        text=_text(engine, [t.id for t in tokens]),
        tokens=tuple((_text(engine, [t.id]), float(np.exp(t.logprob)), t.step) for t in tokens),
        blocks=tuple(_blocks(engine, events)),
        steps=tuple(steps),
        parts=_parts(steps, profiled),
        experts=tuple(_experts(touched)) if len(touched) else (),
        experts_in_all=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
    )


def _run(
    engine: Clover, prompt: Sequence[int], options: DecodeOptions
) -> tuple[list[TracedStep], list[SequenceRows], list[StepEvent], list[TokenInfo]]:
    """The steps, what they ran, the blocks they drew, and the reply."""
    decoder: Decoder = engine.decoder(prompt, options)
    session = engine.session
    steps, ran, drawn, tokens = [], [], [], []
    session.reset(0)
    while not decoder.done:
        began = time.perf_counter()
        rows = decoder.plan(0, session.max_rows)
        planned = time.perf_counter()
        (candidates,) = session.step([rows], decoder.candidates)
        stepped = time.perf_counter()
        events = decoder.accept(candidates)
        ended = time.perf_counter()
        own = [e for e in events if isinstance(e, StepEvent)]
        ran.append(rows)
        drawn += own
        tokens += [t for e in events if isinstance(e, TokensEvent) for t in e.tokens]
        steps.append(
            TracedStep(
                rows.commit,
                len(rows.tokens) - rows.commit,
                len(rows.logit_rows),
                1e3 * (stepped - planned),
                1e3 * (planned - began + ended - stepped),
                own[0].block if own else 0,
                own[0].step if own else 0,
            )
        )
    return steps, ran, drawn, tokens


def _parts(steps: Sequence[TracedStep], profiled: Sequence[Mapping[str, float]]) -> tuple[TracedPart, ...]:
    """Each step's time in the engine, shared out as in the profiled run of the same step."""
    spent: dict[tuple[str, str], float] = {}
    for step, parts in zip(steps, profiled, strict=False):
        whole = sum(parts.values())
        for part, ms in parts.items():
            key = (part, step.kind)
            spent[key] = spent.get(key, 0.0) + step.engine_ms * ms / (whole or 1.0)
    found = []
    for part in PARTS:
        own = {kind: spent[part, kind] for kind in STEP_KINDS if (part, kind) in spent}
        if own:
            found.append(TracedPart(part, own))
    return tuple(found)


def _blocks(engine: Clover, events: Sequence[StepEvent]) -> list[TracedBlock]:
    found = []
    for number in dict.fromkeys(e.block for e in events):
        own = [e for e in events if e.block == number]
        size = len(own[-1].tokens)
        at, confidence = [0] * size, [0.0] * size
        for event in own:
            for position, sure in zip(event.filled, event.confidence, strict=True):
                at[position], confidence[position] = event.step, sure
        texts = tuple("" if t is None else _text(engine, [t]) for t in own[-1].tokens)
        found.append(TracedBlock(number, len(own), texts, tuple(at), tuple(confidence)))
    return found


def _experts(touched: npt.NDArray[np.int64]) -> list[TracedExperts]:
    out = []
    for layer in range(touched.shape[1]):
        used, free = touched[:, layer, 0], touched[:, layer, 1]
        own = (float(used.mean()), int(used.min()), int(used.max()))
        out.append(TracedExperts(layer, *own, float(free.mean()), int(free.min()), int(free.max())))
    return out


def _text(engine: Clover, ids: Sequence[int]) -> str:
    """Text of ids, control tokens by name; the ids themselves where the bundle has no tokenizer."""
    if engine.tokenizer is None:
        return " ".join(map(str, ids))
    return engine.tokenizer.decode(ids, keep_control_tokens=True)
