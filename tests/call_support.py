"""Replies with function calls, well-formed and not, for tests of the parser and of the dialects' streams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import engine_support
from hypothesis import strategies as st

from clover.runtime.text.reply import ReplyEvent, ReplyParser
from clover.runtime.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(engine_support.NANO)

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
REPLIES = st.lists(st.sampled_from(SOUP), max_size=14).map("".join)
CUTS = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def parse_pieces(text: str | list[int], cuts: list[int], **options: Any) -> list[Sequence[ReplyEvent]]:
    """What a reply's parser gives out for each piece: of `cuts` tokens, then of one, or all in one if there are no cuts."""
    finish = {key: options.pop(key) for key in ("hit_limit", "cancelled") if key in options}
    ids = TOKENIZER.encode(text) if isinstance(text, str) else text
    parser = ReplyParser(TOKENIZER, **options)
    pieces: list[Sequence[ReplyEvent]] = []
    sizes = iter(cuts)
    while ids:
        size = next(sizes, 1) if cuts else len(ids)
        pieces.append(parser.push(ids[:size]))
        ids = ids[size:]
    return [*pieces, parser.finish(**finish)]
