"""A GPU engine against ONNX Runtime's session of the same bundle: the same steps, state and candidates compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from clover.engines.bundle import Bundle
from clover.engines.open import open_session
from clover.engines.validate.metrics import Agreement, Gate
from clover.engines.validate.runs import Run
from clover.runtime.session import NO_ADJUSTMENT, Candidates, SequenceRows, StepSession

if TYPE_CHECKING:
    from rich.console import RenderableType

# With BF16's rounding of activations emulated in ONNX Runtime, on the 4 layers of the example model, at most 3e-3 and 5e-3
# (state), 0.06 (distance) and 6 % of rows with another best token were seen; wider here for the depth of larger models.
STATE = Gate(cosine=0.97, norm=0.03)
DISTANCE = 0.2  # mean total variation of the candidates' distributions
SAME_BEST = 0.8  # share of rows


@dataclass
class SessionAgreement:
    """The worst over all steps. states: by tensor (`recurrent.0`, `keys.3`, …), in the order of layers. rows: compared;
    same_best: rows whose best token is the same; distance: each row's total variation between the candidates'
    distributions, 0 where they are equal and 1 where they share nothing."""

    states: dict[str, Agreement] = field(default_factory=dict)
    rows: int = 0
    same_best: int = 0
    distances: list[float] = field(default_factory=list)

    @property
    def distance(self) -> float:
        return float(np.mean(self.distances)) if self.distances else 0.0

    @property
    def failures(self) -> list[str]:
        """One sentence for each gate that failed; the first layer named is where the engine went wrong."""
        out = [
            f"the GPU engine's {name} differs from ONNX Runtime's: cosine {a.cosine:.6g} (at least {STATE.cosine:g}), norm "
            f"ratio {a.norm_ratio:.6g} (1 ± {STATE.norm:g})"
            for name, a in self.states.items()
            if not a.within(STATE)
        ]
        if self.same_best < SAME_BEST * self.rows:
            out.append(f"the GPU engine's best token is ONNX Runtime's in {self.same_best} of {self.rows} rows")
        if not self.distance <= DISTANCE:  # also when it is not a number
            out.append(
                f"the GPU engine's probabilities are {self.distance:.3g} from ONNX Runtime's on average (at most {DISTANCE:g})"
            )
        return out

    @property
    def worst(self) -> tuple[str, Agreement]:
        """The state tensor of least cosine."""
        return min(self.states.items(), key=lambda item: item[1].cosine)

    def render(self) -> list[RenderableType]:
        """Lines for the terminal."""
        from rich.text import Text

        name, a = self.worst
        line = (
            f"GPU engine against ONNX Runtime: best token the same in {self.same_best} of {self.rows} rows, probabilities "
            f"{self.distance:.2g} apart on average; worst state {name}, 1 - cosine {1 - a.cosine:.1e}, norm ratio - 1 "
            f"{a.norm_ratio - 1:+.1e}."
        )
        failed = [Text(f"FAILED: {failure}.", style="red") for failure in self.failures[:5]]
        return [Text(line), *(failed or [Text("passed, against ONNX Runtime.", style="green")])]

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": not self.failures,
            "failures": self.failures,
            "rows": self.rows,
            "same_best_token": self.same_best,
            "mean_total_variation": self.distance,
            "states": {name: a.to_json() for name, a in self.states.items()},
        }


def compare_sessions(
    bundle: Bundle, runs: Sequence[Run], coreset_top_p: float, threads: int | None
) -> SessionAgreement:
    """Runs `runs` on the bundle's GPU engine and on ONNX Runtime, with as many of their sequences as the engine takes.

    Raises BundleError when the engine can't run here.
    """
    engine = bundle.manifest.engines[0]
    sequences = min(engine.sequences, len(runs[0].rows))
    host = open_session(bundle, sequences=sequences, threads=threads, cache=False, provider="cpu")
    try:
        gpu = open_session(bundle, sequences=sequences, provider="tensorrt")
        try:
            return compare_steps(gpu, host, runs, coreset_top_p, min(engine.candidates, 256), engine.logit_rows)
        finally:
            gpu.close()
    finally:
        host.close()


def compare_steps(
    gpu: StepSession, host: StepSession, runs: Sequence[Run], coreset_top_p: float, candidates: int, logit_rows: int
) -> SessionAgreement:
    """The two sessions on the same steps. candidates: per row; logit_rows: most rows of a step that give them."""
    found = SessionAgreement()
    for run in runs:
        plans = []
        for slot in range(gpu.sequences):
            n, commit = int(run.rows[slot]), int(run.commit[slot])
            wanted = np.arange(max(0, n - logit_rows), n)
            if n:
                plans.append(SequenceRows(slot, run.token_ids[slot, :n], commit, wanted, NO_ADJUSTMENT, coreset_top_p))
        if not plans:
            continue
        for got, want in zip(gpu.step(plans, candidates), host.step(plans, candidates), strict=True):
            found.rows += len(want.ids)
            found.same_best += int((got.ids[:, 0] == want.ids[:, 0]).sum())
            found.distances += [_distance(got, want, row) for row in range(len(want.ids))]
        for slot in range(gpu.sequences):
            mine, other = gpu.snapshot(slot).tensors, host.snapshot(slot).tensors
            for name in sorted(other, key=lambda n: int(n.rpartition(".")[2])):
                found.states.setdefault(name, Agreement()).add(_rows(mine, name), _rows(other, name))
    return found


def _distance(got: Candidates, want: Candidates, row: int) -> float:
    """Total variation of two lists of candidates; a token that one of them lacks has probability 0 there."""
    mine, other = (
        dict(zip(c.ids[row].tolist(), np.exp(c.logprobs[row].astype(np.float64)).tolist(), strict=True))
        for c in (got, want)
    )
    return 0.5 * float(sum(abs(mine.get(t, 0.0) - other.get(t, 0.0)) for t in mine.keys() | other.keys()))


def _rows(tensors: Mapping[str, Any], name: str) -> Any:
    values = np.asarray(tensors[name])
    return values.reshape(-1, values.shape[-1]).astype(np.float32)
