"""One block decoded by the real loop on the real session, with the reference asked the same question at every step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from clover.engines.bundle import Bundle
from clover.engines.open import Provider, open_session
from clover.engines.validate.layers import log_softmax
from clover.engines.validate.metrics import Floats
from clover.exporter.reference import ReferenceModel
from clover.runtime.decoder import StepEvent
from clover.runtime.fill import FillDecoder
from clover.runtime.options import make_options
from clover.runtime.select import positions_to_fill
from clover.runtime.session import SequenceRows


@dataclass(frozen=True)
class TraceStep:
    """One denoise step. Positions are of the block; tokens those that were filled."""

    step: int
    engine: dict[int, int]  # position → token filled by the engine
    reference: dict[int, int]
    best_differ: int  # masked positions whose best token differs
    margin: float  # how far the reference is from agreeing, as a probability; 0 when it does

    @property
    def agrees(self) -> bool:
        return self.engine == self.reference


@dataclass
class Trace:
    """The steps of one block. The reference follows the engine's path, so that each step is a question of its own."""

    block_size: int
    steps: list[TraceStep] = field(default_factory=list)

    @property
    def agreeing(self) -> int:
        return sum(s.agrees for s in self.steps)

    @property
    def margin(self) -> float:
        """The worst margin of a step where the two differ."""
        return max((s.margin for s in self.steps if not s.agrees), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
            "steps": [{**asdict(s), "agrees": s.agrees} for s in self.steps],
            "agreeing": self.agreeing,
            "margin": self.margin,
        }


def trace_block(
    bundle: Bundle,
    model: ReferenceModel,
    prompt: Sequence[int],
    coreset_top_p: float,
    provider: Provider,
    threads: int | None = None,
) -> Trace:
    """Decodes one block after `prompt` greedily, with the bundle's threshold and penalties. `provider`: what runs the bundle."""
    manifest = bundle.manifest
    given = {"mode": "fill", "temperature": 0.0, "coreset_top_p": coreset_top_p, "length_ramp": None, "logprobs": 0}
    options = make_options(manifest.defaults, given)
    limit, vocab = options.block_size, manifest.config.vocab_size
    # no end of sequence: the block is traced to its last position
    decoder = FillDecoder(prompt, options, mask_id=manifest.mask_token_id, eos_ids=(), vocab_size=vocab, limit=limit)
    session = open_session(
        bundle,
        max_context=min(manifest.max_context, len(prompt) + limit),
        threads=threads,
        cache=False,
        provider=provider,
    )
    state, trace = model.initial_state(1), Trace(limit)
    try:
        while not decoder.done:
            rows = decoder.plan(0, session.max_rows)
            (candidates,) = session.step([rows], decoder.candidates)
            lengths = np.array([rows.commit]), np.array([len(rows.tokens)])
            logits, state = model.step(rows.tokens[None], *lengths, state, rows.coreset_top_p)
            asked = (rows.logit_rows - rows.commit).tolist()
            if asked:
                raw, adjusted = _adjust(logits[0, rows.logit_rows], rows, manifest.excluded_token_ids)
                engine_best = candidates.ids[:, 0].copy()
            for event in decoder.accept(candidates):
                if isinstance(event, StepEvent):
                    filled = {p: int(event.tokens[p] or 0) for p in event.filled}
                    number = len(trace.steps) + 1
                    trace.steps.append(_step(number, filled, asked, engine_best, raw, adjusted, options.threshold))
    finally:
        session.close()
    return trace


def _adjust(logits: Floats, rows: SequenceRows, excluded: Collection[int]) -> tuple[Floats, Floats]:
    """Raw log-probabilities and adjusted logits [R, V], as the step graph defines them."""
    logits = logits.copy()
    logits[:, list(excluded)] = -1e30
    adjusted, a = logits.copy(), rows.adjustment
    before = adjusted[:, a.ids]
    adjusted[:, a.ids] = np.where(before > 0, before / a.scale, before * a.scale) + a.bias
    return log_softmax(logits), adjusted


def _step(
    number: int, engine: dict[int, int], asked: list[int], engine_best: Any, raw: Floats, adjusted: Floats,
    threshold: float,
) -> TraceStep:  # fmt: skip
    best = adjusted.argmax(axis=1)  # ties: lower id first
    probability = np.exp(raw[np.arange(len(best)), best])
    chosen = positions_to_fill(probability.astype(np.float32), threshold)
    reference = {asked[i]: int(best[i]) for i in chosen}
    margin = 0.0
    for i, position in enumerate(asked):
        if engine.get(position) == reference.get(position):
            continue
        if position in engine and position in reference:  # another token: by how much the reference prefers its own
            margin = max(margin, float(probability[i] - np.exp(raw[i, engine[position]])))
        else:  # filled by one side alone: by how much it misses the threshold, or being the most confident
            bar = threshold if (probability > threshold).any() else float(probability.max())
            margin = max(margin, abs(float(probability[i]) - bar))
    return TraceStep(number, engine, reference, int((best != engine_best).sum()), margin)
