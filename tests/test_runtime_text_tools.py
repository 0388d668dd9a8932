"""Tool-call formats: any text in, valid JSON or a clean "malformed" out, whatever the split."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import jiter
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover.runtime.text.tool_formats import ArgumentsDelta, CallEnded, CallMalformed, CallName
from clover.runtime.text.tool_formats.auto import AutoParser
from clover.runtime.text.tool_formats.json_scanner import JsonError
from clover.runtime.text.tool_formats.values import allowed_types, container_text, parameter_schemas

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


def parse(pieces: list[str], schemas: Any = SCHEMAS) -> tuple[str | None, str, bool]:
    """(name, arguments, whether the call is good). Checks on the way the order of events, and that the arguments are
    JSON if the call is good and never else, at no point."""
    parser = AutoParser(schemas)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    *before, last = events
    assert isinstance(last, CallEnded | CallMalformed)
    assert all(isinstance(event, ArgumentsDelta if i else CallName) for i, event in enumerate(before))
    name = before[0].name if before and isinstance(before[0], CallName) else None
    texts = [event.text for event in before if isinstance(event, ArgumentsDelta)]
    good = isinstance(last, CallEnded)
    for end in range(1, len(texts) + 1, 1 + len(texts) // 100):
        check_arguments("".join(texts[:end]), whole=good and end == len(texts))
    if texts:
        check_arguments("".join(texts), whole=good)
    return name, "".join(texts), good


def check_arguments(text: str, *, whole: bool) -> None:
    """Arguments as far as they came. Clients parse them on the way, with jiter, the parser of both vendors' clients."""
    assert isinstance(jiter.from_json(text.encode(), partial_mode="trailing-strings"), dict)
    if whole:
        assert isinstance(json.loads(text), dict) and jiter.from_json(text.encode()) == json.loads(text)
    else:
        with pytest.raises(ValueError):
            json.loads(text)


def call(text: str, schemas: Any = SCHEMAS) -> tuple[str, Any] | None:
    """(name, arguments) of a good call, None of a malformed one; checks that letter by letter gives the same."""
    name, arguments, good = parse([text], schemas)
    assert parse(list(text), schemas) == (name, arguments, good)
    return (name, json.loads(arguments)) if good and name is not None else None


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
    for unfit in ({"count": "05", "ok": "yes", "items": "[1,"}, {"count": "9" * 5000, "ratio": "1e999"}):
        assert call(xml(unfit)) == ("f", unfit)
    assert call(xml({})) == ("f", {})


VALUES = st.lists(st.sampled_from(["\n", "</param", "<", '"', "\\", "é"]) | st.text(max_size=3), max_size=6).map(
    "".join
)


@settings(deadline=None)
@given(st.dictionaries(st.text("abc_", min_size=1, max_size=4), VALUES))
def test_xml_strings_survive(arguments: dict[str, str]) -> None:
    assert call(xml(arguments)) == ("f", arguments)


def test_xml_without_layout_newlines() -> None:
    assert call("<function=f><parameter=text>a</parameter></function>") == ("f", {"text": "a"})
    assert call("<function=f><parameter=text></parameter></function>") == ("f", {"text": ""})


def test_xml_that_ends_without_the_last_parameters_end() -> None:
    for end in ("</function>", "\n</function>\n", "\n</function>  \n"):
        assert call("<function=f><parameter=text>\na" + end) == ("f", {"text": "a"})
        assert call("<function=f><parameter=count>5" + end) == ("f", {"count": 5})
    twice = "<function=f><parameter=text>a</function>\n</function>\n"
    assert call(twice) == ("f", {"text": "a</function>"})
    assert call("<function=f><parameter=text></function></parameter></function>") == ("f", {"text": "</function>"})


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
        "<function=f><parameter=a>1",
        "<function=f><parameter=a>1</function> and more",
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
        '{"name": "f", "arguments": {"a": 1, "a": 2}}',
        '{"name": "f", "arguments": {}, "parameters": {"a": 1}}',
        '{"name": "f", "arguments": {"a": {"\\u0062": 1, "b": 2}}}',
        '{"name": "f", "arguments": {"a": "\\ud83d"}}',
        '{"name": "f", "arguments": {"a": "\\q"}}',
        '{"name": "f", "arguments": {"a": 01}}',
        '{"name": "f", "arguments": {"a": tru}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": {"a": ' + "9" * 400 + "}}",
        '{"name": "f", "arguments": {"a": ' + "9" * 10_000 + "}}",
        '{"name": "f", "arguments": {"a": 1,}}',
        '{"name": "f", "arguments": {"a" 1}}',
        '{"name": "f", "arguments": {"a": 1}} and more',
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
    assert not parse(['{"name": "f", "arguments": {"a": ' + bomb + "}}"])[2]
    assert not parse(['{"name": "f", "arguments": ' + json.dumps(bomb) + "}"])[2]
    assert call(xml({"items": bomb})) == ("f", {"items": bomb})  # not a good array, so a string
    # Refused as soon as it is too deep: nothing waits for the end of a bomb.
    if bomb[0] != '"':
        assert isinstance(AutoParser({}).push('{"name": "f", "arguments": ' + bomb)[-1], CallMalformed)
    with pytest.raises(JsonError, match=r"nested|unfinished|expected"):
        container_text(bomb)


def test_json_forms() -> None:
    assert call('\n{"name": "f", "arguments": {"a": [1, "}"], "b": {"c": "\\"{"}}}\n') == (
        "f",
        {"a": [1, "}"], "b": {"c": '"{'}},
    )
    assert call('{"arguments": {"a": 1}, "id": {"name": "x"}, "name": "g"}') == ("g", {"a": 1})
    assert call('{"parameters": {"a": 1}, "name": "f"}') == ("f", {"a": 1})
    assert call('{"name": "f"}') == call('{"name": "f", "arguments": null}') == ("f", {})
    assert call('{"name": "f", "arguments": "{\\"a\\": 1}"}') == ("f", {"a": 1})
    assert call('{"name": "f", "arguments": {"a": "1\n2\t\x00"}}') == (
        "f",
        {"a": "1\n2\t\x00"},
    )  # not strict, but plain
    assert call('{"name": "f", "arguments": {"a": ' + "9" * 300 + "}}") == ("f", {"a": 10**300 - 1})


def test_json_arguments_stream() -> None:
    parser = AutoParser({})
    assert parser.push('{"arguments": {"a"') == []  # no name yet
    assert parser.push(': 1}, "name": "f"') == [CallName("f"), ArgumentsDelta('{"a": 1')]
    assert parser.push("}") == []
    assert parser.finish() == [ArgumentsDelta("}"), CallEnded()]
    parser = AutoParser({})
    assert parser.push('{"name": "f", "arguments": {"a": [1, ') == [CallName("f"), ArgumentsDelta('{"a": [1, ')]
    for piece, given_out in (
        ("2", ""),  # perhaps 25
        ("5", ""),
        (", tr", "25, "),
        ("ue, {", "true, {"),
        ('"key', ""),  # perhaps one that was there already
        ('": "value', '"key": "value'),
        ("\\ud83d", ""),  # half a character
        ("\\ude00", "\\ud83d\\ude00"),
        ("\\", ""),
        ('"', '\\"'),
        ('"', '"'),
    ):
        assert parser.push(piece) == ([ArgumentsDelta(given_out)] if given_out else []), piece
    assert parser.push("} }") == [ArgumentsDelta("} "), CallMalformed("unexpected '}'")]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    st.text(min_size=1, max_size=9),
    st.dictionaries(st.text(max_size=4), JSON, max_size=3),
    st.booleans(),
    st.lists(st.integers(0, 500)),
)
def test_json_round_trip(name: str, arguments: dict[str, Any], ascii_only: bool, cuts: list[int]) -> None:
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)
    given_name, text, good = parse(split(text, cuts))
    assert good and (given_name, json.loads(text)) == (name, arguments)


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


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=20), st.lists(st.integers(0, 500), max_size=8))
def test_any_text_in_any_split_is_safe(words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    assert parse(split(text, cuts)) == parse([text])


def test_schema_types() -> None:
    assert allowed_types(SCHEMA, "maybe") == {"integer", "null"}
    assert allowed_types(SCHEMA, "loop") == allowed_types(SCHEMA, "none") == allowed_types(None, "a") == set()
    assert allowed_types({"properties": {"a": {"type": ["string", "null"], "nullable": True}}}, "a") == {
        "string",
        "null",
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"properties": {"n": {"type": "integer"}}}}},
        {
            "type": "object",
            "allOf": [{"properties": {"m": {"type": "string"}}}, {"properties": {"n": {"type": "integer"}}}],
        },
        {"properties": {"m": {"type": "string"}}, "additionalProperties": {"type": "integer"}},
        {"properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"enum": [1, 2]}}},
    ],
)
def test_a_parameters_schema_is_found_wherever_it_stands(schema: Any) -> None:
    assert allowed_types(schema, "n") == {"integer"}
    knot = {"anyOf": [{"$ref": "#"}] * 50, "properties": {"n": {"$ref": "#"}}}
    assert allowed_types(knot, "n") == set()
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}
    assert allowed_types({"properties": {"n": {"$ref": "#/$defs/d0"}}, "$defs": chain}, "n") == set()
    assert allowed_types({"properties": {"n": {"type": "string", "allOf": [{"type": "null"}]}}}, "n") == {"string"}
