"""Adaptive mode: threshold fill where it is faster than autoregressive decoding on this machine, which it measures.

Fill loses when it fills fewer tokens a step than its steps cost in autoregressive steps. After every step of a block the
cost of going on is weighed against that of the autoregressive mode for the same tokens. Every token given out is either
mode's continuation of all tokens before it: one that the causal pass chose, or one that threshold fill filled in a block
that begins right behind them. What a block holds that is not given out yet is dropped when the mode changes. The choice
depends on measured times, so two runs may differ; a fixed mode is repeatable.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from clover.runtime.autoregressive import AutoregressiveDecoder
from clover.runtime.decoder import DecodeCounts, DecodeEvent, Progress, TokensEvent
from clover.runtime.fill import FillDecoder
from clover.runtime.options import DecodeOptions
from clover.runtime.penalties import Endings
from clover.runtime.session import Candidates, SequenceRows

PROBE_SHARE = 32  # autoregressive tokens for each one that a try of fill costs; doubled each time it loses
FIRST_LOOK = 4  # autoregressive tokens that measure the mode when nothing is known of it
MARGIN = 1.1  # a change must promise to be this much cheaper
KEPT_TIMES = 15
KEPT_REPLIES = 4
TRY_EVERY = 4  # replies, or more where a try is dear


Kind = Literal["first", "preview", "autoregressive"]  # first: commits and previews a new block


class StepTimesSeen:
    """What an engine's replies showed: seconds of the last steps of each kind, and whether fill paid in the last replies."""

    def __init__(self) -> None:
        self._seen: dict[Kind, deque[float]] = {k: deque(maxlen=KEPT_TIMES) for k in get_args(Kind)}
        self._paid: deque[bool] = deque(maxlen=KEPT_REPLIES)
        self._replies = 0

    def begins_with_fill(self, block_size: int) -> bool:
        """For the next reply: whether fill paid lately. If it never did, it is tried all the same now and then, unless
        even a block filled in one step would not pay."""
        self._replies += 1
        price = self.price if self.known else 0.0
        if price > block_size:
            return False
        settled = len(self._paid) == KEPT_REPLIES
        return not settled or any(self._paid) or self._replies % max(TRY_EVERY, math.ceil(price)) == 0

    def note_reply(self, paid: bool) -> None:
        self._paid.append(paid)

    def add(self, kind: Kind, seconds: float) -> None:
        self._seen[kind].append(seconds)

    @property
    def known(self) -> bool:
        """Whether there were steps of every kind."""
        return all(self._seen.values())

    def seconds(self, kind: Kind) -> float:
        """The least of the last ones: what else the machine does lengthens long steps more often than short ones."""
        return min(self._seen[kind])

    @property
    def price(self) -> float:
        """A block's first step in autoregressive steps."""
        return self.seconds("first") / self.seconds("autoregressive")

    def fill(self, steps: int) -> float:
        """Seconds of a block developed in `steps` steps, its commit included."""
        return self.seconds("first") + (steps - 1) * self.seconds("preview")


def fill_loses(preview: float, autoregressive: float, missing: int, filled: float, unsettled: int) -> bool:
    """Whether to leave a block: `missing` masks at `filled` a step against `unsettled` tokens one a step.

    preview, autoregressive: seconds of a step.
    """
    return math.ceil(missing / max(filled, 1.0)) * preview > MARGIN * unsettled * autoregressive


class AdaptiveDecoder:
    """One reply, begun with fill unless it never paid lately."""

    def __init__(
        self,
        prompt: Sequence[int],
        options: DecodeOptions,
        *,
        mask_id: int,
        eos_ids: Sequence[int],
        vocab_size: int,
        limit: int,
        thinking_ids: tuple[int, int] | None = None,
        times: StepTimesSeen,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`times` is shared by the replies of an engine."""
        self.counts = DecodeCounts(prompt_tokens=len(prompt))
        self.changes = 0
        self._options, self._mask_id, self._times, self._clock = options, mask_id, times, clock
        self._common: dict[str, Any] = {
            "eos_ids": eos_ids,
            "vocab_size": vocab_size,
            "limit": limit,
            "thinking_ids": thinking_ids,
        }
        self._response: list[int] = []
        thinks = Endings(tuple(eos_ids), thinking_ids).thinks_after(prompt)
        self._progress = Progress(self._response, self.counts, np.random.default_rng(options.seed), thinks)
        self._stretch = 1
        self._left = 0  # autoregressive tokens until fill is tried
        self._block_steps = self._fill_blocks = self._fill_steps = self._fill_tokens = 0
        self._began = 0.0
        self._inner: FillDecoder | AutoregressiveDecoder
        if times.begins_with_fill(options.block_size):
            self._inner = self._fill(prompt)
        else:
            self._inner, self._left = self._autoregressive(prompt), self._probe_after()

    # -- Decoder -------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self._inner.done

    @property
    def truncated(self) -> bool:
        return self._inner.truncated

    @property
    def candidates(self) -> int:
        return self._inner.candidates

    @property
    def resumable(self) -> int:
        return self._inner.resumable

    def resume(self, committed: int) -> None:
        self._inner.resume(committed)

    def plan(self, slot: int, max_rows: int) -> SequenceRows:
        rows = self._inner.plan(slot, max_rows)
        self._kind: Kind | None = "autoregressive" if rows.commit == 1 else None  # None: a chunk of a prompt, not timed
        if isinstance(self._inner, FillDecoder):
            self._kind = "preview" if rows.commit == 0 else "first" if rows.commit <= self._options.block_size else None
        self._began = self._clock()
        return rows

    def accept(self, candidates: Candidates) -> list[DecodeEvent]:
        seconds, steps, inner = self._clock() - self._began, self.counts.steps, self._inner
        blocks = self.counts.blocks
        events = inner.accept(candidates)
        if self.counts.steps == steps:  # only committed a part of the prompt
            return events
        if self._kind:
            self._times.add(self._kind, seconds)
        fresh = self._note(events)
        if isinstance(inner, FillDecoder):
            self._fill_blocks += self.counts.blocks - blocks
            self._fill_steps, self._fill_tokens = self._fill_steps + 1, self._fill_tokens + fresh
        if inner.done:
            self._settle()
        elif isinstance(inner, FillDecoder):
            events += self._after_fill(inner)
        else:
            self._left -= 1
            if self._left <= 0:
                self._inner = self._fill(inner.uncommitted)
                self.changes += 1
        return events

    # -- choosing --------------------------------------------------------------------------------

    def _after_fill(self, inner: FillDecoder) -> list[DecodeEvent]:
        """Goes on with the block, or leaves it to the autoregressive mode; returns what that gives out at once."""
        size, times = self._options.block_size, self._times
        self._block_steps += 1
        over = inner.missing == size  # this is the next block already
        if not times.known:
            return self._leave(inner, FIRST_LOOK) if over or self._block_steps > 1 else []
        one = times.seconds("autoregressive")
        spent = times.fill(self._block_steps)
        if over:
            self._block_steps = 0
            paid, rest = spent <= size * one, 0
            if paid:
                self._stretch = 1
        else:
            rest = inner.unsettled
            per_step = (size - inner.missing) / self._block_steps
            expected = (per_step + inner.last_filled) / 2
            if not fill_loses(times.seconds("preview"), one, inner.missing, expected, rest):
                return []
            paid = spent + rest * one <= size * one
        if paid:
            return self._leave(inner, rest) if rest else []
        tokens, self._stretch = self._stretch * self._probe_after(), 2 * self._stretch
        return self._leave(inner, tokens)

    def _probe_after(self) -> int:
        """Tokens that make one more try a small part of the whole."""
        return max(self._options.block_size, int(PROBE_SHARE * self._times.price))

    def _leave(self, inner: FillDecoder, tokens: int) -> list[DecodeEvent]:
        """Autoregressive from here on, for `tokens` tokens."""
        self._left, self._block_steps = tokens, 0
        self.changes += 1
        rest = inner.uncommitted
        self._inner = following = self._autoregressive(rest)
        if rest:
            return []
        assert inner.causal is not None  # nothing of the block was given out: its causal logits still hold
        events = following.take(inner.causal)
        self._note(events)
        return events

    def _fill(self, uncommitted: Sequence[int]) -> FillDecoder:
        options, common = self._options, self._common
        decoder = FillDecoder(uncommitted, options, mask_id=self._mask_id, **common, after=self._progress)
        decoder.asks_causal = True
        return decoder

    def _autoregressive(self, uncommitted: Sequence[int]) -> AutoregressiveDecoder:
        return AutoregressiveDecoder(uncommitted, self._options, **self._common, after=self._progress)

    def _settle(self) -> None:
        """At the end: whether fill's steps cost less than its tokens would have cost the other mode."""
        t = self._times
        if self._fill_blocks and t.known:
            spent = self._fill_blocks * t.fill(1) + (self._fill_steps - self._fill_blocks) * t.seconds("preview")
            t.note_reply(spent <= self._fill_tokens * t.seconds("autoregressive"))

    def _note(self, events: Sequence[DecodeEvent]) -> int:
        """Adds given tokens to the reply; returns how many."""
        before = len(self._response)
        for event in events:
            if isinstance(event, TokensEvent):
                self._response.extend(t.id for t in event.tokens)
        return len(self._response) - before
