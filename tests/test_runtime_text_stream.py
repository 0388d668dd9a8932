"""The stream parser: what it says of a reply must not depend on how the reply was split."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clover.runtime.errors import RequestError
from clover.runtime.text.finish import finish_reason
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

WORDS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "\n",
    "\n\n",
    "<",
    "</t",
    "<tool",
    "STOP",
    "STO",
    "P",
    "ab",
    "é",
]
REPLIES = st.lists(st.one_of(st.sampled_from(WORDS), st.text("ab<>/\n", max_size=3)), max_size=14).map("".join)
STOPS = st.lists(st.sampled_from(["STOP", "TO", "STOPP", "\n\n", "ab", "b", "<tool_call>", "<th", "aba"]), max_size=3)


def parse(pieces: list[str], **options: Any) -> list[StreamEvent]:
    parser = StreamParser(**options)
    return [event for piece in pieces for event in parser.push(piece)] + parser.finish()


def joined(events: list[StreamEvent]) -> list[StreamEvent]:
    """Neighbouring deltas of one kind as one."""
    result: list[StreamEvent] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            result[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            result[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta):
            result[-1] = ToolCallDelta(last.index, last.text + event.text)
        else:
            result.append(event)
    return result


def split(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


@settings(deadline=None)
@given(REPLIES, st.lists(st.integers(0, 500), max_size=12), STOPS, st.booleans())
@example("aSTOP", [4], ["STOP", "TO"], False)  # STOP begins first, though TO is complete first
@example("aSTO", [], ["STOP", "TO"], False)  # at the end the unfinished STOP gives way to TO
def test_any_split_gives_the_same_result(reply: str, cuts: list[int], stop: list[str], thinking: bool) -> None:
    whole = joined(parse([reply], stop=stop, starts_in_thinking=thinking))
    assert joined(parse(split(reply, cuts), stop=stop, starts_in_thinking=thinking)) == whole
    assert joined(parse(list(reply), stop=stop, starts_in_thinking=thinking)) == whole


@settings(deadline=None)
@given(REPLIES, STOPS)
def test_only_markers_newlines_and_what_follows_a_stop_are_lost(reply: str, stop: list[str]) -> None:
    events = parse(list(reply), stop=stop, parse_thinking=False, parse_tools=False)
    text = "".join(event.text for event in events if isinstance(event, ContentDelta))
    stopped = [event for event in events if isinstance(event, Stopped)]
    assert reply.startswith(text + (stopped[0].stop_string if stopped else ""))
    assert not any(word in text for word in stop)
    if not stopped:
        assert text == reply
        assert not any(word in reply for word in stop)


def test_reasoning_content_and_tool_calls() -> None:
    calls = "<tool_call>\n{}\n</tool_call>\n<tool_call>x</tool_call>"
    reply = "<think>\nLook it up.\n</think>\n\nOne moment.\n" + calls + "\nDone.\n"
    assert joined(parse([reply])) == [
        ReasoningDelta("Look it up."),
        ContentDelta("One moment."),
        ToolCallStarted(0),
        ToolCallDelta(0, "\n{}\n"),
        ToolCallEnded(0, closed=True),
        ToolCallStarted(1),
        ToolCallDelta(1, "x"),
        ToolCallEnded(1, closed=True),
        ContentDelta("Done.\n"),
    ]


def test_markers_mean_something_only_where_they_can() -> None:
    assert joined(parse(["a <tool_call> b</think>c</think>"], starts_in_thinking=True)) == [
        ReasoningDelta("a <tool_call> b"),
        ContentDelta("c</think>"),
    ]
    assert joined(parse(["<think>a<tool_call>"], parse_thinking=False, parse_tools=False)) == [
        ContentDelta("<think>a<tool_call>")
    ]


def test_only_what_could_become_a_pattern_is_held_back() -> None:
    parser = StreamParser(stop=["STOP"])
    assert parser.push("all of it") == [ContentDelta("all of it")]
    assert parser.push("a < b <thin") == [ContentDelta("a < b ")]
    assert parser.push("g S") == [ContentDelta("<thing ")]
    assert parser.push("TOP and more") == [Stopped("STOP")]
    assert parser.stopped
    assert parser.push("leak") == parser.finish() == []


def test_stop_strings_apply_to_content_only() -> None:
    reply = "x\n\ny</think>\n\n<tool_call>a\n\nb</tool_call>\n\nHi.\n\nleak"
    assert joined(parse([reply], stop=["\n\n"], starts_in_thinking=True)) == [
        ReasoningDelta("x\n\ny"),
        ToolCallStarted(0),
        ToolCallDelta(0, "a\n\nb"),
        ToolCallEnded(0, closed=True),
        ContentDelta("Hi."),
        Stopped("\n\n"),
    ]


def test_first_then_shortest_stop_wins() -> None:
    assert parse(["xabcd"], stop=["bc", "abcd", "abc"]) == [ContentDelta("x"), Stopped("abc")]
    assert parse(["x<tool_call>"], stop=["<tool_call>"]) == [ContentDelta("x"), Stopped("<tool_call>")]


def test_reply_that_ends_inside_a_call() -> None:
    assert joined(parse(["<tool_call>a</tool"])) == [
        ToolCallStarted(0),
        ToolCallDelta(0, "a</tool"),
        ToolCallEnded(0, closed=False),
    ]


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StreamParser(stop=["a", ""])


def test_finish_reason_precedence() -> None:
    assert finish_reason(truncated=True, cancelled=True, complete_calls=1) == "length"
    assert finish_reason(truncated=False, cancelled=True, complete_calls=1) == "cancelled"
    assert finish_reason(truncated=False, complete_calls=1) == "tool_calls"
    assert finish_reason(truncated=False, complete_calls=1, incomplete_calls=1) == "stop"
    assert finish_reason(truncated=False) == "stop"
