"""Runs one reply and writes down what every step did, what it cost and which experts it touched."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.engines.open import PREFILL_ROWS
from clover.runtime.clover import Clover
from clover.runtime.decoder import Decoder, StepEvent, TokenInfo, TokensEvent
from clover.runtime.errors import BundleError
from clover.runtime.options import DecodeOptions
from clover.runtime.ort_session import OrtSession
from clover.runtime.session import Candidates, SequenceRows, StepSession

USED = -1e29  # a routing logit above this marks an expert that the row uses


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
    experts: tuple[TracedExperts, ...]
    experts_in_all: int
    experts_per_token: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class RoutingSession(OrtSession):
    """A session that also keeps, of each step's preview rows, the experts used and the router's own choice."""

    def __init__(self, model: bytes, weights: Path, layers: int, top_k: int, **options: Any) -> None:
        super().__init__(model, weights, **options)
        self._given = [f"layers.{n}.{what}" for n in range(layers) for what in ("routing", "router_logits")]
        self._top_k = top_k
        self.touched: list[npt.NDArray[np.int64]] = []  # per step with previews [layers, 2]: used, free
        self.masks: list[npt.NDArray[np.bool_]] = []  # per step with previews [layers, experts]: used

    def _bind(self, *shape: int) -> Any:
        binding = super()._bind(*shape)
        for name in self._given:
            binding.io.bind_output(name, "cpu")
        return binding

    def step(self, rows: Sequence[SequenceRows], candidates: int = 1) -> list[Candidates]:
        out = super().step(rows, candidates)
        (row,) = rows
        preview = slice(row.commit, len(row.tokens))
        if preview.start < preview.stop:
            binding = next(reversed(self._bindings.values()))  # the one just used
            values = [v.numpy() for v in binding.io.get_outputs()[-len(self._given) :]]
            counts, masks = [], []
            for routing, router in zip(values[::2], values[1::2], strict=True):
                experts = routing.shape[-1]
                used = routing.reshape(-1, experts)[preview] > USED  # [rows, E]
                free = np.argsort(-router.reshape(-1, experts)[preview], axis=1, kind="stable")[:, : self._top_k]
                masks.append(used.any(axis=0))
                counts.append((int(masks[-1].sum()), len(np.unique(free))))
            self.touched.append(np.array(counts))
            self.masks.append(np.stack(masks))
        return out


def open_routing_session(engine: Clover, threads: int | None) -> RoutingSession:
    """The bundle's graph with every layer's routing given out. Raises BundleError when it has none."""
    import onnx
    from onnx import TensorProto, helper

    bundle, config = engine.bundle, engine.bundle.manifest.config
    model = onnx.load_model_from_string(bundle.graph_bytes)
    made = {o for node in model.graph.node for o in node.output}
    present = {o.name for o in model.graph.output}
    for layer in range(config.num_hidden_layers):
        for what in ("routing", "router_logits"):
            name = f"layers.{layer}.{what}"
            if name not in made:
                raise BundleError(f"the step graph of {bundle.directory} does not show {name}; build the bundle again.")
            if name not in present:
                model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return RoutingSession(
        model.SerializeToString(),
        bundle.directory,
        config.num_hidden_layers,
        config.num_experts_per_tok,
        max_context=engine.session.max_context,
        max_rows=max(PREFILL_ROWS, 2 * max(bundle.manifest.block_sizes)),
        threads=threads,
    )


def record(engine: Clover, prompt: Sequence[int], options: DecodeOptions, *, threads: int | None = None) -> Trace:
    """One reply to a prompt of token ids: once to warm up and once timed; once more with the routing given out."""
    _run(engine, engine.session, prompt, options)
    steps, events, tokens = _run(engine, engine.session, prompt, options)
    routed = open_routing_session(engine, threads)
    try:
        _run(engine, routed, prompt, options)
        touched = np.array(routed.touched)  # [steps, layers, 2]
    finally:
        routed.close()
    manifest = engine.bundle.manifest
    config = manifest.config
    first = next((t for t in events), None)
    return Trace(
        conditions={
            "model": manifest.model.name,
            "target": manifest.target.name,
            "backend": f"{manifest.target.backend} {manifest.target.backend_version}",
            "precision": manifest.precision["classes"]["experts"],
            "mode": options.mode,
            "block_size": options.block_size if first else None,
            "threshold": options.threshold,
            "coreset_top_p": options.coreset_top_p,
            "threads": threads,
            "prompt_tokens": len(prompt),
            "response_tokens": len(tokens),
        },
        prompt=_text(engine, prompt),
        text=_text(engine, [t.id for t in tokens]),
        tokens=tuple((_text(engine, [t.id]), float(np.exp(t.logprob)), t.step) for t in tokens),
        blocks=tuple(_blocks(engine, events)),
        steps=tuple(steps),
        experts=tuple(_experts(touched)) if len(touched) else (),
        experts_in_all=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
    )


def _run(
    engine: Clover, session: StepSession, prompt: Sequence[int], options: DecodeOptions
) -> tuple[list[TracedStep], list[StepEvent], list[TokenInfo]]:
    decoder: Decoder = engine.decoder(prompt, options)
    steps, drawn, tokens = [], [], []
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
    return steps, drawn, tokens


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
