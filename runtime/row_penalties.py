"""Penalties that change from row to row of one step.

A step has one list of adjustments for a sequence, but in a verification row i must be penalised for the draft's tokens
before it. So the few ids that change along the rows get, in the graph, an adjustment that no row's own exceeds;
the host takes it off again and puts each row's own in its place. An id below the best K + T by such scores can't be among a
row's best K, with T ids that change: nothing is lost as long as K + T candidates are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clover.runtime.options import DecodeOptions
from clover.runtime.penalties import Endings, PenaltyState
from clover.runtime.session import Adjustment, Candidates, Ints


def changing_most(options: DecodeOptions, rows: int, endings: Endings) -> int:
    """Most ids whose adjustment changes along `rows` rows: what to add to the candidates of one row."""
    penalised = options.presence_penalty != 0.0 or options.frequency_penalty != 0.0 or options.repetition_penalty != 1.0
    return (rows if penalised else 0) + (len(endings.ids) if options.length_ramp else 0)


class RowPenalties:
    """The adjustment of one step that verifies `tokens`, and the correction of its candidates."""

    def __init__(
        self,
        state: PenaltyState,
        options: DecodeOptions,
        tokens: Sequence[int],
        response_tokens: int,
        endings: Endings,
    ) -> None:
        """`state` and `response_tokens` stand for what is before the step's second row: `tokens[0]` is counted."""
        self._state = state
        changing = set(tokens[1:]) if state.penalised else set()
        ramp = 0.0
        if options.length_ramp:
            ends = [options.length_ramp.bias(response_tokens + n) for n in (0, len(tokens))]
            ramp = max(*ends, 0.0)
            turns = any(ends) and not set(tokens[1:]).isdisjoint(endings.thinking or ())  # what it raises changes
            if ends[0] != ends[1] or turns:
                changing |= endings.ids
        self._ids: Ints = np.array(sorted(changing), np.int64)
        if not len(self._ids):
            self.adjustment = state.adjustment()
            return
        # a penalty below zero is a reward: its scale and its most are put in, so that the score stays an upper bound
        reward = max(0.0, -options.presence_penalty) + max(0.0, -options.frequency_penalty) * len(tokens)
        self._scale = min(1.0, options.repetition_penalty)
        bias = []
        for token in self._ids.tolist():
            _, now = state.of(token, ramp=0.0)
            fixed = float(options.logit_bias.get(token, 0.0))
            bias.append(max(now, fixed) + reward + (ramp if token in endings.ids else 0.0))
        self._bias = np.array(bias, np.float32)
        rest = state.without(self._ids.tolist())
        self.adjustment = Adjustment(
            np.concatenate([rest.ids, self._ids]),
            np.concatenate([rest.scale, np.full(len(self._ids), self._scale, np.float32)]),
            np.concatenate([rest.bias, self._bias]),
        )

    @property
    def constant(self) -> bool:
        """Whether every row has the step's adjustment."""
        return not len(self._ids)

    def row(self, candidates: Candidates, row: int, count: int) -> Candidates:
        """One row's `count` best candidates under the penalties as the state now has them."""
        ids, scores, logprobs = candidates.ids[row], candidates.scores[row], candidates.logprobs[row]
        if len(self._ids):
            at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
            columns = np.flatnonzero(self._ids[at] == ids)
            scores = scores.copy()
            for column in columns.tolist():
                scale, bias = self._state.of(int(ids[column]))
                bounded = scores[column] - self._bias[at[column]]
                raw = bounded * self._scale if bounded > 0 else bounded / np.float32(self._scale)
                scores[column] = (raw / np.float32(scale) if raw > 0 else raw * np.float32(scale)) + np.float32(bias)
            best = np.lexsort((ids, -scores))[:count]  # ties: lower id first, as in the graph
            return Candidates(ids[None, best], logprobs[None, best], scores[None, best])
        return Candidates(ids[None, :count], logprobs[None, :count], scores[None, :count])
