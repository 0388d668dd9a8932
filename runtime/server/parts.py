"""A reply as the parts that newer APIs are made of: reasoning, text and function calls, in the order written."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from clover.runtime.text.function_calls import FunctionArgumentsDelta, FunctionCallEnded, FunctionCallStarted
from clover.runtime.text.reply import ReplyDelta
from clover.runtime.text.stream_parser import ReasoningDelta

PartKind = Literal["text", "reasoning", "call"]


@dataclass
class Part:
    """A stretch of a reply of one kind. `text` of a call is its arguments, JSON if it is `complete`; `raw`: see
    FunctionCallEnded; `id` is the call's."""

    kind: PartKind
    index: int
    text: str = ""
    name: str = ""
    id: str = ""
    complete: bool = True
    raw: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """What happens to a part: it opens, grows by `text`, or closes."""

    what: Literal["open", "grow", "close"]
    part: Part
    text: str = ""


class Parts:
    """Collects a reply's events into parts, telling of every move."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._open = False

    def feed(self, events: Iterable[ReplyDelta]) -> list[Move]:
        """The moves that these events make."""
        moves: list[Move] = []
        for event in events:
            if isinstance(event, FunctionCallStarted):
                self._change(moves, Part("call", len(self.all), name=event.name, id=new_id("call_")))
                continue
            if isinstance(event, FunctionCallEnded):  # at once, so that a client can run it while others are written
                self.all[-1].complete, self.all[-1].raw = event.complete, event.raw
                self._close(moves)
                continue
            kind = _kind(event)
            if not self._open or self.all[-1].kind != kind:
                self._change(moves, Part(kind, len(self.all)))
            self.all[-1].text += event.text
            moves.append(Move("grow", self.all[-1], event.text))
        return moves

    def finish(self) -> list[Move]:
        """Closes the last part."""
        moves: list[Move] = []
        self._close(moves)
        return moves

    def joined(self, kind: PartKind) -> str:
        """The text of all parts of a kind."""
        return "".join(part.text for part in self.all if part.kind == kind)

    @property
    def calls(self) -> list[Part]:
        return [part for part in self.all if part.kind == "call"]

    def _change(self, moves: list[Move], part: Part) -> None:
        self._close(moves)
        self.all.append(part)
        self._open = True
        moves.append(Move("open", part))

    def _close(self, moves: list[Move]) -> None:
        if self._open:
            moves.append(Move("close", self.all[-1]))
        self._open = False


def _kind(event: ReplyDelta) -> PartKind:
    if isinstance(event, ReasoningDelta):
        return "reasoning"
    return "call" if isinstance(event, FunctionArgumentsDelta) else "text"


def new_id(prefix: str) -> str:
    """An id nobody can guess."""
    return prefix + secrets.token_hex(12)
