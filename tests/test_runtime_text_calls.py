"""Function calls while a reply is written: what a stream gave out must join to the whole reply's, however it was split."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clover.runtime.text.function_calls import FunctionArgumentsDelta, FunctionCallEnded, FunctionCallStarted
from clover.runtime.text.reply import FunctionCall, ReplyEvent, ReplyParser, ReplyText, collect_reply
from clover.runtime.text.stream_parser import ContentDelta
from clover.runtime.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(__file__).parents[1] / "examples" / "nano")

SCALARS = {
    "string": st.text(max_size=8)
    | st.sampled_from(
        ["", "\n", "5", "null", '"', "\\", "</param", "<parameter=a>", "</function>", "{", "STOP", "🙂é\u2028"]
    ),
    "integer": st.integers(-(10**20), 10**20),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
}
ANY = st.recursive(
    st.one_of(*SCALARS.values()),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3),
    max_leaves=5,
)
VALUES = {
    **SCALARS,
    "array": st.lists(ANY, max_size=3),
    "object": st.dictionaries(st.text(max_size=4), ANY, max_size=3),
}
NAMES = ["f", "get_weather", "höhe"]
PARAMETERS = {"type": "object", "properties": {f"a_{kind}": {"type": kind} for kind in VALUES}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES]
# what XML can't spell: it has no escapes, and the first marker ends what it ends
ENDS = ("</parameter>", "</tool_call>")


@dataclass(frozen=True)
class Call:
    """A well-formed call and how a model may write it."""

    name: str
    arguments: dict[str, Any]
    text: str


@st.composite
def calls(draw: st.DrawFn) -> Call:
    kinds = draw(st.lists(st.sampled_from(list(VALUES)), unique=True, max_size=4))
    arguments = {f"a_{kind}": draw(VALUES[kind]) for kind in kinds}
    name = draw(st.sampled_from(NAMES))
    if draw(st.booleans()):
        ascii_only, indent = draw(st.booleans()), draw(st.sampled_from([None, 2]))
        members: dict[str, Any] = {"name": name, "arguments": arguments}
        if draw(st.booleans()):
            members = dict(reversed(members.items()))
        text = json.dumps(members, ensure_ascii=ascii_only, indent=indent)
        if draw(st.booleans()):
            text = f"\n{text}\n"
    else:
        text = f"\n<function={name}>\n"
        for key, value in arguments.items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=draw(st.booleans()))
            text += f"<parameter={key}>\n{shown}\n</parameter>\n"
        text += "</function>\n"
    if any(end in text.replace("\n</parameter>\n", "") for end in ENDS):
        return Call(name, {}, f"<tool_call><function={name}></function></tool_call>")
    return Call(name, arguments, f"<tool_call>{text}</tool_call>")


def parse(text: str | list[int], cuts: list[int], **options: Any) -> list[ReplyEvent]:
    """The events of a reply, its tokens given in pieces of `cuts` sizes, then one by one if there are any cuts at all."""
    finish = {key: options.pop(key) for key in ("hit_limit", "cancelled") if key in options}
    ids = TOKENIZER.encode(text) if isinstance(text, str) else text
    parser = ReplyParser(TOKENIZER, **options)
    events: list[ReplyEvent] = []
    sizes = iter(cuts)
    while ids:
        size = next(sizes, 1) if cuts else len(ids)
        events += parser.push(ids[:size])
        ids = ids[size:]
    return [*events, *parser.finish(**finish)]


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


CUTS = st.lists(st.integers(1, 12), min_size=1, max_size=12)
FILLER = st.sampled_from(["", "\n", "Looking.", "<", "é\n"])


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


SOUP = [
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "<function=rm>",
    "<parameter=a>",
    "<parameter=b>",
    "</parameter>",
]
SOUP += [
    "</function>",
    "\n",
    '{"name": "f", "arguments": ',
    '{"name": "rm", "arguments": {}}',
    "{}",
    '{"a": 1',
    "}",
    '"',
]
SOUP += [", ", '"b": "', "\\", "STOP", "<think>", "</think>", "é", "Hi."]


@given(st.lists(st.sampled_from(SOUP), max_size=14).map("".join), CUTS, st.booleans(), st.booleans())
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
