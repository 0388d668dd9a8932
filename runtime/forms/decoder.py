"""The block loop of a form: fixed text stands frozen in the blocks, the holes between are denoised together.

As in threshold fill, a block is previewed until it is full, then committed causally in the run that previews the next. A
hole whose length is not known yet hides what follows it: the model is never shown text at a distance that the answer may
not have, and what is committed is the text as it reads. All holes up to the first such take part in every step: choices of
equally many tokens are decided together. A step fills every hole's next positions whose confidence is above the
threshold, and if there is none, the single most confident one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from clover.runtime.decoder import DecodeCounts, DecodeEvent, PromptFeed, StepEvent
from clover.runtime.errors import RequestError
from clover.runtime.forms.slots import FreeSlot, Row, Slot, open_slot
from clover.runtime.forms.template import Choice, Form, Hole, Number
from clover.runtime.forms.vocabulary import Vocabulary
from clover.runtime.options import DecodeOptions
from clover.runtime.session import NO_ADJUSTMENT, Adjustment, Candidates, SequenceRows

OTHERS = 64  # candidates of a free hole's row beside those that some hole needs
RAISED = (
    1e4  # added to the ids that holes need, so that they are among the candidates; raw probabilities stay as they are
)


class FormDecoder:
    """One form in progress. Implements Decoder, without tokens events: the result is read when it is done."""

    def __init__(
        self,
        prompt: Sequence[int],
        form: Form,
        options: DecodeOptions,
        vocabulary: Vocabulary,
        *,
        mask_id: int,
        eos_ids: Sequence[int],
        vocab_size: int,
        room: int,
    ) -> None:
        """`room`: tokens that the form may take. Raises RequestError for a form that can't be spelled in tokens."""
        self.counts = DecodeCounts(prompt_tokens=len(prompt))
        self._options, self._mask_id = options, mask_id
        self._padding = [eos_ids[0], eos_ids[-1]]  # behind the form: the end, then what fills a block behind an end
        self.segments: list[list[int] | Slot] = []
        self._build(form, vocabulary, eos_ids)
        if self.longest > min(room, options.max_new_tokens or room):
            for slot in self.slots:
                if isinstance(slot, FreeSlot):
                    slot.shorten()
        needed = sorted(frozenset().union(*(slot.needed for slot in self.slots)))
        self._adjustment = NO_ADJUSTMENT
        self._candidates = min(vocab_size, len(needed) + OTHERS)
        if self._candidates < vocab_size:
            ids = np.array(needed, np.int64)
            self._adjustment = Adjustment(ids, np.ones(len(ids), np.float32), np.full(len(ids), RAISED, np.float32))
        self._feed = PromptFeed(list(prompt))
        self._start = 0  # first position of the block in the form
        self._previewed = False
        self._step = 0
        self._asked: list[int] = []
        self._next_blocks()

    def _build(self, form: Form, vocabulary: Vocabulary, eos_ids: Sequence[int]) -> None:
        lead = ""
        for n, part in enumerate(form.parts):
            following = form.parts[n + 1] if n + 1 < len(form.parts) else ""
            if isinstance(part, Hole):
                assert isinstance(following, str)
                self.segments.append(open_slot(part, form.field, vocabulary, lead, following, eos_ids))
                lead = ""
                continue
            lead = _lead(part, following, vocabulary) if isinstance(following, Hole) else ""
            text = part[: len(part) - len(lead)]
            ids = vocabulary.encode(text)
            if not vocabulary.spells(ids, text):
                raise RequestError(form.field, f"{form.field}: the text {text[:40]!r} can't be spelled in tokens.")
            self.segments.append(ids)

    @property
    def slots(self) -> list[Slot]:
        return [s for s in self.segments if isinstance(s, Slot)]

    @property
    def longest(self) -> int:
        """Positions of the form as it stands."""
        return sum(s.width if isinstance(s, Slot) else len(s) for s in self.segments)

    @property
    def tokens(self) -> list[int]:
        """The form's tokens so far; a mask for each that is open."""
        out: list[int] = []
        for segment in self.segments:
            if isinstance(segment, Slot):
                out += segment.tokens + [self._mask_id] * (segment.width - len(segment.tokens))
            else:
                out += segment
        return out

    # -- Decoder -------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return all(slot.closed for slot in self.slots)

    @property
    def truncated(self) -> bool:
        return False

    @property
    def candidates(self) -> int:
        return self._candidates

    @property
    def resumable(self) -> int:
        return min(len(self._feed.pending), self.counts.prompt_tokens)

    def resume(self, committed: int) -> None:
        self._feed.take(committed)

    def plan(self, slot: int, max_rows: int) -> SequenceRows:
        size = self._options.block_size
        whole = len(self._feed.pending) + size <= max_rows
        commit = np.array(self._feed.take(max_rows), np.int64)
        block = np.array(self._block(), np.int64)
        self._asked = self._open_positions() if whole else []
        return SequenceRows(
            slot,
            np.concatenate([commit, block]) if whole else commit,
            len(commit),
            np.array(self._asked, np.int64) + len(commit),
            self._adjustment,
            self._options.coreset_top_p,
        )

    def accept(self, candidates: Candidates) -> list[DecodeEvent]:
        if not self._asked:
            self.counts.prefill_steps += 1
            return []
        self.counts.steps += 1
        self.counts.blocks += self._step == 0
        self._step += 1
        row_of = {p: n for n, p in enumerate(self._asked)}
        before, offered = self._block(), []
        filled = 0
        for slot, shown in self._shown():
            own = _Rows(candidates, [row_of[p] for p in shown])
            filled += slot.take(own, self._options.threshold, False)
            offered.append((slot, own))
        if not filled:
            slot, own = max(offered, key=lambda pair: pair[0].offer(pair[1]))
            slot.take(own, self._options.threshold, True)
        after = self._block()
        fresh = tuple(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a == self._mask_id != b)
        confidence = {p: s.confidence for s, shown in self._positions() for p in shown}
        event = StepEvent(
            self.counts.blocks,
            self._step,
            tuple(None if t == self._mask_id else t for t in after),
            fresh,
            tuple(confidence.get(p, 1.0) for p in fresh),
        )
        self._next_blocks()
        return [event]

    # -- blocks ----------------------------------------------------------------------------------

    def _block(self) -> list[int]:
        """The block's tokens; behind the form's end, the end of the reply."""
        size, at = self._options.block_size, 0
        end, after = self._padding
        block = (self.tokens[self._start : self._start + size] + [end] + [after] * size)[:size]
        for segment in self.segments:
            if isinstance(segment, Slot) and not segment.settled:
                shown = max(at + len(segment.tokens) - self._start, 0)
                return (block[:shown] + [self._mask_id] * size)[:size]
            at += segment.width if isinstance(segment, Slot) else len(segment)
        return block

    def _open_positions(self) -> list[int]:
        return [p for _, shown in self._shown() for p in shown]

    def _shown(self) -> list[tuple[Slot, list[int]]]:
        """Open holes that the block shows, with the positions in the block that are to be filled."""
        found = []
        for slot, positions in self._positions():
            shown = positions[len(slot.tokens) :] if not slot.closed else []
            shown = [p for p in shown if 0 <= p < self._options.block_size]
            if shown:
                found.append((slot, shown))
            if not slot.settled:
                break
        return found

    def _positions(self) -> list[tuple[Slot, list[int]]]:
        """Every hole's positions, counted from the block's first."""
        found, at = [], -self._start
        for segment in self.segments:
            width = segment.width if isinstance(segment, Slot) else len(segment)
            if isinstance(segment, Slot):
                found.append((segment, list(range(at, at + width))))
            at += width
        return found

    def _next_blocks(self) -> None:
        """Commits the block while it has nothing open; stops at the first that has."""
        while not self.done and not self._shown():
            size = self._options.block_size
            self._feed.extend(self.tokens[self._start : self._start + size])
            self._start += size
            self._step = 0


def _lead(before: str, hole: Hole, vocabulary: Vocabulary) -> str:
    """A space that ends the text before a hole, where the tokenizer spells it with what follows it."""
    if not before.endswith(" "):
        return ""
    kind = hole.kind
    samples = kind.texts if isinstance(kind, Choice) else ("1", "23") if isinstance(kind, Number) else ("the", "Oslo")
    apart = vocabulary.encode(before)
    return " " if sum(vocabulary.encode(before + s)[: len(apart)] == apart for s in samples) * 2 < len(samples) else ""


class _Rows(Sequence[Row]):
    """Rows of a step's candidates, each made a mapping when it is first looked at: most often few are."""

    def __init__(self, candidates: Candidates, rows: Sequence[int]) -> None:
        self._candidates, self._rows = candidates, rows
        self._made: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> Row: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Row]: ...

    def __getitem__(self, at: int | slice) -> Row | Sequence[Row]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        row = self._rows[at]
        if row not in self._made:
            ids, logprobs = self._candidates.ids[row], self._candidates.logprobs[row]
            self._made[row] = dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
        return self._made[row]
