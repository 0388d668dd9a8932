"""Threshold fill: every position the model is sure of is filled at once, at least one a step.

A block starts as masks, a preview gives every masked position its best
token and its confidence, positions above the threshold are filled for good, and a full block is committed
causally in the same run that previews the next block for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from clover.runtime.decoder import DecodeEvent, Progress, PromptFeed, ReplyDecoder, StepEvent, TokenInfo, TokensEvent
from clover.runtime.options import DecodeOptions
from clover.runtime.select import alternatives, choose_tokens, positions_to_fill
from clover.runtime.session import Candidates, Floats, SequenceRows


class FillDecoder(ReplyDecoder):
    """Develops one reply block by block. Whether a position is masked is kept apart from its token id."""

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
        after: Progress | None = None,
    ) -> None:
        """See ReplyDecoder. `mask_id`: what stands where nothing is filled yet."""
        super().__init__(
            prompt, options, eos_ids=eos_ids, vocab_size=vocab_size, limit=limit, thinking_ids=thinking_ids, after=after
        )
        # benchmarks put another rule here
        self.choose_positions: Callable[[Floats, float], npt.NDArray[np.intp]] = positions_to_fill
        self._mask_id = mask_id
        self._rng = after.rng if after else np.random.default_rng(options.seed)
        self.asks_causal = False  # also ask for the logits of the last committed row
        self.causal: Candidates | None = None  # and what they were, for the block that is developed
        # blocks aligned to multiples of the block size: the prompt's tail stands, filled, in the first block
        tail = len(prompt) % options.block_size if options.align_blocks else 0
        self._feed = PromptFeed(list(prompt[: len(prompt) - tail]))
        self._block = np.full(options.block_size, mask_id, np.int64)
        self._masked = np.ones(options.block_size, bool)
        self._info: list[TokenInfo | None] = [None] * options.block_size
        self._end = options.block_size  # the first end of sequence that stands in the block, if any
        self._block[:tail] = prompt[len(prompt) - tail :]
        self._masked[:tail] = False
        self._emitted = tail  # positions of this block already given out
        self._before = (len(after.response) if after else 0) - tail  # response tokens of earlier blocks
        self._block_step = 0
        self._causal_rows = 0
        self.last_filled = 0  # positions that the last step filled
        self._asked: np.ndarray[tuple[int], np.dtype[np.intp]] = np.zeros(0, np.intp)

    # -- Decoder -------------------------------------------------------------------------------

    @property
    def resumable(self) -> int:
        return len(self._feed.pending) - self.asks_causal

    @property
    def uncommitted(self) -> list[int]:
        """Tokens of the prompt and the reply, in order, that no step has committed yet."""
        tail = [info.id for info in self._info[: self._emitted] if info is not None]
        return [*self._feed.pending, *tail]

    @property
    def missing(self) -> int:
        """Masks of the block before its end of sequence, if it holds one, and before the limit."""
        return int(self._masked[: self._useful].sum())

    @property
    def unsettled(self) -> int:
        """Tokens of the block up to its end or the limit that are not given out yet, filled or not."""
        return self._useful - self._emitted

    @property
    def settled(self) -> int:
        """Tokens of the block that are given out."""
        return self._emitted

    @property
    def ends(self) -> bool:
        """Whether the reply ends in this block, as far as it is filled: with an end of sequence, or by the limit."""
        return self._end < len(self._block) or self._limit - self._before <= len(self._block)

    @property
    def between_blocks(self) -> bool:
        """Whether no step has developed the block yet."""
        return self._block_step == 0

    def plan(self, slot: int, max_rows: int) -> SequenceRows:
        size = self._options.block_size
        whole = len(self._feed.pending) + size <= max_rows  # else a long prompt: this step only commits
        commit = self._feed.take(max_rows)
        last = [len(commit) - 1] if self.asks_causal and commit and not self._feed.pending else []
        self._causal_rows = len(last)
        self._asked = np.flatnonzero(self._masked) if whole else np.zeros(0, np.intp)  # filled ones need no logits
        tokens = np.array(commit, np.int64)
        if self._block_step == 0:
            self._penalties.at_length(max(self._before, 0))
        return SequenceRows(
            slot,
            np.concatenate([tokens, self._block]) if whole else tokens,
            len(commit),
            np.concatenate([np.array(last, np.int64), self._asked + len(commit)]),
            self._penalties.adjustment(),
            self._options.coreset_top_p,
        )

    def accept(self, candidates: Candidates) -> list[DecodeEvent]:
        if self._causal_rows:
            self.causal = _copy(candidates, slice(0, 1))
            candidates = _view(candidates, slice(1, None))
        if not len(self._asked):
            self.counts.prefill_steps += 1
            return []
        self.counts.steps += 1
        if self._block_step == 0:
            self.counts.blocks += 1
        self._block_step += 1
        filled, confidence = self._fill(candidates)
        events: list[DecodeEvent] = [
            StepEvent(
                self.counts.blocks,
                self._block_step,
                tuple([None if m else t for t, m in zip(self._block.tolist(), self._masked.tolist(), strict=True)]),
                tuple(filled),
                tuple(confidence),
            )
        ]
        fresh = self._emit()
        if fresh:
            events.append(TokensEvent(tuple(fresh)))
        if not self._done and not self._masked.any():
            self._next_block()
        return events

    @property
    def _useful(self) -> int:
        """Positions of the block that can still be given out."""
        return max(min(self._end, self._limit - self._before), 0)

    # -- steps of the loop -----------------------------------------------------------------------

    def _fill(self, candidates: Candidates) -> tuple[list[int], list[float]]:
        """Fills positions for good; returns them and their confidences."""
        ids, logprobs = choose_tokens(candidates, self._options, self._rng)
        confidence = np.exp(logprobs)
        chosen = self.choose_positions(confidence, self._options.threshold)
        positions, ids = self._asked[chosen], ids[chosen]
        self._block[positions] = ids
        self._masked[positions] = False
        tokens, filled = ids.tolist(), positions.tolist()
        step, wanted = self.counts.steps, self._options.logprobs
        extra = [alternatives(candidates, row, wanted) for row in chosen.tolist()] if wanted else [()] * len(tokens)
        for position, token, logprob, others in zip(filled, tokens, logprobs[chosen].tolist(), extra, strict=True):
            self._info[position] = TokenInfo(token, logprob, step, others)
            if token in self._eos:
                self._end = min(self._end, position)
        self.last_filled = len(tokens)
        self._count_adjustments()
        self._penalties.add(tokens)
        return filled, confidence[chosen].tolist()

    def _emit(self) -> list[TokenInfo]:
        """The tokens that just became final: filled, with no mask before them, up to an end or the limit."""
        fresh: list[TokenInfo] = []
        for position in range(self._emitted, min(len(self._block), self._limit - self._before)):
            info = self._info[position]
            if info is None:
                break
            if position == self._end:
                self._done = True
                break
            fresh.append(info)
        self._emitted += len(fresh)
        if not self._done and self._before + self._emitted >= self._limit:
            self._done = self._truncated = True  # what is filled never changes, so the block's rest can't matter
        self.counts.response_tokens = self._before + self._emitted
        return fresh

    def _next_block(self) -> None:
        self._feed.extend(self._block.tolist())
        self._penalties.follow([info.id for info in self._info if info is not None])  # without the prompt's tail
        self._before += len(self._block)
        self._block = np.full(len(self._block), self._mask_id, np.int64)
        self._masked[:] = True
        self._info = [None] * len(self._block)
        self._end = len(self._block)
        self._emitted = self._block_step = 0


def _view(candidates: Candidates, rows: slice) -> Candidates:
    return Candidates(candidates.ids[rows], candidates.logprobs[rows], candidates.scores[rows])


def _copy(candidates: Candidates, rows: slice) -> Candidates:
    """Rows of a step, kept when the session's buffers are overwritten."""
    view = _view(candidates, rows)
    return Candidates(view.ids.copy(), view.logprobs.copy(), view.scores.copy())
