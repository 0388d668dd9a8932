"""Plain autoregressive decoding: the causal pass alone, one token a step, on the same weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clover.runtime.decoder import DecodeCounts, DecodeEvent, Progress, PromptFeed, TokenInfo, TokensEvent
from clover.runtime.fill import alternatives
from clover.runtime.options import DecodeOptions
from clover.runtime.penalties import Endings, PenaltyState
from clover.runtime.select import candidates_needed, choose_tokens
from clover.runtime.session import Candidates, SequenceRows


class AutoregressiveDecoder:
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
        """`limit`: most response tokens. `thinking_ids`: of `<think>` and `</think>`. `after`: another decoder began the reply; `prompt` then holds the tokens that
        are not committed yet."""
        self.counts = after.counts if after else DecodeCounts(prompt_tokens=len(prompt))
        self._options, self._eos, self._limit = options, frozenset(eos_ids), limit
        self._rng = after.rng if after else np.random.default_rng(options.seed)
        endings = Endings(tuple(eos_ids), thinking_ids)
        self._penalties = PenaltyState(options, endings, thinks=after.thinks if after else endings.thinks_after(prompt))
        self._penalties.add(after.response if after else ())
        self._penalties.follow(after.response if after else ())
        self._candidates = candidates_needed(options, vocab_size)
        self._feed = PromptFeed(list(prompt))
        self._done = self._truncated = self._asked = False

    @property
    def done(self) -> bool:
        return self._done

    @property
    def truncated(self) -> bool:
        return self._truncated

    @property
    def candidates(self) -> int:
        return self._candidates

    @property
    def resumable(self) -> int:
        return len(self._feed.pending) - 1  # the last one is committed for its logits

    def resume(self, committed: int) -> None:
        self._feed.take(committed)

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
        self.counts.ramp_bias = max(self.counts.ramp_bias, self._penalties.ramp_bias)
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
