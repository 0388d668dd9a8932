"""From a sequence's token ids to what a client is told: content, reasoning, function calls and why it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clover.runtime.text.detokenizer import Detokenizer
from clover.runtime.text.finish import FinishReason, finish_reason
from clover.runtime.text.stream_parser import (
    ContentDelta,
    ReasoningDelta,
    Stopped,
    StreamEvent,
    StreamParser,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from clover.runtime.text.tokenizer import Tokenizer
from clover.runtime.text.tool_formats import ArgumentsDelta, CallEvent, CallMalformed, CallName
from clover.runtime.text.tool_formats.auto import AutoParser
from clover.runtime.text.tool_formats.values import parameter_schemas


@dataclass(frozen=True, slots=True)
class FunctionCallStarted:
    """Function call `index` (from 0, good calls only) calls `name`."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class FunctionArgumentsDelta:
    """More of the JSON text of call `index`'s arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of every reply. `stop_string` is the stop string that ended it, if one did."""

    reason: FinishReason
    stop_string: str | None


ReplyEvent = ContentDelta | ReasoningDelta | FunctionCallStarted | FunctionArgumentsDelta | Finished


class ReplyParser:
    """Parses one reply. Call `push` with each block's response ids (up to the end-of-sequence id), then `finish` once.

    A function call is given out when it is whole. A malformed one (or one cut by the token limit) is given out as
    content instead, `<tool_call>` and all, so that nothing the model wrote is lost and no client runs half a call.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stop: Sequence[str] = (),
        starts_in_thinking: bool = False,
        parse_thinking: bool = True,
        parse_tools: bool = True,
    ) -> None:
        """`tools` types the arguments of XML calls; the other options are StreamParser's. Raises RequestError."""
        self._detokenizer = Detokenizer(tokenizer)
        self._stream = StreamParser(
            stop=stop, starts_in_thinking=starts_in_thinking, parse_thinking=parse_thinking, parse_tools=parse_tools
        )
        self._schemas = parameter_schemas(tools)
        self._call = AutoParser(self._schemas)
        self._call_events: list[CallEvent] = []
        self._raw_call: list[str] = []
        self._calls = 0
        self._stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """True once a stop string was met: the decode loop may end the sequence."""
        return self._stream.stopped

    def push(self, ids: Iterable[int]) -> list[ReplyEvent]:
        """Events that these tokens make certain."""
        return self._convert(self._stream.push(self._detokenizer.push(ids)))

    def finish(self, *, hit_limit: bool = False, cancelled: bool = False) -> list[ReplyEvent]:
        """Ends the reply; the last event is Finished.

        `hit_limit`: the token limit came before an end-of-sequence id. A stop string within the limit still counts as
        the end.
        """
        events = self._convert(self._stream.push(self._detokenizer.flush()))
        events += self._convert(self._stream.finish())
        truncated = hit_limit and self._stop_string is None
        reason = finish_reason(
            truncated=truncated, cancelled=cancelled and self._stop_string is None, tool_calls=self._calls
        )
        return [*events, Finished(reason, self._stop_string)]

    def _convert(self, stream_events: Iterable[StreamEvent]) -> list[ReplyEvent]:
        events: list[ReplyEvent] = []
        for event in stream_events:
            if isinstance(event, ToolCallStarted):
                self._call, self._call_events, self._raw_call = AutoParser(self._schemas), [], []
            elif isinstance(event, ToolCallDelta):
                self._raw_call.append(event.text)
                self._call_events += self._call.push(event.text)
            elif isinstance(event, ToolCallEnded):
                self._end_call(event.closed, events)
            elif isinstance(event, Stopped):
                self._stop_string = event.stop_string
            else:
                events.append(event)
        return events

    def _end_call(self, closed: bool, events: list[ReplyEvent]) -> None:
        self._call_events += self._call.finish()
        if not closed or any(isinstance(event, CallMalformed) for event in self._call_events):
            events.append(ContentDelta("<tool_call>" + "".join(self._raw_call) + ("</tool_call>" if closed else "")))
            return
        for event in self._call_events:
            if isinstance(event, CallName):
                events.append(FunctionCallStarted(self._calls, event.name))
            elif isinstance(event, ArgumentsDelta):
                events.append(FunctionArgumentsDelta(self._calls, event.text))
        self._calls += 1


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A whole function call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ReplyText:
    """A whole reply."""

    content: str
    reasoning: str
    function_calls: tuple[FunctionCall, ...]
    reason: FinishReason
    stop_string: str | None


def collect_reply(events: Iterable[ReplyEvent]) -> ReplyText:
    """Joins the events of one reply. Raises ValueError when they don't end with Finished."""
    content: list[str] = []
    reasoning: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for event in events:
        if isinstance(event, ContentDelta):
            content.append(event.text)
        elif isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        elif isinstance(event, FunctionCallStarted):
            names.append(event.name)
            arguments.append([])
        elif isinstance(event, FunctionArgumentsDelta):
            arguments[event.index].append(event.text)
        else:
            calls = tuple(FunctionCall(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True))
            return ReplyText("".join(content), "".join(reasoning), calls, event.reason, event.stop_string)
    raise ValueError("the events do not end with Finished")
