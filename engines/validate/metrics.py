"""How two arrays are compared: direction and size apart, since a cosine is blind to scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]


@dataclass
class Agreement:
    """The worst agreement of two tensors over all runs of a validation.

    cosine: of all rows of a run as one vector. row_cosine: of the worst row. norm_ratio: |engine| / |reference| over
    all runs together, which averages rounding noise out and leaves a wrong scale. 1 until something was added.
    """

    cosine: float = 1.0
    row_cosine: float = 1.0
    _squares: tuple[float, float] = (0.0, 0.0)

    @property
    def norm_ratio(self) -> float:
        engine, reference = self._squares
        if reference == 0.0:
            return 1.0 if engine == 0.0 else math.inf
        return math.sqrt(engine / reference)

    def add(self, engine: Floats, reference: Floats) -> None:
        """Compares rows [N, D] of one run. A value that is not finite makes the cosine -1."""
        e, r = engine.astype(np.float64), reference.astype(np.float64)
        if not e.size:
            return
        if not np.isfinite(e).all():
            self.cosine = self.row_cosine = -1.0
            return
        product, squares_e, squares_r = (e * r).sum(axis=1), (e * e).sum(axis=1), (r * r).sum(axis=1)  # [N] each
        self.cosine = min(self.cosine, _cosine(product.sum(), squares_e.sum(), squares_r.sum()))
        self.row_cosine = min(self.row_cosine, *map(_cosine, product, squares_e, squares_r))
        self._squares = (self._squares[0] + float(squares_e.sum()), self._squares[1] + float(squares_r.sum()))

    def within(self, gate: Gate) -> bool:
        return self.cosine >= gate.cosine and abs(self.norm_ratio - 1) <= gate.norm

    def to_json(self) -> dict[str, float]:
        return {"cosine": self.cosine, "worst_row_cosine": self.row_cosine, "norm_ratio": self.norm_ratio}


def _cosine(product: float, squares_e: float, squares_r: float) -> float:
    """1 when both vectors are nothing, 0 when one is."""
    if squares_e == 0.0 or squares_r == 0.0:
        return float(squares_e == squares_r)
    return float(product / math.sqrt(squares_e * squares_r))


@dataclass(frozen=True)
class Gate:
    """Least cosine, and most that the norm ratio may differ from 1."""

    cosine: float
    norm: float


@dataclass
class ExpertSets:
    """How far two choices of experts differ: experts not shared, of all chosen, and the worst excuse.

    margin: the largest gap, in router logits of the reference, between an expert one side took and the expert the
    other took in its place; tiny when every difference is a near-tie.
    """

    different: int = 0
    chosen: int = 0
    margin: float = 0.0

    def add(self, engine: npt.NDArray[np.bool_], reference: npt.NDArray[np.bool_], logits: Floats) -> None:
        """Adds rows [N, E]: which experts each side uses, and the reference's router logits."""
        self.chosen += int(reference.sum())
        for row in np.flatnonzero((engine != reference).any(axis=1)):
            only_engine, only_reference = engine[row] & ~reference[row], reference[row] & ~engine[row]
            self.different += max(int(only_engine.sum()), int(only_reference.sum()))
            if only_engine.sum() != only_reference.sum():
                self.margin = float("inf")  # too many or too few experts is no tie
            else:
                gap = np.abs(np.sort(logits[row][only_engine]) - np.sort(logits[row][only_reference])).max()
                self.margin = max(self.margin, float(gap))

    def to_json(self) -> dict[str, float | int]:
        return {"different": self.different, "chosen": self.chosen, "margin": self.margin}
