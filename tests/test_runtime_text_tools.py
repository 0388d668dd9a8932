"""Tool-call formats: any text in, valid JSON or a clean "malformed" out, whatever the split."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clover.runtime.text.tool_formats import ArgumentsDelta, CallEnded, CallMalformed, CallName
from clover.runtime.text.tool_formats.auto import AutoParser
from clover.runtime.text.tool_formats.values import allowed_types, parameter_schemas, parse_json

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "ok": {"type": "boolean"},
        "items": {"type": "array"},
        "where": {"$ref": "#/$defs/place"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "level": {"enum": [1, 2]},
        "loop": {"$ref": "#/properties/loop"},
    },
    "$defs": {"place": {"type": "object"}},
}
SCHEMAS = parameter_schemas([{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}])


def parse(pieces: list[str], schemas: Any = SCHEMAS) -> tuple[str, str] | None:
    """(name, arguments) of a good call, None of a malformed one. Checks the order of events on the way."""
    parser = AutoParser(schemas)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    assert isinstance(events[-1], CallEnded | CallMalformed)
    assert not any(isinstance(event, CallEnded | CallMalformed) for event in events[:-1])
    if isinstance(events[-1], CallMalformed):
        return None
    assert isinstance(events[0], CallName)
    return events[0].name, "".join(event.text for event in events if isinstance(event, ArgumentsDelta))


def call(text: str, schemas: Any = SCHEMAS) -> tuple[str, Any] | None:
    """As `parse`, in one piece and with the arguments as a value; checks that letter by letter gives the same."""
    result = parse([text], schemas)
    assert parse(list(text), schemas) == result
    return None if result is None else (result[0], json.loads(result[1]))


def split(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def xml(arguments: dict[str, str], name: str = "f") -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"\n<function={name}>\n{body}</function>\n"


def test_xml_values_are_typed_by_the_schema() -> None:
    given_text = {
        "text": "5",
        "count": "5",
        "ratio": "-2.5e3",
        "ok": "True",
        "items": '[1, {"a": null}]',
        "where": '{"x": 1}',
        "maybe": "null",
        "level": "2",
        "loop": "5",
        "unknown": "true",
    }
    assert call(xml(given_text)) == (
        "f",
        {
            "text": "5",
            "count": 5,
            "ratio": -2500.0,
            "ok": True,
            "items": [1, {"a": None}],
            "where": {"x": 1},
            "maybe": None,
            "level": 2,
            "loop": "5",
            "unknown": "true",
        },
    )
    assert call(xml({"count": "5"}), {}) == ("f", {"count": "5"})  # no schema: a string
    assert call(xml({"count": "05", "ok": "yes", "items": "[1,"})) == (
        "f",
        {"count": "05", "ok": "yes", "items": "[1,"},
    )
    assert call(xml({})) == ("f", {})


VALUES = st.lists(st.sampled_from(["\n", "</param", "<", '"', "\\", "é"]) | st.text(max_size=3), max_size=6).map(
    "".join
)


@given(st.dictionaries(st.text("abc_", min_size=1, max_size=4), VALUES))
def test_xml_strings_survive(arguments: dict[str, str]) -> None:
    assert call(xml(arguments)) == ("f", arguments)


def test_xml_without_layout_newlines() -> None:
    assert call("<function=f><parameter=text>a</parameter></function>") == ("f", {"text": "a"})
    assert call("<function=f><parameter=text></parameter></function>") == ("f", {"text": ""})


def test_strings_stream_before_they_are_complete() -> None:
    parser = AutoParser({})
    assert parser.push("<function=f>\n<parameter=text>\nhello") == [CallName("f"), ArgumentsDelta('{"text": "hello')]
    assert parser.push("\n</para") == []  # could be the end
    assert parser.push("graph") == [ArgumentsDelta("\\n</paragraph")]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "call f",
        "<function",
        "<function=>",
        "<function=" + "f" * 1000,
        "<function=f>",
        "<function=f>text</function>",
        "<function=f><parameter=a>1</function>",
        "<function=f><parameter=a>1</parameter>",
        "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
        "<function=f></function><function=g></function>",
        "{",
        "{}",
        '{"name": "f"',
        '{"name": 5}',
        '{"name": ""}',
        '{"name": "\\ud800"}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": "[1]"}',
        '{"name": "f", "arguments": 5}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1]}',
        '{"name": "f", "arguments": {"a": 1}{"b": 2}}',
        '{"name": "f", "arguments": {}, "arguments": {"a": 1}}',
        '{"name": "f", "name": "g"}',
        '{"name": "f"} {"name": "g"}',
        '{"name": "f"}]',
        '{"' + "n" * 1000 + '": 1}',
        '[{"name": "f"}]',
    ],
)
def test_malformed_calls_are_reported_not_raised(text: str) -> None:
    assert call(text) is None


@pytest.mark.parametrize("bomb", ["[" * 10_000, '{"a":' * 10_000, "[" * 10_000 + "]" * 10_000, '"' + '\\"' * 10_000])
def test_nesting_bombs_are_harmless(bomb: str) -> None:
    assert parse(['{"name": "f", "arguments": {"a": ' + bomb + "}}"]) is None
    assert parse(['{"name": "f", "arguments": ' + json.dumps(bomb) + "}"]) is None
    assert call(xml({"items": bomb})) == ("f", {"items": bomb})  # not a good array, so a string
    # Refused as soon as it is too deep: nothing waits for the end of a bomb.
    if bomb[0] != '"':
        assert isinstance(AutoParser({}).push('{"name": "f", "arguments": ' + bomb)[-1], CallMalformed)
    with pytest.raises(ValueError, match=r"nested|Unterminated|delimiter|Expecting|Extra"):
        parse_json(bomb)


def test_json_forms() -> None:
    assert call('\n{"name": "f", "arguments": {"a": [1, "}"], "b": {"c": "\\"{"}}}\n') == (
        "f",
        {"a": [1, "}"], "b": {"c": '"{'}},
    )
    assert call('{"arguments": {"a": 1}, "id": {"name": "x"}, "name": "g"}') == ("g", {"a": 1})
    assert call('{"name": "f"}') == call('{"name": "f", "arguments": null}') == ("f", {})
    assert call('{"name": "f", "arguments": "{\\"a\\": 1}"}') == ("f", {"a": 1})
    assert parse(['{"name": "f", "arguments": {"a": ' + "9" * 10_000 + "}}"]) is not None


def test_json_arguments_stream() -> None:
    parser = AutoParser({})
    assert parser.push('{"arguments": {"a"') == []  # no name yet
    assert parser.push(': 1}, "name": "f"') == [CallName("f"), ArgumentsDelta('{"a": 1}')]
    parser = AutoParser({})
    assert parser.push('{"name": "f", "arguments": {"a": [1, ') == [CallName("f"), ArgumentsDelta('{"a": [1, ')]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
)


@given(st.text(min_size=1, max_size=9), st.dictionaries(st.text(), JSON), st.booleans(), st.lists(st.integers(0, 500)))
def test_json_round_trip(name: str, arguments: dict[str, Any], ascii_only: bool, cuts: list[int]) -> None:
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)
    result = parse(split(text, cuts))
    assert result is not None
    assert (result[0], json.loads(result[1])) == (name, arguments)


PIECES = [
    "<function=f>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
    "\n",
    "{",
    "}",
    '"',
    "name",
    "arguments",
    ":",
    ",",
    "[",
    "]",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=20), st.lists(st.integers(0, 500), max_size=8))
def test_any_text_in_any_split_is_safe(words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    result = parse([text])
    assert parse(split(text, cuts)) == result
    if result is not None:
        assert isinstance(json.loads(result[1]), dict)


def test_schema_types() -> None:
    assert allowed_types(SCHEMA, "maybe") == {"integer", "null"}
    assert allowed_types(SCHEMA, "loop") == allowed_types(SCHEMA, "none") == allowed_types(None, "a") == set()
    assert allowed_types({"properties": {"a": {"type": ["string", "null"], "nullable": True}}}, "a") == {
        "string",
        "null",
    }
