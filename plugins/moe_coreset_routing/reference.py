"""MoECoresetRouting in NumPy.

Deployed routing decides in float32; float64 logits are decided in float64, for exact comparisons.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clover.plugins.moe_coreset_routing.spec import EXCLUDED_LOGIT, CoresetAttributes
from clover.plugins.numerics import BoolArray, FloatArray, IntArray, row_ranges, softmax, top_indices


def moe_coreset_routing(
    logits: FloatArray,  # [S, T, E]
    commit_length: IntArray,  # [S]
    row_length: IntArray,  # [S]
    top_p: npt.ArrayLike,  # [S], or one number for all
    *,
    attributes: CoresetAttributes,
) -> FloatArray:
    """Returns routed_logits [S, T, E]: EXCLUDED_LOGIT outside the coreset of each sequence's preview rows.

    Raises ValueError when the lengths are not 0 ≤ commit_length ≤ row_length ≤ T.
    """
    routed = np.zeros_like(logits)
    shares = np.broadcast_to(np.asarray(top_p), logits.shape[:1])
    for s, (c, n) in enumerate(row_ranges(commit_length, row_length, logits.shape[1])):
        routed[s, :n] = logits[s, :n]
        if n > c and shares[s] < 1:
            allowed = block_coreset(softmax(logits[s, c:n]), float(shares[s]), attributes)
            routed[s, c:n] = np.where(allowed, logits[s, c:n], EXCLUDED_LOGIT)
    return routed


def block_coreset(probabilities: FloatArray, top_p: float, attributes: CoresetAttributes) -> BoolArray:
    """The experts a block may use: probabilities [p, E] of its preview rows (p ≥ 1) -> allowed [E].

    Each row votes with its top_k probabilities. Experts are taken in descending share of all votes (ties:
    lower index first) up to and including the first at which the running share reaches top_p.
    """
    voted = top_indices(probabilities, attributes.top_k)  # [p, top_k]
    votes = np.zeros_like(probabilities)
    np.put_along_axis(votes, voted, np.take_along_axis(probabilities, voted, axis=-1), axis=-1)
    share = votes.sum(axis=0) / votes.sum()  # [E]
    ranked = top_indices(share, len(share))
    running = np.cumsum(share[ranked])
    size = int((running < share.dtype.type(top_p)).sum()) + 1
    allowed = np.zeros(len(share), np.bool_)
    allowed[ranked[: max(size, attributes.min_experts)]] = True
    return allowed
