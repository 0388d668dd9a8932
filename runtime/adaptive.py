"""Adaptive mode: threshold fill where it is faster than autoregressive decoding on this machine, which it measures.

Costs are counted in measured seconds of a step of each kind. A block costs its previews and its own commit; what it gave
out would have cost one autoregressive step a token. Fill goes on from block to block while that has paid; elsewhere it is
tried again as soon as the tries that did not pay cost no more than a small share of the time. Within a block the steps
that it is likely to need are weighed against leaving it, which commits what it has given out and drops what it has not.

Every token given out is either mode's continuation of all tokens before it: one that the causal pass chose, or one that
threshold fill filled in a block that begins right behind them. The choice depends on measured times, so two runs may
differ; a fixed mode is repeatable.
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

TRY_SHARE = 0.025  # of the time of autoregressive steps: what tries of fill that don't pay may cost
EARLY_SHARE = 0.05  # the same while few previews were timed
EARLY_PRICE = 8  # and then no preview counts for more autoregressive steps: the first times may be far off
FEW = 4
KEPT_STEPS = 4  # steps of fill that may be saved up: what it loses before it is left
LOOK = 2  # autoregressive tokens that measure the mode: the first may commit more than itself
LOOK_AFTER = 128  # previews' worth of fill until it is measured again
EARLY_LOOK_AFTER = 40  # the same while few steps of it were timed
MARGIN = 1.1  # leaving a block must promise to be this much cheaper
KEPT_TIMES = 64

# first: commits a block and previews the next; prompt: commits some of the prompt before
Kind = Literal["preview", "first", "prompt", "autoregressive"]
PREVIEWS: tuple[Kind, ...] = ("preview", "first", "prompt")


class StepTimesSeen:
    """What an engine's replies showed: seconds of the last steps of each kind, and what fill gained or lost.

    The gain is an account in seconds: each block of fill adds what its tokens would have cost one by one and takes off
    what it cost, each autoregressive step adds a small share of its time. Fill may begin a block while the account can
    pay for a lost step of it. It holds a few steps at most, so that fill is left soon where it stops to pay.
    """

    def __init__(self) -> None:
        self._seen: dict[Kind, deque[float]] = {k: deque(maxlen=KEPT_TIMES) for k in get_args(Kind)}
        self._account = 0.0
        self._promised: tuple[int, int] | None = None  # steps and tokens of a block that no autoregressive time judged
        self._unseen = 0.0  # seconds of fill since the last autoregressive step

    def add(self, kind: Kind, seconds: float) -> None:
        """A step of a kind took so long."""
        self._seen[kind].append(seconds)
        if kind != "prompt":
            self._unseen = 0.0 if kind == "autoregressive" else self._unseen + seconds
        if kind == "autoregressive" and self.known:
            self._put((EARLY_SHARE if self._few_previews else TRY_SHARE) * self.autoregressive)
            if self._promised is not None:
                (steps, tokens), self._promised = self._promised, None
                if self.note_block(steps, 1.0, tokens):
                    self._put(2 * self.preview)

    @property
    def known(self) -> bool:
        """Whether there were steps of both modes."""
        return bool(self._seen["autoregressive"]) and any(self._seen[kind] for kind in PREVIEWS)

    @property
    def stale(self) -> bool:
        """Whether the autoregressive mode was last measured so long ago that it should be measured again."""
        few = len(self._seen["autoregressive"]) < FEW
        return self.known and self._unseen > (EARLY_LOOK_AFTER if few else LOOK_AFTER) * self.preview

    @property
    def autoregressive(self) -> float:
        """Seconds of one autoregressive step."""
        return self._least("autoregressive")

    @property
    def preview(self) -> float:
        """Seconds of a step that previews a block; as long as there was none that did no more, of one that did."""
        seconds = self._least(next(kind for kind in PREVIEWS if self._seen[kind]))
        early = self._few_previews and self._seen["autoregressive"]
        return min(seconds, EARLY_PRICE * self.autoregressive) if early else seconds

    @property
    def commit(self) -> float:
        """Seconds that it adds to a step to commit a block."""
        seen = self._seen["first"] and self._seen["preview"]
        return max(self._least("first") - self._least("preview"), 0.0) if seen else 0.0

    def note_block(self, steps: int, committed: float, tokens: int) -> bool:
        """A block took `steps` steps, this share of it is to be committed, and gave `tokens`. Whether it paid."""
        gained = tokens * self.autoregressive - steps * self.preview - committed * self.commit
        self._put(gained)
        return gained > 0

    def promise(self, steps: int, tokens: int) -> None:
        """A block of `tokens` tokens is likely to take `steps` steps: to be judged when both modes are known."""
        self._promised = steps, tokens

    def allows_fill(self, block_size: int) -> bool:
        """Whether fill may begin a block. What it must be able to lose is a preview, but never more than a block's worth of
        the other mode: one step that something else held up must not keep fill away for good."""
        if not self.known:
            return self._promised is None
        return self._account >= min(self.preview, block_size * self.autoregressive)

    @property
    def _few_previews(self) -> bool:
        return sum(len(self._seen[kind]) for kind in PREVIEWS) < FEW

    def _put(self, seconds: float) -> None:
        self._account = min(max(self._account + seconds, 0.0), KEPT_STEPS * self.preview)

    def _least(self, kind: Kind) -> float:
        """The least of the last ones: what else the machine does lengthens long steps more often than short ones."""
        return min(self._seen[kind])


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
        self._left = 0  # autoregressive tokens until fill may begin
        self._block_steps = 0
        self._began = 0.0
        self._inner: FillDecoder | AutoregressiveDecoder
        if times.allows_fill(options.block_size) and not times.stale:
            self._inner = self._fill(prompt)
        else:
            self._inner = self._autoregressive(prompt)
            self._left = 0 if times.known and not times.stale else LOOK

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
            self._kind = (
                "preview" if rows.commit <= 1 else "first" if rows.commit <= self._options.block_size else "prompt"
            )
        self._began = self._clock()
        return rows

    def accept(self, candidates: Candidates) -> list[DecodeEvent]:
        seconds, steps, inner = self._clock() - self._began, self.counts.steps, self._inner
        events = inner.accept(candidates)
        if self.counts.steps == steps:  # only committed a part of the prompt
            return events
        if self._kind:
            self._times.add(self._kind, seconds)
        self._note(events)
        if isinstance(inner, FillDecoder):
            self._block_steps += 1
            events += self._after_fill(inner)
        elif not inner.done:
            self._left -= 1
            if self._left <= 0 and self._times.allows_fill(self._options.block_size):
                self._inner = self._fill(inner.uncommitted)
                self.changes += 1
        return events

    # -- choosing --------------------------------------------------------------------------------

    def _after_fill(self, inner: FillDecoder) -> list[DecodeEvent]:
        """Goes on with fill, or leaves it to the autoregressive mode; returns what that gives out at once."""
        times, steps = self._times, self._block_steps
        over = inner.done or inner.between_blocks
        if over:
            self._block_steps = 0
        size = self._options.block_size
        if not times.known:
            if over or steps > 1:
                times.promise(
                    steps if over else steps + steps_left(inner, steps), inner.settled + 1 if inner.done else size
                )
                return [] if inner.done else self._leave(inner, LOOK)
            return []
        if inner.done:
            # in the other mode the end of sequence is a step of its own
            times.note_block(steps, 0.0, inner.settled + (not inner.truncated))
            return []
        if over:
            times.note_block(steps, 1.0, size)
            if times.stale:
                return self._leave(inner, LOOK)
            return [] if times.allows_fill(size) else self._leave(inner, 0)
        if not leaving_pays(inner, steps, size, times):
            return []
        times.note_block(steps, inner.settled / size, inner.settled)
        return self._leave(inner, inner.unsettled + inner.ends)

    def _leave(self, inner: FillDecoder, tokens: int) -> list[DecodeEvent]:
        """Autoregressive from here on, for `tokens` tokens at least."""
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

    def _note(self, events: Sequence[DecodeEvent]) -> None:
        """Adds given tokens to the reply."""
        for event in events:
            if isinstance(event, TokensEvent):
                self._response.extend(t.id for t in event.tokens)


def steps_left(block: FillDecoder, steps: int) -> int:
    """Steps that a block is likely to need still, after `steps` steps: by what they filled on average, and lately."""
    filled = block.settled + block.unsettled - block.missing
    return math.ceil(block.missing / max((filled / steps + block.last_filled) / 2, 1.0))


def leaving_pays(block: FillDecoder, steps: int, size: int, times: StepTimesSeen) -> bool:
    """Whether to leave a block of `size` after `steps` steps: the previews it is likely to need still, and its commit,
    against the commit of what it has given out and one step for each token it has not.

    Where the reply ends in the block, it need not be committed, and its end is one more step of the other mode.
    """
    stay = steps_left(block, steps) * times.preview
    leave = block.settled / size * times.commit + block.unsettled * times.autoregressive
    if block.ends:
        leave += times.autoregressive
    else:
        stay += times.commit
    return stay > MARGIN * leave
