"""Choosing tokens and positions: pure functions of a step's candidates."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clover.runtime.options import MAX_TOP_K, DecodeOptions
from clover.runtime.session import Candidates, Floats, Ints

SAMPLED_CANDIDATES = MAX_TOP_K  # sampling draws from the best 1024 tokens of a row, more than any tail that matters


def candidates_needed(options: DecodeOptions, vocab_size: int) -> int:
    """How many of the best tokens a step must return: 1 for greedy decoding."""
    wanted = 1 + options.logprobs if options.logprobs else 1
    if options.temperature > 0:
        wanted = max(wanted, options.top_k or SAMPLED_CANDIDATES)
    return min(wanted, vocab_size, SAMPLED_CANDIDATES)


def choose_tokens(candidates: Candidates, options: DecodeOptions, rng: np.random.Generator) -> tuple[Ints, Floats]:
    """One token for each row: (ids [R], raw log-probabilities [R]).

    Greedy takes the best adjusted logit. Sampling draws from softmax(adjusted / temperature) among the best top_k,
    then the smallest set whose probability reaches top_p; one uniform number a row, whatever the batch.
    """
    if options.temperature == 0.0:
        return candidates.ids[:, 0].copy(), candidates.logprobs[:, 0].copy()
    return sample_tokens(candidates, options, rng.random(len(candidates.ids)))


def sample_tokens(
    candidates: Candidates, options: DecodeOptions, uniform: npt.NDArray[np.float64]
) -> tuple[Ints, Floats]:
    """`choose_tokens` above temperature 0, with the rows' numbers `uniform` [R] in [0, 1) already drawn."""
    weights = sampling_weights(candidates.scores, options.temperature, options.top_k, options.top_p)  # [R, K]
    cumulative = np.cumsum(weights, axis=1)
    draw = uniform[:, None] * cumulative[:, -1:]
    column = np.minimum((cumulative <= draw).sum(axis=1), weights.shape[1] - 1)
    row = np.arange(len(weights))
    return candidates.ids[row, column], candidates.logprobs[row, column]


def sampling_weights(scores: Floats, temperature: float, top_k: int, top_p: float) -> npt.NDArray[np.float64]:
    """Unnormalised sampling probabilities [R, K] of candidates with adjusted logits `scores` in descending order."""
    logits = scores.astype(np.float64) / temperature
    weights = np.exp(logits - logits[:, :1])
    if top_k:
        weights[:, top_k:] = 0.0
    if top_p < 1.0:
        share = weights / weights.sum(axis=1, keepdims=True)
        before = np.cumsum(share, axis=1) - share
        weights = np.where(before < top_p, weights, 0.0)  # never empty: before is 0 for the best
    return weights


def positions_to_fill(confidence: Floats, threshold: float) -> npt.NDArray[np.intp]:
    """Which of the masked rows [R] are filled this step: those above the threshold, else the most confident one.

    Ties go to the lowest position.
    """
    sure = np.flatnonzero(confidence > threshold)
    return sure if len(sure) else np.array([int(np.argmax(confidence))])


def alternatives(candidates: Candidates, row: int, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` best (id, raw log-probability) pairs of a row, for logprobs."""
    if not count:
        return ()
    order = np.argsort(-candidates.logprobs[row], kind="stable")[:count]
    return tuple((int(candidates.ids[row, i]), float(candidates.logprobs[row, i])) for i in order)
