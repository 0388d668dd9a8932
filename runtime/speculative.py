"""Self-speculative decoding: previews draft a block, one causal pass verifies it; the output is the autoregressive one.

A cycle: (1) what is known is committed, and the same run previews a block of masks; the last committed row's logits give
the block's first token for certain, the preview a guess for all others. (2) The draft is committed tentatively with the
logits of every row, which are those of autoregressive decoding as far as the draft is right: tokens are chosen row by
row, exactly as the autoregressive decoder would, until one differs from the draft. It is right, the rest of the draft is
not: the commit is taken back, and the kept part is committed again in the next cycle's first run.

Above temperature 0 the rows draw the numbers that the autoregressive decoder would draw, so a seed gives the same reply
in both modes. The draft is chosen with the same numbers, which makes agreement likely; it may be any guess at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from clover.runtime.decoder import DecodeEvent, ReplyDecoder, StepEvent, TokenInfo, TokensEvent
from clover.runtime.options import DecodeOptions
from clover.runtime.row_penalties import RowPenalties, changing_most
from clover.runtime.select import alternatives, sample_tokens
from clover.runtime.session import Candidates, Floats, Ints, SequenceRows

NO_ROWS: Ints = np.zeros(0, np.int64)
LEAST_CHANCE = 0.1  # a row is verified if its token is right with this chance: rows cost time, fewer draw out the reply


class Uniforms:
    """The numbers an autoregressive decoder would draw, one a token, readable before they are used."""

    def __init__(self, seed: int | None) -> None:
        self._rng = np.random.default_rng(seed)
        self._ahead: npt.NDArray[np.float64] = np.zeros(0)

    def peek(self, count: int) -> npt.NDArray[np.float64]:
        if len(self._ahead) < count:
            self._ahead = np.concatenate([self._ahead, self._rng.random(count - len(self._ahead))])
        return self._ahead[:count]

    def take(self) -> npt.NDArray[np.float64]:
        first, self._ahead = self.peek(1), self._ahead[1:]
        return first


class SpeculativeDecoder(ReplyDecoder):
    """One reply. Its tokens are those of AutoregressiveDecoder with the same options and seed."""

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
    ) -> None:
        """See ReplyDecoder. `mask_id`: what the previewed block is made of."""
        super().__init__(
            prompt, options, eos_ids=eos_ids, vocab_size=vocab_size, limit=limit, thinking_ids=thinking_ids
        )
        self._mask_id = mask_id
        self._uniforms = Uniforms(options.seed)
        self._best = self._candidates  # of one row
        self._candidates = min(vocab_size, self._best + changing_most(options, options.block_size, self._endings))
        self._undo = False
        self._asks_last = False  # the last committed row's logits are wanted: they give the draft's first token
        self._verify: RowPenalties | None = None  # the step in progress verifies the draft
        self._length = 0  # rows it verifies
        self._ahead = False  # and it previews the block behind
        self._all_right = True  # the last verification kept all of its draft
        size = options.block_size
        self._block = np.full(size, mask_id, np.int64)
        self._masked = np.ones(size, bool)
        self._confidence = np.ones(size, np.float32)
        self._asked: Ints = NO_ROWS
        self._drafted = False  # the block holds a whole draft

    # -- Decoder -------------------------------------------------------------------------------

    def plan(self, slot: int, max_rows: int) -> SequenceRows:
        self._verify = None
        if self._drafted:
            return self._plan_verification(slot, max_rows)
        size = self._options.block_size
        whole = len(self._feed.pending) + size <= max_rows  # else a long prompt: this step only commits
        commit = np.array(self._feed.take(max_rows), np.int64)
        self._asks_last = bool(len(commit)) and not self._feed.pending
        self._asked = np.flatnonzero(self._masked) if whole else NO_ROWS
        last = [len(commit) - 1] if self._asks_last else []
        undo, self._undo = self._undo, False
        self._penalties.at_length(self.counts.response_tokens)
        return SequenceRows(
            slot,
            np.concatenate([commit, self._block]) if whole else commit,
            len(commit),
            np.concatenate([np.array(last, np.int64), self._asked + len(commit)]),
            self._penalties.adjustment(),
            self._options.coreset_top_p,
            undo=undo,
        )

    def accept(self, candidates: Candidates) -> list[DecodeEvent]:
        if self._verify is not None:
            return self._accept_verification(candidates, self._verify)
        if not self._asks_last and not len(self._asked):
            self.counts.prefill_steps += 1
            return []
        self.counts.steps += 1
        known: list[TokenInfo] = []
        if self._asks_last:
            token = self._choose(_rows(candidates, slice(0, 1), self._best))
            if token is not None:
                known.append(token)
                self._place_first(token)
        events: list[DecodeEvent] = []
        if len(self._asked) and not self._done:
            events.append(self._fill(_rows(candidates, slice(int(self._asks_last), None), self._best)))
        if known:
            events.append(TokensEvent(tuple(known)))
        return events

    # -- drafting --------------------------------------------------------------------------------

    def _clear(self) -> None:
        """An empty draft."""
        self._block.fill(self._mask_id)
        self._masked.fill(True)
        self._confidence.fill(1.0)
        self._asked = NO_ROWS
        self._drafted = False

    def _place_first(self, token: TokenInfo) -> None:
        """The causal pass gave the draft's first token."""
        self._block[0], self._masked[0] = token.id, False
        if not self._masked.any():  # a block of one token: nothing to preview
            self._drafted, self._length = True, 1

    def _fill(self, candidates: Candidates) -> StepEvent:
        """One preview drafts the whole block, sure or not: another would cost as much as the verification it helps."""
        self.counts.blocks += 1
        ids, logprobs = self._guess(candidates)
        confidence = np.exp(logprobs)
        chosen = self._masked[self._asked]
        positions = self._asked[chosen]
        self._block[positions], self._masked[positions] = ids[chosen], False
        self._confidence[positions] = confidence[chosen]
        self._drafted = True
        self._length = self._rows_to_verify()
        return StepEvent(
            self.counts.blocks,
            1,
            tuple(self._block.tolist()),
            tuple(positions.tolist()),
            tuple(confidence[chosen].tolist()),
        )

    def _guess(self, candidates: Candidates) -> tuple[Ints, Floats]:
        """A guess for each asked row: the best token, or the one that the row's own number would draw."""
        if self._options.temperature == 0.0:
            return candidates.ids[:, 0], candidates.logprobs[:, 0]
        ahead = self._uniforms.peek(self._options.block_size)  # the first draws the token at position 1
        return sample_tokens(candidates, self._options, ahead[np.maximum(self._asked - 1, 0)])

    def _rows_to_verify(self) -> int:
        """Rows whose logits are likely to matter: up to the draft's end of sequence, its first bad guess, the limit."""
        ends = np.flatnonzero(np.isin(self._block[1:], list(self._eos)))
        before_end = int(ends[0]) + 1 if len(ends) else len(self._block)
        if self._options.temperature == 0.0:  # else rare tokens are drawn in both passes, and agree all the same
            chance = np.cumprod(self._confidence[1:])  # that the draft is right so far
            before_end = min(before_end, 1 + int((chance >= LEAST_CHANCE).sum()))
        return min(before_end, self._limit - self.counts.response_tokens)

    # -- verifying -------------------------------------------------------------------------------

    def _plan_verification(self, slot: int, max_rows: int) -> SequenceRows:
        size, length = self._options.block_size, self._length
        draft = self._block[:length]
        self._penalties.at_length(self.counts.response_tokens)
        penalties = RowPenalties(
            self._penalties, self._options, draft.tolist(), self.counts.response_tokens, self._endings
        )
        # a draft that is likely right: the same run previews the block behind it, as threshold fill does
        self._ahead = self._all_right and length == size and length + size <= max_rows
        rows = [draft, np.full(size, self._mask_id, np.int64)] if self._ahead else [draft]
        tokens = np.concatenate(rows)
        self._verify = penalties
        return SequenceRows(
            slot,
            tokens,
            length,
            np.arange(len(tokens)),
            penalties.adjustment,
            self._options.coreset_top_p,
            tentative=True,
        )

    def _accept_verification(self, candidates: Candidates, penalties: RowPenalties) -> list[DecodeEvent]:
        self.counts.steps += 1
        length, draft = self._length, self._block
        self.counts.drafted += length - 1
        fresh: list[TokenInfo] = []
        last: TokenInfo | None = None
        plain = penalties.constant and self._options.temperature == 0.0 and not self._options.logprobs
        for row in range(length):
            self._penalties.at_length(self.counts.response_tokens)
            # most often no penalty changes along the rows, and the graph's own best is the choice
            last = self._choose(candidates, row) if plain else self._choose(penalties.row(candidates, row, self._best))
            if last is None:
                break
            fresh.append(last)
            if row + 1 < length:
                if last.id != draft[row + 1]:
                    break
                self.counts.accepted += 1
        events: list[DecodeEvent] = [TokensEvent(tuple(fresh))] if fresh else []
        if self._done or last is None:
            return events
        self._all_right = len(fresh) == length
        self._undo = not self._all_right
        kept = draft[: len(fresh)].tolist() if self._undo else []
        self._clear()
        if self._all_right and self._ahead:
            # the preview of this block ran already; its first token is known, and still to be committed with it
            self._asked = np.arange(self._options.block_size)
            self._place_first(last)
            events.append(self._fill(_rows(candidates, slice(length, None), self._best)))
        else:
            self._feed.extend([*kept, last.id])
        return events

    def _choose(self, candidates: Candidates, row: int = 0) -> TokenInfo | None:
        """The next token of the reply from its causal logits, as the autoregressive decoder chooses it.

        Above temperature 0 `candidates` holds one row.
        """
        if self._options.temperature == 0.0:
            ids, logprobs = candidates.ids[row], candidates.logprobs[row]
        else:
            ids, logprobs = sample_tokens(candidates, self._options, self._uniforms.take())
        token = int(ids[0])
        self._count_adjustments()
        if token in self._eos:
            self._done = True
            return None
        self.counts.response_tokens += 1
        self._penalties.add([token])
        self._penalties.follow([token])
        if self.counts.response_tokens >= self._limit:
            self._done = self._truncated = True
        extra = alternatives(candidates, row, self._options.logprobs)
        return TokenInfo(token, float(logprobs[0]), self.counts.steps, extra)


def _rows(candidates: Candidates, rows: slice, count: int) -> Candidates:
    """The `count` best candidates of some rows."""
    return Candidates(candidates.ids[rows, :count], candidates.logprobs[rows, :count], candidates.scores[rows, :count])
