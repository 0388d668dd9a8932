"""One layer of the reference at a time, each part of it on the engine's own input.

Fed with what the engine's layer was fed, a part's difference is that part's own: errors of earlier layers don't hide
it, and the first bad layer is named rather than all that follow. A second sweep lets the reference run on by itself,
which shows what the differences add up to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.engines.validate.engine import EngineStep
from clover.engines.validate.metrics import Agreement, ExpertSets, Floats
from clover.exporter.config import ModelConfig
from clover.exporter.reference import ReferenceModel, ReferenceState, _Rows
from clover.plugins.moe_coreset_routing.reference import moe_coreset_routing
from clover.plugins.moe_coreset_routing.spec import USED_LOGIT, CoresetAttributes
from clover.plugins.moe_experts.reference import moe_experts, pair_rows, route
from clover.plugins.moe_experts.spec import ExpertsAttributes
from clover.plugins.numerics import row_ranges, sigmoid, silu

Bools = npt.NDArray[np.bool_]
SHARE_TIE = 1e-5  # float32 sums of votes in another order may move a coreset's share by this much


@dataclass
class LayerAgreement:
    """What was found of one layer. The parts are on the engine's own input; `hidden` has added up since the tokens."""

    layer: int
    kind: str
    mixer: Agreement = field(default_factory=Agreement)
    state: Agreement = field(default_factory=Agreement)
    router: Agreement = field(default_factory=Agreement)
    experts: Agreement = field(default_factory=Agreement)  # routed and shared experts, given the engine's routing
    routing: ExpertSets = field(default_factory=ExpertSets)  # given the engine's router logits
    preview_kept_state: bool = True
    hidden: Agreement = field(default_factory=Agreement)
    hidden_routing: ExpertSets = field(default_factory=ExpertSets)


@dataclass
class HeadAgreement:
    """Log-probabilities of every row: given the engine's last hidden state, and added up since the tokens."""

    embedding: Agreement = field(default_factory=Agreement)
    head: Agreement = field(default_factory=Agreement)
    logits: Agreement = field(default_factory=Agreement)
    rows: int = 0
    same_best: int = 0  # rows whose best token is the same, added up since the tokens


class LayerReference(ReferenceModel):
    """The reference's layers in parts. Hidden states are [S, T, H] in the model's dtype."""

    def mixer(
        self, layer: int, hidden: Floats, rows: _Rows, state: ReferenceState
    ) -> tuple[Floats, tuple[Floats, Floats]]:
        """The token mixer's output, and the layer's new state: (conv, recurrent) or (keys, values)."""
        p = f"model.layers.{layer}."
        x = self._norm(hidden, p + "input_layernorm.weight")
        if self.config.layer_types[layer] == "linear_attention":
            conv, recurrent = (s[layer].astype(self.dtype) for s in (state.conv, state.recurrent))
            mixed, *new = self._gdn(x, p + "linear_attn.", rows, conv, recurrent)
        else:
            keys, values = (s[layer].astype(self.dtype) for s in (state.keys, state.values))
            mixed, *new = self._attention(x, p + "self_attn.", rows, state.position, keys, values)
        return mixed, (new[0], new[1])

    def router_logits(self, layer: int, hidden: Floats) -> Floats:
        """[S, T, E]."""
        p = f"model.layers.{layer}."
        return self._linear(self._norm(hidden, p + "post_attention_layernorm.weight"), p + "mlp.gate.weight")

    def used_experts(self, logits: Floats, rows: _Rows, top_p: float) -> Bools:
        """Which experts each row uses [S, T, E], decided in the dtype of `logits`."""
        c = self.config
        if c.coreset_enabled:
            logits = moe_coreset_routing(
                logits, rows.commit_length, rows.row_length, top_p, attributes=CoresetAttributes.from_config(c)
            )
        used = np.zeros(logits.shape, bool)
        np.put_along_axis(used, route(logits, c.num_experts_per_tok)[0], True, axis=-1)
        return used & rows.valid[..., None]

    def experts(self, layer: int, hidden: Floats, routing: Floats, rows: _Rows) -> Floats:
        """Routed experts by `routing` logits [S, T, E] plus the gated shared expert; zeros in padding rows."""
        c, p = self.config, f"model.layers.{layer}.mlp."
        x = self._norm(hidden, f"model.layers.{layer}.post_attention_layernorm.weight")[rows.valid]  # [N, H]
        mixed = moe_experts(
            x, routing[rows.valid].astype(self.dtype),
            pair_rows(self.tensors[p + "experts.gate_up_proj"]), None, self.tensors[p + "experts.down_proj"], None,
            attributes=ExpertsAttributes.from_config(c, group_size=0),
        )  # fmt: skip
        s = p + "shared_expert."
        inner = silu(self._linear(x, s + "gate_proj.weight")) * self._linear(x, s + "up_proj.weight")
        gate = sigmoid(self._linear(x, p + "shared_expert_gate.weight"))
        out = np.zeros_like(hidden)
        out[rows.valid] = mixed + gate * self._linear(inner, s + "down_proj.weight")
        return out

    def embed(self, token_ids: npt.NDArray[np.int64], rows: _Rows) -> Floats:
        """[S, T, H], zeros in padding rows."""
        out = self.tensors["model.embed_tokens.weight"][np.where(rows.valid, token_ids, 0)].astype(self.dtype)
        out[~rows.valid] = 0
        return out

    def logits(self, hidden: Floats) -> Floats:
        """[..., H] -> [..., V]."""
        return self._linear(self._norm(hidden, "model.norm.weight"), "lm_head.weight")


class Remembered(Mapping[str, Floats]):
    """Tensors kept from one `forget` to the next, so that a layer's are read once for all runs."""

    def __init__(self, tensors: Mapping[str, Floats]) -> None:
        self._tensors = tensors
        self._kept: dict[str, Floats] = {}

    def __getitem__(self, name: str) -> Floats:
        if name not in self._kept:
            self._kept[name] = self._tensors[name]
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def forget(self) -> None:
        self._kept.clear()


def compare_layers(
    config: ModelConfig, tensors: Mapping[str, Floats], steps: Sequence[EngineStep], top_p: float, excluded: Sequence[int],
    dtype: npt.DTypeLike,
) -> tuple[list[LayerAgreement], HeadAgreement]:  # fmt: skip
    """Compares every layer of every step with the reference on `tensors`. Reads each tensor once."""
    kept = Remembered(tensors)
    model = LayerReference(config, kept, dtype)
    rows = [_rows(step) for step in steps]
    head = HeadAgreement()
    own = [model.embed(step.run.token_ids, r) for step, r in zip(steps, rows, strict=True)]
    for step, r, embedded in zip(steps, rows, own, strict=True):
        head.embedding.add(step.layers[0].entered[r.valid], embedded[r.valid])
    kept.forget()
    layers = []
    for n, kind in enumerate(config.layer_types):
        layers.append(LayerAgreement(n, kind))
        state = model.initial_state(len(rows[0].ranges))
        for i, (step, r) in enumerate(zip(steps, rows, strict=True)):
            _compare_parts(model, layers[n], step, r, top_p)
            own[i], state = _run_on(model, layers[n], step, r, top_p, own[i], state)
        kept.forget()
    for step, r, hidden in zip(steps, rows, own, strict=True):
        _compare_head(model, head, step, r, hidden, excluded)
    return layers, head


def _rows(step: EngineStep) -> _Rows:
    run = step.run
    return _Rows(run.commit, run.rows, row_ranges(run.commit, run.rows, run.token_ids.shape[1]), run.valid)


def _compare_parts(model: LayerReference, out: LayerAgreement, step: EngineStep, rows: _Rows, top_p: float) -> None:
    """Each part of layer `out.layer` on the engine's input to it."""
    n, values, valid = out.layer, step.layers[out.layer], rows.valid
    entered, after = (v.astype(model.dtype) for v in (values.entered, values.after_mixer))
    mixed, new = model.mixer(n, entered, rows, step.before)
    out.mixer.add(values.mixed[valid], mixed[valid])
    _compare_state(out, step, rows, new)
    out.router.add(values.router_logits[valid], model.router_logits(n, after)[valid])
    used = values.routing > USED_LOGIT
    _compare_routing(model, out.routing, values.router_logits, used, rows, top_p)
    given = values.hidden - values.after_mixer
    out.experts.add(given[valid], model.experts(n, after, values.routing, rows)[valid])


def _compare_routing(
    model: LayerReference, out: ExpertSets, logits: Floats, used: Bools, rows: _Rows, top_p: float
) -> None:
    """The engine's experts against those its own router logits call for, near-ties of the coreset's share allowed."""
    rivals = [model.used_experts(logits, rows, top_p + d) for d in (0.0, -SHARE_TIE, SHARE_TIE)]
    for s in range(len(logits)):
        valid = rows.valid[s]
        nearest = min(rivals, key=lambda rival: int((rival[s] != used[s])[valid].sum()))
        out.add(used[s, valid], nearest[s, valid], logits[s, valid])


def _compare_state(out: LayerAgreement, step: EngineStep, rows: _Rows, new: tuple[Floats, Floats]) -> None:
    n = out.layer
    gdn = out.kind == "linear_attention"
    names = ("conv", "recurrent") if gdn else ("keys", "values")
    for name, reference in zip(names, new, strict=True):
        before, after = (getattr(state, name)[n] for state in (step.before, step.after))
        for s, (commit, _) in enumerate(rows.ranges):
            start = int(step.before.position[s])
            if not commit:
                same = (
                    np.array_equal(after[s], before[s]) if gdn else np.array_equal(after[s, :start], before[s, :start])
                )
                out.preview_kept_state &= same
            elif gdn:
                out.state.add(after[s].reshape(1, -1), reference[s].reshape(1, -1))
            else:
                fresh = slice(start, start + commit)
                out.state.add(after[s, fresh].reshape(commit, -1), reference[s, fresh].reshape(commit, -1))


def _run_on(
    model: LayerReference, out: LayerAgreement, step: EngineStep, rows: _Rows, top_p: float, hidden: Floats,
    state: ReferenceState,
) -> tuple[Floats, ReferenceState]:  # fmt: skip
    """The layer on the reference's own hidden state and its own state."""
    n, values, valid = out.layer, step.layers[out.layer], rows.valid
    mixed, new = model.mixer(n, hidden, rows, state)
    after = hidden + mixed
    logits = model.router_logits(n, after)
    used = model.used_experts(logits, rows, top_p)
    out.hidden_routing.add((values.routing > USED_LOGIT)[valid], used[valid], logits[valid])
    hidden = after + model.experts(n, after, np.where(used, logits, -1e30), rows)
    out.hidden.add(values.hidden[valid], hidden[valid])
    first, second = ({n: part} for part in new)
    position = state.position + rows.commit_length
    if out.kind == "linear_attention":
        return hidden, ReferenceState(position, second, first, {}, {})
    return hidden, ReferenceState(position, {}, {}, first, second)


def _compare_head(
    model: LayerReference, out: HeadAgreement, step: EngineStep, rows: _Rows, hidden: Floats, excluded: Sequence[int]
) -> None:
    included = np.ones(step.ids.shape[2], bool)
    included[list(excluded)] = False
    engine = np.empty(step.logprobs.shape, np.float64)
    np.put_along_axis(engine, step.ids, step.logprobs.astype(np.float64), axis=2)  # by id
    engine = engine[rows.valid][:, included]  # [N, V']
    last = step.layers[-1].hidden.astype(model.dtype)
    same_input = log_softmax(model.logits(last[rows.valid])[:, included])
    added_up = log_softmax(model.logits(hidden[rows.valid])[:, included])
    # about their mean: a shift of all logits means nothing, and would make every cosine near 1
    out.head.add(*(x - x.mean(axis=1, keepdims=True) for x in (engine, same_input)))
    out.logits.add(*(x - x.mean(axis=1, keepdims=True) for x in (engine, added_up)))
    out.rows += len(engine)
    out.same_best += int((engine.argmax(1) == added_up.argmax(1)).sum())


def log_softmax(x: npt.NDArray[Any]) -> Floats:
    """Over the last axis."""
    shifted = x - x.max(axis=-1, keepdims=True)
    out: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out
