"""Plain autoregressive decoding: the causal pass alone, one token a step, on the same weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clover.runtime.decoder import DecodeEvent, Progress, ReplyDecoder, TokenInfo, TokensEvent
from clover.runtime.options import DecodeOptions
from clover.runtime.select import alternatives, choose_tokens
from clover.runtime.session import Candidates, SequenceRows


class AutoregressiveDecoder(ReplyDecoder):
    """Commits the prompt, then one token after another."""

    def __init__(
        self,
        prompt: Sequence[int],
        options: DecodeOptions,
        *,
        eos_ids: Sequence[int],
        vocab_size: int,
        limit: int,
        thinking_ids: tuple[int, int] | None = None,
        after: Progress | None = None,
    ) -> None:
        """See ReplyDecoder."""
        super().__init__(
            prompt, options, eos_ids=eos_ids, vocab_size=vocab_size, limit=limit, thinking_ids=thinking_ids, after=after
        )
        self._rng = after.rng if after else np.random.default_rng(options.seed)
        self._asked = False

    @property
    def uncommitted(self) -> list[int]:
        """Tokens of the prompt and the reply, in order, that no step has committed yet."""
        return list(self._feed.pending)

    def plan(self, slot: int, max_rows: int) -> SequenceRows:
        tokens = np.array(self._feed.take(max_rows), np.int64)
        self._asked = not self._feed.pending
        rows = np.array([len(tokens) - 1], np.int64) if self._asked else np.zeros(0, np.int64)
        self._penalties.at_length(self.counts.response_tokens)
        return SequenceRows(slot, tokens, len(tokens), rows, self._penalties.adjustment())

    def accept(self, candidates: Candidates) -> list[DecodeEvent]:
        if not self._asked:
            self.counts.prefill_steps += 1
            return []
        self.counts.steps += 1
        return self.take(candidates)

    def take(self, candidates: Candidates) -> list[DecodeEvent]:
        """The next token from its causal logits [1, K]."""
        ids, logprobs = choose_tokens(candidates, self._options, self._rng)
        token = int(ids[0])
        self._count_adjustments()
        if token in self._eos:
            self._done = True
            return []
        self.counts.response_tokens += 1
        self._penalties.add([token])
        self._penalties.follow([token])
        self._feed.extend([token])
        if self.counts.response_tokens >= self._limit:
            self._done = self._truncated = True
        extra = alternatives(candidates, 0, self._options.logprobs)
        return [TokensEvent((TokenInfo(token, float(logprobs[0]), self.counts.steps, extra),))]
