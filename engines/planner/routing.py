"""How many distinct experts a step touches, and how many of them are on the card: estimates, with their assumptions.

Nothing here is known before routing is measured, so every number is one of: given by the user (from a trace), an
exact expectation under a stated distribution, or a seeded simulation of the block coreset under it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from clover.exporter.config import ModelConfig
from clover.runtime.errors import CloverError

MAX_SKEW = 20  # every row's first expert is then the same
SIMULATED_ROWS = 2048  # rows drawn in all; a multiple of every block size


@dataclass(frozen=True)
class RoutingAssumptions:
    """What the plan assumes about routing. Skews are Zipf exponents: popularity of rank r is proportional to r^-skew.

    block_skew: how unevenly one block's rows use the experts of a layer (decides the coreset's size).
    popularity_skew: how unevenly experts are used over a whole conversation (decides the hit rate of the most used
        ones); 0, the default, is the worst case: resident experts are hit no more often than others.
    distinct: distinct experts a layer's preview touches per block, when measured; None: simulate.
    hit_rate: share of touched experts that are on the card, when measured; None: from popularity_skew.
    """

    block_skew: float = 1.0
    popularity_skew: float = 0.0
    distinct: float | None = None
    hit_rate: float | None = None

    def __post_init__(self) -> None:
        for name, skew in (("--block-skew", self.block_skew), ("--popularity-skew", self.popularity_skew)):
            if not 0 <= skew <= MAX_SKEW:
                raise CloverError(f"{name} is {skew}; it must be from 0, which means uniform routing, to {MAX_SKEW}.")
        if self.hit_rate is not None and not 0 <= self.hit_rate <= 1:
            raise CloverError(f"hit rate {self.hit_rate} is not between 0 and 1.")
        if self.distinct is not None and not 0 < self.distinct < math.inf:
            raise CloverError(f"{self.distinct} distinct experts per layer can't be; give a positive number.")


def expected_distinct(experts: int, top_k: float, rows: float) -> float:
    """Expected distinct experts when each of `rows` rows draws `top_k` of `experts` uniformly, independently.

    Balls in bins: E * (1 - (1 - k/E)^rows). The upper bound of unrestricted routing.
    """
    if not experts:
        return 0.0
    return experts * (1.0 - float((1.0 - min(top_k / experts, 1.0)) ** rows))


def union_distinct(experts: int, *sets: float) -> float:
    """Expected size of the union of independent random sets with the given expected sizes."""
    return experts * (1.0 - math.prod(1.0 - min(s / experts, 1.0) for s in sets)) if experts else 0.0


@lru_cache(maxsize=256)
def coreset_distinct(experts: int, top_k: int, rows: int, top_p: float, min_experts: int, skew: float) -> float:
    """Mean distinct experts a block of `rows` preview rows touches in one layer, under the block coreset.

    Simulates the rule itself (votes of each row's top-k probabilities, shares in descending order up to top_p, never
    fewer than min_experts, top-k inside the set) on router logits ln(r^-skew) + Gumbel noise, whose top-k are draws
    without replacement from the Zipf distribution. Seeded: the same arguments give the same number.
    """
    import numpy as np

    blocks = max(4, SIMULATED_ROWS // rows)
    rng = np.random.default_rng(20260530)
    popularity = -skew * np.log(np.arange(1, experts + 1))
    logits = popularity + rng.gumbel(size=(blocks, rows, experts))  # [blocks, rows, experts]
    probabilities: Any = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    touched = coreset_touched(probabilities, top_k, top_p, min_experts)  # [blocks, experts]
    return float(touched.sum(-1).mean())


def coreset_touched(probabilities: Any, top_k: int, top_p: float, min_experts: int) -> Any:
    """Which experts a block touches: router probabilities [..., rows, experts] to a mask [..., experts].

    top_p above 1 and min_experts equal to the number of experts give unrestricted top-k routing.
    """
    import numpy as np

    experts = probabilities.shape[-1]
    kth = np.partition(probabilities, experts - top_k, axis=-1)[..., experts - top_k, None]
    shares = np.where(probabilities >= kth, probabilities, 0.0).sum(-2)  # [..., experts]
    shares /= shares.sum(-1, keepdims=True)
    order = np.argsort(-shares, axis=-1, kind="stable")
    in_order = np.take_along_axis(shares, order, -1)
    before = np.cumsum(in_order, -1) - in_order
    kept = (before < top_p) | (np.arange(experts) < min_experts)  # the first to reach top_p is included
    inside = np.zeros_like(kept)
    np.put_along_axis(inside, order, kept, -1)
    restricted = np.where(inside[..., None, :], probabilities, -1.0)
    kth = np.partition(restricted, experts - top_k, axis=-1)[..., experts - top_k, None]
    return ((restricted >= kth) & (restricted > 0)).any(-2)


def preview_distinct(config: ModelConfig, rows: int, routing: RoutingAssumptions) -> float:
    """Distinct experts one block's preview touches in one layer."""
    experts, top_k = config.num_experts, config.num_experts_per_tok
    if routing.distinct is not None:
        return min(routing.distinct, float(experts))
    if not config.coreset_enabled:
        return expected_distinct(experts, top_k, rows)
    return coreset_distinct(
        experts, top_k, rows, config.coreset_top_p, max(config.coreset_min_experts, top_k), routing.block_skew
    )


def hit_rate(experts: int, resident: float, distinct: float, skew: float) -> float:
    """Share of a step's touched experts found on the card when the `resident` most popular of a layer are there.

    Expert r is touched with probability 1 - exp(-m r^-skew), m such that `distinct` are touched on average.
    With skew 0 this is resident / experts.
    """
    resident = min(max(resident, 0.0), float(experts))
    if not experts or resident >= experts:
        return 1.0
    if not skew:
        return resident / experts
    distinct = min(distinct, experts - 1e-9)
    weights = [r**-skew for r in range(1, experts + 1)]
    low, high = 0.0, 1.0
    while sum(1 - math.exp(-high * w) for w in weights) < distinct and high < 1e12:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if sum(1 - math.exp(-middle * w) for w in weights) < distinct:
            low = middle
        else:
            high = middle
    touched = [1 - math.exp(-high * w) for w in weights]
    whole = int(resident)
    on_card = sum(touched[:whole]) + (resident - whole) * touched[whole]
    return on_card / sum(touched)
