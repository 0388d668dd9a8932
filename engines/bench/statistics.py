"""What counts of a comparison: shares with their uncertainty, and differences of pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054


def wilson(successes: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a share; (0, 1) for no trials."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    denominator = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / denominator
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / denominator
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True)
class PairedDifference:
    """Of pairs (the same case and run on both): second's share of successes minus first's, with a 95 % interval (Agresti and Min).

    p: two-sided exact binomial test of the pairs that differ (McNemar); 1 when none does.
    """

    pairs: int
    only_first: int
    only_second: int
    difference: float
    low: float
    high: float
    p: float


def paired_difference(pairs: Sequence[tuple[bool, bool]]) -> PairedDifference | None:
    """None for no pairs."""
    n = len(pairs)
    if not n:
        return None
    first, second = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    difference = (second - first) / n
    # Agresti and Min: half a pair more of each kind, so that the interval does not shrink to nothing where none differs
    more, left, right = n + 2, first + 0.5, second + 0.5
    centre = (right - left) / more
    half = Z95 * math.sqrt(left + right - (right - left) ** 2 / more) / more
    low, high = min(centre - half, difference), max(centre + half, difference)
    apart = first + second
    tail = sum(math.comb(apart, k) for k in range(min(first, second) + 1)) / 2**apart
    return PairedDifference(n, first, second, difference, max(-1.0, low), min(1.0, high), min(1.0, 2 * tail))
