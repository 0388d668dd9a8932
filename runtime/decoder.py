"""What one reply's decoder is: rows in, candidates back, events out. Every mode implements it.

The loop that drives decoders is always the same: plan → step → accept (see runtime/loop.py); a scheduler may put
the plans of many decoders into one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from clover.runtime.options import DecodeOptions
from clover.runtime.penalties import Endings, PenaltyState
from clover.runtime.select import candidates_needed
from clover.runtime.session import Candidates, SequenceRows


class TokenInfo(NamedTuple):
    """One response token: its id, raw log-probability at the step that chose it, and the alternatives there.

    A named tuple because replies make thousands: they cost less than half of a frozen dataclass.
    """

    id: int
    logprob: float
    step: int
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A block developed by one step. `tokens[i]` is None while position i is a mask."""

    block: int
    step: int  # within the block, from 1
    tokens: tuple[int | None, ...]
    filled: tuple[int, ...]  # positions filled by this step
    confidence: tuple[float, ...]  # of the filled positions


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """Response tokens that are final, in order."""

    tokens: tuple[TokenInfo, ...]


DecodeEvent = StepEvent | TokensEvent


@dataclass
class DecodeCounts:
    """What a decode did so far."""

    prompt_tokens: int = 0
    response_tokens: int = 0
    prefill_steps: int = 0  # steps that only committed prompt tokens
    steps: int = 0  # steps that could produce response tokens
    blocks: int = 0  # blocks begun
    ramp_bias: float = 0.0  # the strongest bias that the length ramp added in a step
    penalised: int = 0  # most token ids whose logits penalties changed in a step
    drafted: int = 0  # tokens that a causal pass checked; 0 in modes that don't draft
    accepted: int = 0  # of them, those it kept


@dataclass(frozen=True)
class Progress:
    """What a decoder that goes on from another one takes over: the reply so far, its counts, its random numbers."""

    response: Sequence[int]
    counts: DecodeCounts
    rng: np.random.Generator
    thinks: bool = False  # the prompt opened thinking


class Decoder(Protocol):
    """One reply in progress."""

    counts: DecodeCounts

    @property
    def done(self) -> bool:
        """No further step is needed."""

    @property
    def truncated(self) -> bool:
        """A limit cut the reply, and neither an end-of-sequence token nor the caller ended it."""

    @property
    def candidates(self) -> int:
        """Candidates per logit row that `accept` needs."""

    @property
    def resumable(self) -> int:
        """Most prompt tokens that the slot may hold already when the decode starts."""

    def resume(self, committed: int) -> None:
        """The slot holds the first `committed` prompt tokens (at most `resumable`); call it before the first plan."""

    def plan(self, slot: int, max_rows: int) -> SequenceRows:
        """The rows of this reply's next step."""

    def accept(self, candidates: Candidates) -> list[DecodeEvent]:
        """Takes the step's candidates. Advances the decoder."""


@dataclass
class PromptFeed:
    """Tokens that wait to be committed, handed out in chunks."""

    pending: list[int] = field(default_factory=list)

    def take(self, limit: int) -> list[int]:
        chunk, self.pending = self.pending[:limit], self.pending[limit:]
        return chunk

    def extend(self, tokens: Iterable[int]) -> None:
        self.pending.extend(tokens)


class ReplyDecoder:
    """What the decoders of free replies have in common: the prompt to feed, penalties, the limit, how the reply ended."""

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
        """`limit`: most response tokens (max_new_tokens, or what the context leaves). `thinking_ids`: of `<think>` and
        `</think>`. `after`: another decoder began the reply; `prompt` then holds the tokens not committed yet."""
        self.counts = after.counts if after else DecodeCounts(prompt_tokens=len(prompt))
        self._options, self._eos, self._limit = options, frozenset(eos_ids), limit
        self._endings = Endings(tuple(eos_ids), thinking_ids)
        thinks = after.thinks if after else self._endings.thinks_after(prompt)
        self._penalties = PenaltyState(options, self._endings, thinks=thinks)
        if after:
            self._penalties.add(after.response)
            self._penalties.follow(after.response)
        self._candidates = candidates_needed(options, vocab_size)
        self._feed = PromptFeed(list(prompt))
        self._done = self._truncated = False

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

    def _count_adjustments(self) -> None:
        """Notes what acts on the logits of the tokens that are chosen next."""
        self.counts.ramp_bias = max(self.counts.ramp_bias, self._penalties.ramp_bias)
        self.counts.penalised = max(self.counts.penalised, self._penalties.penalised_ids)
