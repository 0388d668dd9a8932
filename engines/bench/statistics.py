"""What counts of a comparison: shares and times with their uncertainty, and differences of pairs.

Answers to one case are alike (a greedy server gives the same one every time), so runs of a case are not so many
independent trials. Cases are: every interval below is over cases, and says what other cases like these would give. More
runs make it narrower only as far as the answers to a case differ.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z95 = 1.959963984540054
RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """95 %. high None: no upper limit can be given."""

    low: float
    high: float | None


def wilson(successes: float, trials: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a share; (0, 1) for no trials. Counts need not be whole."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    denominator = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / denominator
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / denominator
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return (0.0 if successes == 0 else low), (1.0 if successes == trials else high)


def share_interval(by_case: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """Wilson's interval of the share of successes, from the answers to each case.

    Trials are divided by the design effect (Kish): how much more the shares of cases scatter than independent answers
    would; between 1 and the answers a case has. Where all answers are alike it is the latter.
    """
    answered = [case for case in by_case if case]
    trials = sum(map(len, answered))
    if not trials:
        return 0.0, 1.0
    successes = sum(map(sum, answered))
    effect = design_effect([[float(x) for x in case] for case in answered])
    return wilson(successes / effect, trials / effect)


def design_effect(by_case: Sequence[Sequence[float]]) -> float:
    """The variance of the mean over clustered values, over what it were if all were independent; from 1 to the mean
    number of values in a case, which is also what it is where the values don't differ at all, or there is one case."""
    trials, cases = sum(map(len, by_case)), len(by_case)
    mean = sum(map(sum, by_case)) / trials
    independent = sum((x - mean) ** 2 for case in by_case for x in case) / trials
    most = trials / cases
    if cases < 2 or not independent:
        return most
    # residual of each case's sum, as for a ratio estimate
    clustered = sum((sum(case) - mean * len(case)) ** 2 for case in by_case) / trials * cases / (cases - 1)
    return min(max(clustered / independent, 1.0), most)


@dataclass(frozen=True)
class PairedDifference:
    """Of pairs (the same case and run on both): second's share of successes minus first's, with a 95 % interval (Agresti
    and Min, pairs divided by their design effect).

    p: two-sided exact sign test of the cases in which one was right more often; 1 when there is none.
    """

    pairs: int
    only_first: int
    only_second: int
    difference: float
    low: float
    high: float
    p: float


def paired_difference(by_case: Sequence[Sequence[tuple[bool, bool]]]) -> PairedDifference | None:
    """From the pairs of each case. None for no pairs."""
    answered = [case for case in by_case if case]
    n = sum(map(len, answered))
    if not n:
        return None
    apart = [[int(b) - int(a) for a, b in case] for case in answered]
    first, second = (sum(d == sign for case in apart for d in case) for sign in (-1, 1))
    difference = (second - first) / n
    effect = design_effect([[float(d) for d in case] for case in apart])
    # Agresti and Min: half a pair more of each kind, so that the interval does not shrink to nothing where none differs
    more, left, right = n / effect + 2, first / effect + 0.5, second / effect + 0.5
    centre = (right - left) / more
    half = Z95 * math.sqrt(left + right - (right - left) ** 2 / more) / more
    low, high = min(centre - half, difference), max(centre + half, difference)
    better = [sum(case) for case in apart if sum(case)]
    p = sign_test(sum(b > 0 for b in better), len(better))
    return PairedDifference(n, first, second, difference, max(-1.0, low), min(1.0, high), p)


def sign_test(positive: int, trials: int) -> float:
    """Two-sided exact probability of a split at least as uneven, were both signs equally likely."""
    tail = sum(math.comb(trials, k) for k in range(min(positive, trials - positive) + 1))
    return min(1.0, 2 * tail / (1 << trials))


def median_interval(values: Sequence[float]) -> Interval | None:
    """Of independent values' median, by order statistics, whatever their distribution; None for fewer than six."""
    n, ordered = len(values), sorted(values)
    below, tail = 0, 0.0
    while tail + math.comb(n, below) / (1 << n) <= 0.025:
        tail += math.comb(n, below) / (1 << n)
        below += 1
    return Interval(ordered[below - 1], ordered[n - below]) if below else None


def ratio_of_times(by_case: Sequence[Sequence[float]]) -> tuple[float, Interval | None] | None:
    """Median over cases of each case's median ratio, and its interval. None where there is none."""
    medians = [statistics.median(case) for case in by_case if case]
    return (statistics.median(medians), median_interval(medians)) if medians else None


def time_per_success(by_case: Sequence[tuple[float, int]], seed: int = 0) -> tuple[float, Interval] | None:
    """All seconds over all successes, from each case's seconds and successes, and the interval of cases drawn anew with
    replacement (a seeded bootstrap). None for no success."""
    if not any(n for _, n in by_case):
        return None
    seconds, successes = np.array([s for s, _ in by_case]), np.array([n for _, n in by_case], float)
    drawn = np.random.default_rng(seed).multinomial(len(by_case), [1 / len(by_case)] * len(by_case), RESAMPLES)
    with np.errstate(divide="ignore"):
        low, high = np.quantile((drawn @ seconds) / (drawn @ successes), (0.025, 0.975), method="nearest")
    return float(seconds.sum() / successes.sum()), Interval(float(low), float(high) if np.isfinite(high) else None)
