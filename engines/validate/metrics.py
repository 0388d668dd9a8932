"""How two arrays are compared: direction and size apart, since a cosine is blind to scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]

FAINT = 0.01  # rows smaller than this part of a typical row carry no direction of their own


@dataclass
class Agreement:
    """The worst agreement of two tensors over all runs of a validation.

    cosine: of the worst row. norm_ratio: |engine| / |reference| of the run where it is farthest from 1. 1 and 1 until
    something was added.
    """

    cosine: float = 1.0
    norm_ratio: float = 1.0

    def add(self, engine: Floats, reference: Floats) -> None:
        """Compares rows [N, D] of one run."""
        e, r = engine.astype(np.float64), reference.astype(np.float64)
        if not e.size:
            return
        if not np.isfinite(e).all():
            self.cosine, self.norm_ratio = -1.0, float("inf")
            return
        size_e, size_r = np.linalg.norm(e, axis=1), np.linalg.norm(r, axis=1)
        typical = float(np.sqrt((size_r**2).mean()))
        strong = np.maximum(size_e, size_r) > FAINT * typical
        product = np.maximum(size_e * size_r, np.finfo(np.float64).tiny)
        if typical > 0 and strong.any():
            self.cosine = min(self.cosine, float(((e * r).sum(1) / product)[strong].min()))
        ratio = norm_ratio(float(np.linalg.norm(e)), float(np.linalg.norm(r)))
        if abs(ratio - 1) > abs(self.norm_ratio - 1):
            self.norm_ratio = ratio

    def within(self, gate: Gate) -> bool:
        return self.cosine >= gate.cosine and abs(self.norm_ratio - 1) <= gate.norm


@dataclass(frozen=True)
class Gate:
    """Least cosine of any row, and most that the norm ratio may differ from 1."""

    cosine: float
    norm: float


def norm_ratio(engine: float, reference: float) -> float:
    """|engine| / |reference|; 1 when both are nothing."""
    if reference == 0.0:
        return 1.0 if engine == 0.0 else float("inf")
    return engine / reference


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
