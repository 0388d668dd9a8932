"""One reply in progress, as the scheduler sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from clover.runtime.decoder import DecodeEvent, Decoder
from clover.runtime.session import Candidates, SequenceRows

Outcome = Literal["done", "cancelled", "deadline", "shutdown", "error"]


class Sink(Protocol):
    """Hears of one job. Calls come one at a time and must not block."""

    def push(self, events: Sequence[DecodeEvent]) -> bool:
        """Events of one step, on the scheduler's thread. True ends the reply (a stop string was met)."""

    def finish(self, outcome: Outcome) -> None:
        """The last call, made exactly once, on any thread. The job's slot is free."""


@dataclass(eq=False)
class Job:
    """A decoder with its owner's wishes. `deadline` is on time.monotonic's clock."""

    decoder: Decoder
    prompt: Sequence[int]
    sink: Sink
    least_rows: int = 1  # fewest rows in which this decoder can go on: its block
    deadline: float | None = None
    cacheable: bool = True
    borders: tuple[int, ...] = ()  # prompt lengths worth keeping, ascending
    cached_tokens: int = 0  # prompt tokens taken from the conversation cache
    cancelled: bool = False
    submitted: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    committed: list[int] = field(default_factory=list)  # the tokens its slot holds
    tentative: int = 0  # how many of them, at the end, may yet be taken back
    kept: int = 0  # length of the last kept state
    line: int = 0  # length of the last kept state that this job computed or began with

    def plan(self, slot: int, max_rows: int) -> SequenceRows:
        """The next step's rows; a chunk of the prompt ends at the next border worth keeping."""
        while self.borders and self.borders[0] <= len(self.committed):
            self.borders = self.borders[1:]
        if self.borders:
            max_rows = min(max_rows, self.borders[0] - len(self.committed))
        return self.decoder.plan(slot, max_rows)

    def accept(self, rows: SequenceRows, candidates: Candidates) -> list[DecodeEvent]:
        """Takes a step's result. Decoders see as many candidates as they asked for, whatever the others needed."""
        if rows.undo:
            del self.committed[len(self.committed) - self.tentative :]
        self.committed.extend(rows.tokens[: rows.commit].tolist())
        self.tentative = rows.commit if rows.tentative else 0
        k = self.decoder.candidates
        own = Candidates(candidates.ids[:, :k], candidates.logprobs[:, :k], candidates.scores[:, :k], candidates.logits)
        return self.decoder.accept(own)

    @property
    def at_border(self) -> bool:
        """The slot now holds the prompt up to a border."""
        return bool(self.borders) and len(self.committed) == self.borders[0] and not self.tentative

    def expired(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline
