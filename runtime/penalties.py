"""Which logits a step adjusts: penalties on tokens already in the response, biases, the length ramp."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from clover.runtime.options import DecodeOptions
from clover.runtime.session import NO_ADJUSTMENT, Adjustment


@dataclass(frozen=True)
class Endings:
    """What the length ramp raises: `</think>` while thinking is open, the end-of-sequence ids otherwise.

    thinking: ids of `<think>` and `</think>`; None where the tokenizer has no such tokens.
    """

    eos: tuple[int, ...]
    thinking: tuple[int, int] | None = None

    @property
    def ids(self) -> frozenset[int]:
        """All that may be raised."""
        return frozenset(self.eos) | frozenset(self.thinking[1:] if self.thinking else ())

    def thinks_after(self, tokens: Sequence[int], before: bool = False) -> bool:
        """Whether thinking is open behind `tokens`: their last marker decides. The end of a turn closes it."""
        if self.thinking is None:
            return False
        opens, closes = self.thinking
        for token in reversed(tokens):
            if token == opens:
                return True
            if token == closes or token in self.eos:
                return False
        return before


class PenaltyState:
    """Counts the response's tokens and turns them into the adjustment of the next step.

    Penalties see committed response tokens and tokens filled in the current block, never the prompt. What the length
    ramp raises follows from the prompt and the committed tokens.
    """

    def __init__(self, options: DecodeOptions, endings: Endings, *, thinks: bool = False) -> None:
        """`thinks`: the prompt opened thinking."""
        self._options, self._endings = options, endings
        self._thinks = thinks
        self._closing = False  # `</think>` stands in the block in progress
        self._penalised = (
            options.presence_penalty != 0.0 or options.frequency_penalty != 0.0 or options.repetition_penalty != 1.0
        )
        self._counts: dict[int, int] = {}
        self._ramp = 0.0
        self._stale = True
        self._adjustment = NO_ADJUSTMENT

    @property
    def ramp_bias(self) -> float:
        """The length ramp's bias in force; 0 while the reply is short."""
        return self._ramp

    @property
    def penalised_ids(self) -> int:
        """Token ids whose logits the penalties change as things stand."""
        return len(self._counts)

    @property
    def penalised(self) -> bool:
        """Whether a token in the response changes the logits of later rows."""
        return self._penalised

    @property
    def raised(self) -> tuple[int, ...]:
        """The ids whose logits the length ramp raises as things stand.

        Nothing while a block holds a `</think>` that is not committed: before it nothing ends, and once is enough.
        """
        if not self._thinks:
            return self._endings.eos
        return () if self._closing or self._endings.thinking is None else self._endings.thinking[1:]

    def of(self, token: int, *, ramp: float | None = None) -> tuple[float, float]:
        """(scale, bias) of one token id as things stand; `ramp`: the length ramp's bias, if not the one in force."""
        o, count = self._options, self._counts.get(token, 0)
        bias = float(o.logit_bias.get(token, 0.0))
        if token in self.raised:
            bias += self._ramp if ramp is None else ramp
        if not count:
            return 1.0, bias
        return o.repetition_penalty, bias - o.presence_penalty - o.frequency_penalty * count

    def add(self, tokens: Sequence[int]) -> None:
        """Tokens that were filled or generated."""
        if self._thinks and self._endings.thinking and self._endings.thinking[1] in tokens:
            self._closing = self._stale = True
        if self._penalised:
            for token in tokens:
                self._counts[token] = self._counts.get(token, 0) + 1
            self._stale = True

    def follow(self, tokens: Sequence[int]) -> None:
        """Response tokens that are settled, in order: whether they leave thinking open decides what the ramp raises."""
        thinks = self._endings.thinks_after(tokens, self._thinks)
        if thinks != self._thinks or self._closing:
            self._thinks, self._closing, self._stale = thinks, False, True

    def at_length(self, response_tokens: int) -> None:
        """Sets the length ramp for a response of that many committed tokens."""
        ramp = self._options.length_ramp
        bias = ramp.bias(response_tokens) if ramp else 0.0
        if bias != self._ramp:
            self._ramp, self._stale = bias, True

    def adjustment(self) -> Adjustment:
        """The adjustment for the next step; the same object until something changed."""
        if self._stale:
            self._adjustment = self._build()
            self._stale = False
        return self._adjustment

    def without(self, tokens: Iterable[int]) -> Adjustment:
        """The adjustment with the entries of `tokens` left out."""
        whole = self.adjustment()
        keep = ~np.isin(whole.ids, np.fromiter(tokens, np.int64))
        return Adjustment(whole.ids[keep], whole.scale[keep], whole.bias[keep])

    def _build(self) -> Adjustment:
        o = self._options
        extra: dict[int, float] = {int(k): float(v) for k, v in o.logit_bias.items()}
        if self._ramp:
            for token in self.raised:
                extra[token] = extra.get(token, 0.0) + self._ramp
        if not self._counts and not extra:
            return NO_ADJUSTMENT
        only_extra = [t for t in extra if t not in self._counts]
        ids = np.array([*self._counts, *only_extra], np.int64)
        seen = len(self._counts)
        scale = np.ones(len(ids), np.float32)
        bias = np.zeros(len(ids), np.float32)
        scale[:seen] = o.repetition_penalty
        bias[:seen] = -o.presence_penalty
        if o.frequency_penalty:
            bias[:seen] -= o.frequency_penalty * np.fromiter(self._counts.values(), np.float32, seen)
        if extra:
            bias += np.array([extra.get(t, 0.0) for t in ids.tolist()], np.float32)
        return Adjustment(ids, scale, bias)
