"""From a sequence's token ids to what a client is told: content, reasoning, function calls and why it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clover.runtime.text.detokenizer import Detokenizer
from clover.runtime.text.finish import FinishReason, finish_reason
from clover.runtime.text.function_calls import (
    FunctionArgumentsDelta,
    FunctionCallEnded,
    FunctionCallReader,
    FunctionCallStarted,
    OfferedTools,
)
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


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of every reply. `stop_string` is the stop string that ended it, if one did."""

    reason: FinishReason
    stop_string: str | None


# what comes before Finished
ReplyDelta = ContentDelta | ReasoningDelta | FunctionCallStarted | FunctionArgumentsDelta | FunctionCallEnded
ReplyEvent = ReplyDelta | Finished


class ReplyParser:
    """Parses one reply. Call `push` with each block's response ids (up to the end-of-sequence id), then `finish` once.

    Function calls are given out as they are written, see FunctionCallReader.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        checks: Mapping[str, Callable[[str], bool]] | None = None,
        one_call: bool = False,
        stop: Sequence[str] = (),
        starts_in_thinking: bool = False,
        parse_thinking: bool = True,
        parse_tools: bool = True,
    ) -> None:
        """`tools`, `checks`: what calls are held to (see OfferedTools). `one_call`: the reply ends behind its first call.
        The other options are StreamParser's. Raises RequestError."""
        self._detokenizer = Detokenizer(tokenizer)
        self._stream = StreamParser(
            stop=stop, starts_in_thinking=starts_in_thinking, parse_thinking=parse_thinking, parse_tools=parse_tools
        )
        self._tools = OfferedTools.of(tools, checks)
        self._one_call = one_call
        self._call: FunctionCallReader | None = None
        self._complete_calls = self._incomplete_calls = 0
        self._stop_string: str | None = None
        self._over = False  # the only call that is wanted was given out

    @property
    def stopped(self) -> bool:
        """True once a stop string was met, or the only call wanted: the decode loop may end the sequence."""
        return self._over or self._stream.stopped

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as the text so far tells."""
        return self._stream.in_reasoning

    def push(self, ids: Iterable[int]) -> list[ReplyDelta]:
        """Events that these tokens make certain."""
        return self._convert(self._stream.push(self._detokenizer.push(ids)))

    def finish(self, *, hit_limit: bool = False, cancelled: bool = False) -> list[ReplyEvent]:
        """Ends the reply; the last event is Finished.

        `hit_limit`: the token limit came before an end-of-sequence id. A stop string, or the only call wanted, within the
        limit still counts as the end.
        """
        cut = hit_limit or cancelled
        events: list[ReplyEvent] = [*self._convert(self._stream.push(self._detokenizer.flush()), cut=cut)]
        events += self._convert(self._stream.finish(), cut=cut)
        ended = self._over or self._stop_string is not None
        reason = finish_reason(
            truncated=hit_limit and not ended,
            cancelled=cancelled and not ended,
            complete_calls=self._complete_calls,
            incomplete_calls=self._incomplete_calls,
        )
        return [*events, Finished(reason, self._stop_string)]

    def _convert(self, stream_events: Iterable[StreamEvent], *, cut: bool = False) -> list[ReplyDelta]:
        events: list[ReplyDelta] = []
        for event in stream_events:
            if self._over:
                break
            if isinstance(event, ToolCallStarted):
                index = self._complete_calls + self._incomplete_calls
                self._call = FunctionCallReader(self._tools, index)
            elif isinstance(event, ToolCallDelta):
                assert self._call is not None
                events += self._call.push(event.text, cut=cut)
            elif isinstance(event, ToolCallEnded):
                events += self._end_call(closed=event.closed, cut=cut)
            elif isinstance(event, Stopped):
                self._stop_string = event.stop_string
            else:
                events.append(event)
        return events

    def _end_call(self, *, closed: bool, cut: bool) -> Iterable[ReplyDelta]:
        assert self._call is not None
        events = self._call.end(closed=closed, cut=cut)
        if self._call.begun:
            self._over = self._one_call and closed
            if self._call.complete:
                self._complete_calls += 1
            else:
                self._incomplete_calls += 1
        return events


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function call; `arguments` is the text of a JSON object, or its beginning if the call isn't `complete`."""

    name: str
    arguments: str
    complete: bool = True


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
    arguments: list[str] = []
    complete: list[bool] = []
    for event in events:
        if isinstance(event, ContentDelta):
            content.append(event.text)
        elif isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        elif isinstance(event, FunctionCallStarted):
            names.append(event.name)
            arguments.append("")
        elif isinstance(event, FunctionArgumentsDelta):
            arguments[event.index] += event.text
        elif isinstance(event, FunctionCallEnded):
            complete.append(event.complete)
        else:
            calls = tuple(map(FunctionCall, names, arguments, complete))
            return ReplyText("".join(content), "".join(reasoning), calls, event.reason, event.stop_string)
    raise ValueError("the events do not end with Finished")
