"""Function calls while a reply is written: what a stream gave out must join to the whole reply's, however it was split."""

from __future__ import annotations

import json
from typing import Any

import jiter
import pytest
from call_support import CUTS, NAMES, REPLIES, TOKENIZER, TOOLS, Call, calls, parse_pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from clover.runtime.text.function_calls import FunctionArgumentsDelta, FunctionCallEnded, FunctionCallStarted
from clover.runtime.text.reply import FunctionCall, ReplyEvent, ReplyParser, ReplyText, collect_reply
from clover.runtime.text.stream_parser import ContentDelta


def parse(text: str | list[int], cuts: list[int], **options: Any) -> list[ReplyEvent]:
    """The events of a reply, see parse_pieces."""
    return [event for piece in parse_pieces(text, cuts, **options) for event in piece]


def collect(events: list[ReplyEvent]) -> ReplyText:
    """The whole reply. Checks the events' order, and that arguments are JSON when their call is complete and never else."""
    open_call: int | None = None
    given_out: dict[int, str] = {}
    for event in events:
        if isinstance(event, FunctionCallStarted):
            assert open_call is None and event.index == len(given_out)
            open_call, given_out[event.index] = event.index, ""
        elif isinstance(event, FunctionArgumentsDelta | FunctionCallEnded):
            assert event.index == open_call, "calls come one after the other"
            if isinstance(event, FunctionCallEnded):
                open_call = None
                assert is_object(given_out[event.index]) == event.complete
            else:
                assert event.text and not is_object(given_out[event.index])
                given_out[event.index] += event.text
                # clients parse what came so far; this is the parser of both vendors'
                jiter.from_json(given_out[event.index].encode(), partial_mode="trailing-strings")
        else:
            assert open_call is None, "nothing comes inside a call"
    reply = collect_reply(events)
    assert [call.arguments for call in reply.function_calls] == list(given_out.values())
    return reply


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


FILLER = st.sampled_from(["", "\n", "Looking.", "<", "é\n"])


@settings(deadline=None)
@given(st.lists(calls(), max_size=3), FILLER, FILLER, CUTS, st.booleans(), st.booleans())
def test_well_formed_calls(
    wanted: list[Call], before: str, after: str, cuts: list[int], held: bool, closed: bool
) -> None:
    text = "Hm.</think>" + before + "\n".join(call.text for call in wanted) + after
    if not closed and wanted and not after:
        text = text.removesuffix("</tool_call>")  # the model ended its reply instead
    checks = {name: is_object for name in NAMES} if held else {}
    options: dict[str, Any] = {"tools": TOOLS, "checks": checks, "starts_in_thinking": True, "stop": ["STOP"]}
    reply = collect(parse(text, cuts, **options))
    assert reply == collect(parse(text, [], **options))
    assert [call.name for call in reply.function_calls] == [call.name for call in wanted]
    assert [json.loads(call.arguments) for call in reply.function_calls] == [call.arguments for call in wanted]
    assert (reply.reasoning, reply.reason) == ("Hm.", "tool_calls" if wanted else "stop")
    assert reply.content.replace("\n", "") == (before + after).replace("\n", "")


@settings(deadline=None)
@given(st.lists(calls(), min_size=1, max_size=2), CUTS, st.integers(0, 400), st.booleans())
def test_calls_cut_anywhere(wanted: list[Call], cuts: list[int], kept: int, held: bool) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "checks": {name: is_object for name in NAMES} if held else {}}
    ids = TOKENIZER.encode("".join(call.text for call in wanted))
    cut = ids[: kept % len(ids)]
    reply = collect(parse(cut, cuts, hit_limit=True, **options))
    assert reply == collect(parse(cut, [], hit_limit=True, **options))
    assert reply.reason == "length"
    whole = collect(parse(ids, [], **options)).function_calls
    for i, call in enumerate(reply.function_calls):
        assert call == whole[i] or not call.complete
        assert call.complete or (i == len(reply.function_calls) - 1 and not held)
        assert whole[i].arguments.startswith(call.arguments)


@settings(deadline=None)
@given(REPLIES, CUTS, st.booleans(), st.booleans())
def test_any_reply_in_any_split(text: str, cuts: list[int], limit: bool, one_call: bool) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "stop": ["STOP"], "hit_limit": limit, "one_call": one_call}
    reply = collect(parse(text, cuts, **options))
    assert reply == collect(parse(text, [], **options))
    complete = [call.complete for call in reply.function_calls]
    assert all(call.name in NAMES for call in reply.function_calls)
    assert not one_call or len(complete) <= 1
    if reply.reason == "tool_calls":
        assert complete and all(complete)
    if limit and not reply.stop_string and not one_call:
        assert reply.reason == "length"


@pytest.mark.parametrize(
    ("call", "begun"),
    [
        ('{"name": "f", "arguments": {"a": 1}} and more', [FunctionCall("f", '{"a": 1', complete=False)]),
        ('{"name": "f", "arguments": [1]}', [FunctionCall("f", "", complete=False)]),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', [FunctionCall("f", '{"a": 1, ', complete=False)]),
        (
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            [FunctionCall("f", '{"a": "1"', complete=False)],
        ),
        ('{"arguments": {"a": 1}, "name": 5}', []),
        ('{"name": "rm", "arguments": {"a": 1}}', []),
        ("<function=rm><parameter=a>1</parameter></function>", []),
        ("call f", []),
    ],
)
def test_what_is_no_call_stays_in_the_text(call: str, begun: list[FunctionCall]) -> None:
    text = f"<tool_call>{call}</tool_call>"
    good = '<tool_call>{"name": "f"}</tool_call>'
    for cuts in ([], [1]):
        alone = collect(parse(f"a{text}b", cuts, tools=TOOLS))
        assert alone == ReplyText(f"a{text}b", "", tuple(begun), "stop", None)
        both = collect(parse(text + good, cuts, tools=TOOLS))
        assert both.function_calls == (*begun, FunctionCall("f", "{}"))
        assert both.reason == ("stop" if begun else "tool_calls")  # which would say that every call can be run
        cut = collect(parse(text.removesuffix("</tool_call>"), cuts, tools=TOOLS, hit_limit=True))
        assert cut == ReplyText(text.removesuffix("</tool_call>"), "", tuple(begun), "length", None)


def test_arguments_come_as_they_are_written() -> None:
    parser = ReplyParser(TOKENIZER, tools=TOOLS)

    def push(text: str) -> list[ReplyEvent]:
        return [*parser.push(TOKENIZER.encode(text))]

    assert push("Hi.<tool_call>\n<function=get_weather>\n<parameter=a_string>\nOs") == [
        ContentDelta("Hi."),
        FunctionCallStarted(0, "get_weather"),
        FunctionArgumentsDelta(0, '{"a_string": "Os'),
    ]
    assert push('lo "\n') == [FunctionArgumentsDelta(0, 'lo \\"')]
    assert push("</parameter>\n<parameter=a_integer>\n1") == [FunctionArgumentsDelta(0, '", "a_integer": ')]
    assert push("2\n</parameter>\n") == [FunctionArgumentsDelta(0, "12")]
    assert push("</function>\n") == []
    assert push("</tool_call>") == [FunctionArgumentsDelta(0, "}"), FunctionCallEnded(0, complete=True)]


def test_a_call_that_the_limit_cuts_keeps_what_came() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 12, "b": "x'
    events = parse(text, [], tools=TOOLS, hit_limit=True)
    assert FunctionCallEnded(0, complete=False, raw=text) in events
    assert collect(events) == ReplyText(
        "", "", (FunctionCall("f", '{"a": 12, "b": "x', complete=False),), "length", None
    )
    early = "<tool_call>\n{"
    assert collect(parse(early, [], tools=TOOLS, hit_limit=True)) == ReplyText(early, "", (), "length", None)


def test_without_tools_any_function_may_be_called() -> None:
    assert collect(parse('<tool_call>{"name": "rm"}</tool_call>', [])).function_calls == (FunctionCall("rm", "{}"),)


def test_a_call_that_a_check_refuses_stays_in_the_text() -> None:
    text = "a<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    for cuts in ([], [1]):
        for accepted in (False, True):
            checks = {"f": lambda arguments, accepted=accepted: accepted and arguments == '{"a": "1"}'}
            reply = collect(parse(text, cuts, tools=TOOLS, checks=checks))
            wanted = ("a", "tool_calls", 1) if accepted else (text, "stop", 0)
            assert (reply.content, reply.reason, len(reply.function_calls)) == wanted


def test_one_call_at_most() -> None:
    good, bad = '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f", "arguments": 5}</tool_call>'
    options: dict[str, Any] = {"tools": TOOLS, "one_call": True}
    for limit in (False, True):
        one = collect(parse(good + "text" + good, [1], hit_limit=limit, **options))
        assert one == ReplyText("", "", (FunctionCall("f", "{}"),), "tool_calls", None)
        broken = collect(parse(bad + good, [1], hit_limit=limit, **options))
        assert broken == ReplyText(bad, "", (FunctionCall("f", "", complete=False),), "stop", None)
    cut = collect(parse(good[:-8], [1], hit_limit=True, **options))
    assert cut == ReplyText("", "", (FunctionCall("f", "", complete=False),), "length", None)
