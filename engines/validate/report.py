"""What a validation found, judged by its gates, as JSON data and as a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clover.engines.validate.gates import ADDED_UP_TIE, ROUTING_TIE, Gates
from clover.engines.validate.layers import HeadAgreement, LayerAgreement
from clover.engines.validate.metrics import Agreement, Gate
from clover.engines.validate.trace import Trace
from clover.engines.validate.weights import WeightError

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Comparison:
    """The engine against one set of weights."""

    name: str  # "own weights" or "checkpoint"
    gates: Gates
    layers: list[LayerAgreement]
    head: HeadAgreement
    trace: Trace | None
    weights: list[WeightError] = field(default_factory=list)  # stored tensors against the checkpoint's

    @property
    def failures(self) -> list[str]:
        """One sentence for each gate that failed, in the order of computation: the first names the culprit."""
        out = [w.failure for w in self.weights if w.failure]
        out += _failed("the embedding", self.head.embedding, self.gates.embedding)
        for layer in self.layers:
            out += layer_failures(layer, self.gates)
        out += _failed("the head", self.head.head, self.gates.head)
        if self.gates.added_up is not None:
            out += self._added_up(self.gates.added_up)
        if self.trace and self.gates.trace_tie is not None and self.trace.margin > self.gates.trace_tie:
            first = next(s for s in self.trace.steps if not s.agrees and s.margin > self.gates.trace_tie)
            out.append(
                f"step {first.step} of the trace fills {first.engine}, the reference {first.reference} "
                f"(a probability {first.margin:.2g} apart)"
            )
        return out

    def _added_up(self, gate: Gate) -> list[str]:
        for layer in self.layers:
            sets = layer.hidden_routing
            if sets.different and sets.margin <= ADDED_UP_TIE:
                return []  # a near-tie of the router: what follows is another computation
            failed = _failed(f"the hidden state after layer {layer.layer}, added up,", layer.hidden, gate)
            if failed:
                return failed
        return _failed("the logits, added up,", self.head.logits, gate)

    def to_json(self) -> dict[str, Any]:
        head = self.head
        return {
            "reference": self.name,
            "passed": not self.failures,
            "failures": self.failures,
            "embedding": head.embedding.to_json(),
            "layers": [
                {
                    "layer": x.layer, "kind": x.kind, "passed": not layer_failures(x, self.gates),
                    **{part: getattr(x, part).to_json() for part in ("mixer", "state", "router", "experts", "hidden")},
                    "routing": x.routing.to_json(), "hidden_routing": x.hidden_routing.to_json(),
                    "preview_kept_state": x.preview_kept_state,
                }
                for x in self.layers
            ],
            "head": head.head.to_json(),
            "logits": head.logits.to_json(),
            "same_best_token": {"rows": head.rows, "same": head.same_best},
            "weights": [w.to_json() for w in self.weights],
            "trace": self.trace.to_json() if self.trace else None,
        }  # fmt: skip


def layer_failures(layer: LayerAgreement, gates: Gates) -> list[str]:
    """The gates that one layer's parts failed, in the order of computation."""
    where = f"layer {layer.layer}"
    mixer = "GDN" if layer.kind == "linear_attention" else "attention"
    out = _failed(f"{where}: the {mixer} mixer", layer.mixer, gates.part)
    out += _failed(f"{where}: the {mixer} state", layer.state, gates.part)
    if not layer.preview_kept_state:
        out.append(f"{where}: a preview changed the committed state")
    out += _failed(f"{where}: the router", layer.router, gates.router)
    if layer.routing.different and layer.routing.margin > ROUTING_TIE:
        out.append(
            f"{where}: {layer.routing.different} of {layer.routing.chosen} chosen experts differ from what the router's "
            f"logits call for (by up to {layer.routing.margin:.2g})"
        )
    return out + _failed(f"{where}: the experts", layer.experts, gates.part)


def _failed(what: str, found: Agreement, gate: Gate) -> list[str]:
    if found.within(gate):
        return []
    return [
        f"{what} differs: cosine {found.cosine:.6g} (at least {gate.cosine:.6g}), "
        f"norm ratio {found.norm_ratio:.6g} (1 ± {gate.norm:g})"
    ]


def render(title: str, comparisons: list[Comparison]) -> RenderableType:
    """A table per reference, the trace, and the verdict."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for c in comparisons:
        parts.append(_table(f"{title}, against {_name(c)}", c))
        if c.weights:
            worst = min(c.weights, key=lambda w: w.snr_db)
            parts.append(Text(f"Stored weights: {worst.name} is worst, {worst.snr_db:.1f} dB from the checkpoint."))
        if c.trace:
            parts.append(Text(_trace_line(c.trace)))
        failures = c.failures
        if failures:
            parts += [Text(f"FAILED: {line}.", style="red") for line in failures[:5]]
            if len(failures) > 5:
                parts.append(Text(f"and {len(failures) - 5} more; see --json.", style="red"))
        else:
            parts.append(Text(f"passed, against {_name(c)}.", style="green"))
    return Group(*parts)


def _name(c: Comparison) -> str:
    return "its own weights" if c.name == "own weights" else "the checkpoint"


def _table(title: str, c: Comparison) -> RenderableType:
    from rich.table import Table

    table = Table(title=title, caption="each part: 1 - cosine / norm ratio - 1; added up: since the tokens")
    for heading in ("layer", "mixer", "state", "router", "experts", "routing", "added up", "experts differ"):
        table.add_column(heading, justify="left" if heading == "layer" else "right", no_wrap=True)
    table.add_row("embedding", "", "", "", _cell(c.head.embedding), "", "", "")
    for x in c.layers:
        kind = "GDN" if x.kind == "linear_attention" else "attention"
        sets = x.hidden_routing
        differ = f"{sets.different}/{sets.chosen}" + (f" by {sets.margin:.1g}" if sets.different else "")
        table.add_row(
            f"{x.layer} {kind}", _cell(x.mixer), _cell(x.state), _cell(x.router), _cell(x.experts),
            f"{x.routing.different}/{x.routing.chosen}", _cell(x.hidden), differ,
            style="red" if layer_failures(x, c.gates) else "",
        )  # fmt: skip
    same = f"best {c.head.same_best}/{c.head.rows}"
    table.add_row("head", "", "", "", _cell(c.head.head), "", _cell(c.head.logits), same)
    return table


def _cell(a: Agreement) -> str:
    return f"{1 - a.cosine:.0e} / {a.norm_ratio - 1:+.0e}"


def _trace_line(trace: Trace) -> str:
    line = f"Trace of a block of {trace.block_size}: {trace.agreeing} of {len(trace.steps)} steps fill the same tokens"
    first = next((s for s in trace.steps if not s.agrees), None)
    if first is None:
        return f"{line}."
    return (
        f"{line}; first difference in step {first.step} (engine {first.engine}, reference {first.reference}, "
        f"a probability {first.margin:.2g} apart)."
    )
