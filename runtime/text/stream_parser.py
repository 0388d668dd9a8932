r"""One state machine that sorts a reply's text into content, reasoning, tool calls and the stop.

Choices:
- `<think>` … `</think>` is reasoning, `<tool_call>` … `</tool_call>` a tool call. Inside reasoning only `</think>`
  means something, inside a tool call only `</tool_call>`; a stray closing marker in content is content.
- Stop strings apply to content only. A stop such as "\n\n" would otherwise end the reply in the middle of its
  thinking, or cut a tool call's JSON. A marker ends a run of content, so no stop string matches across one.
- Where several patterns could match, the one that begins first wins; of those that begin at the same place, the
  shortest (a stop string before a marker of the same length). This depends on the text alone, not on how it was split.
- Newlines that touch a marker are the template's layout, not text, and are dropped ("<think>\nYes.\n</think>\n\nHi":
  "Yes.", "Hi").
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from clover.runtime.errors import RequestError
from clover.runtime.text.partial_match import held_back_from


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what stands between `<think>` and `</think>`."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """`<tool_call>` number `index` (from 0) was opened."""

    index: int


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the raw text of tool call `index`, layout included."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """Tool call `index` ended: by `</tool_call>` when `closed`, else because the reply ended inside it."""

    index: int
    closed: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop string was met; nothing after it is ever given out."""

    stop_string: str


StreamEvent = ContentDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | ToolCallEnded | Stopped
State = Literal["content", "reasoning", "tool"]

# state → marker → next state
_TRANSITIONS: dict[State, dict[str, State]] = {
    "content": {"<think>": "reasoning", "<tool_call>": "tool"},
    "reasoning": {"</think>": "content"},
    "tool": {"</tool_call>": "content"},
}


class _Patterns:
    """What can end a run of text in one state."""

    def __init__(self, markers: dict[str, State], stops: Sequence[str]) -> None:
        self.markers = markers
        self.strings = [*stops, *(marker for marker in markers if marker not in stops)]
        # A stable sort: at one place the shortest wins, and a stop string before a marker.
        ordered = sorted(self.strings, key=len)
        self.regex = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self.stops = frozenset(stops)


class StreamParser:
    """Parses one reply. Feed `push` with final text in pieces of any size, then call `finish` once."""

    def __init__(
        self,
        *,
        stop: Sequence[str] = (),
        starts_in_thinking: bool = False,
        parse_thinking: bool = True,
        parse_tools: bool = True,
    ) -> None:
        """`starts_in_thinking`: the prompt already opened `<think>`. A `parse_` flag set to False leaves those markers
        in the content. Raises RequestError for an empty stop string."""
        if not all(stop):
            raise RequestError("stop", "stop contains an empty string; give at least one character or leave it out.")
        opening = dict(_TRANSITIONS["content"])
        if not parse_thinking:
            del opening["<think>"]
        if not parse_tools:
            del opening["<tool_call>"]
        self._patterns: dict[State, _Patterns] = {
            "content": _Patterns(opening, stop),
            "reasoning": _Patterns(_TRANSITIONS["reasoning"], ()),
            "tool": _Patterns(_TRANSITIONS["tool"], ()),
        }
        self._state: State = "reasoning" if starts_in_thinking and parse_thinking else "content"
        self._held = ""  # a suffix that could still become a marker or a stop string
        self._newlines = 0  # newlines that are text only if text follows them
        self._after_marker = self._state == "reasoning"
        self._tool_index = -1
        self._done = False

    @property
    def stopped(self) -> bool:
        """True once a stop string was met or `finish` was called: further text is ignored."""
        return self._done

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside `<think>`."""
        return self._state == "reasoning"

    def push(self, text: str) -> list[StreamEvent]:
        """Events that `text` makes certain."""
        return [] if self._done else self._scan(self._held + text, final=False)

    def finish(self) -> list[StreamEvent]:
        """Gives out what was held back and closes an open tool call (as not `closed`). The reply has ended."""
        if self._done:
            return []
        events = self._scan(self._held, final=True)
        if not self._done:
            self._flush_newlines(events)
            if self._state == "tool":
                events.append(ToolCallEnded(self._tool_index, closed=False))
            self._done = True
        return events

    def _scan(self, text: str, *, final: bool) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        start = 0
        while True:
            patterns = self._patterns[self._state]
            rest = text[start:] if start else text
            if self._after_marker and self._state != "tool":
                # Dropped before the search: a stop string "\n\n" must not match the layout after `</think>`.
                stripped = rest.lstrip("\n")
                start += len(rest) - len(stripped)
                rest = stripped
            match = patterns.regex.search(rest) if patterns.regex else None
            sure = len(rest) if final else held_back_from(rest, patterns.strings)
            # An unfinished pattern that begins before the match may still win, so wait for it.
            if match is None or sure < match.start():
                self._emit(rest[:sure], events)
                self._held = rest[sure:]
                return events
            self._emit(rest[: match.start()], events)
            if match[0] in patterns.stops:
                self._flush_newlines(events)
                events.append(Stopped(match[0]))
                self._done, self._held = True, ""
                return events
            self._change_state(patterns.markers[match[0]], events)
            start += match.end()

    def _change_state(self, state: State, events: list[StreamEvent]) -> None:
        if self._state == "tool":
            events.append(ToolCallEnded(self._tool_index, closed=True))
        elif state == "tool":
            self._tool_index += 1
            events.append(ToolCallStarted(self._tool_index))
        self._state = state
        self._newlines = 0
        self._after_marker = True

    def _emit(self, text: str, events: list[StreamEvent]) -> None:
        if self._state != "tool":
            body = text.rstrip("\n")
            trailing = len(text) - len(body)
            if body:
                body = "\n" * self._newlines + body
                self._newlines = 0
            self._newlines += trailing
            text = body
        if text:
            self._after_marker = False
            _append(events, self._delta(text))

    def _flush_newlines(self, events: list[StreamEvent]) -> None:
        if self._newlines:
            _append(events, self._delta("\n" * self._newlines))
            self._newlines = 0

    def _delta(self, text: str) -> ContentDelta | ReasoningDelta | ToolCallDelta:
        if self._state == "content":
            return ContentDelta(text)
        if self._state == "reasoning":
            return ReasoningDelta(text)
        return ToolCallDelta(self._tool_index, text)


def _append(events: list[StreamEvent], event: ContentDelta | ReasoningDelta | ToolCallDelta) -> None:
    """Appends, joining text of the same kind into one event."""
    last = events[-1] if events else None
    if isinstance(last, ContentDelta) and isinstance(event, ContentDelta):
        events[-1] = ContentDelta(last.text + event.text)
    else:
        events.append(event)
