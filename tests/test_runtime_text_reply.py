"""From token ids to a reply, with every part chained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from clover.runtime.text.function_calls import FunctionArgumentsDelta, FunctionCallEnded, FunctionCallStarted
from clover.runtime.text.reply import (
    Finished,
    FunctionCall,
    ReplyEvent,
    ReplyParser,
    ReplyText,
    collect_reply,
)
from clover.runtime.text.stream_parser import ContentDelta
from clover.runtime.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(__file__).parents[1] / "examples" / "nano")

GOOD = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
BAD = '<tool_call>\n{"name": "f", "arguments": {"a": 1\n</tool_call>'


def reply(text: str, sizes: int = 32, **options: Any) -> ReplyText:
    finish = {key: options.pop(key) for key in ("hit_limit", "cancelled") if key in options}
    parser = ReplyParser(TOKENIZER, **options)
    ids = TOKENIZER.encode(text)
    events: list[ReplyEvent] = []
    for start in range(0, len(ids), sizes):
        events += parser.push(ids[start : start + sizes])
    return collect_reply([*events, *parser.finish(**finish)])


WORDS = [GOOD, BAD, "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "STOP", "é", "<|im_end|>", "Hi."]


@settings(deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=8).map("".join), st.integers(1, 40), st.booleans())
def test_block_size_does_not_matter(text: str, sizes: int, limit: bool) -> None:
    assert reply(text, sizes, stop=["STOP"], hit_limit=limit) == reply(text, 10_000, stop=["STOP"], hit_limit=limit)


def test_reasoning_then_content_then_calls() -> None:
    xml = "<tool_call>\n<function=g>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"
    schema = {"properties": {"n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    result = reply(f"Hm.\n</think>\n\nOn it.\n{GOOD}\n{xml}<|im_end|>", tools=tools, starts_in_thinking=True)
    calls = (FunctionCall("f", '{"a": 1}'), FunctionCall("g", '{"n": 5}'))
    assert result == ReplyText("On it.", "Hm.", calls, "tool_calls", None)


def test_truncation_wins_unless_a_stop_string_came_first() -> None:
    assert reply(GOOD, hit_limit=True).reason == "length"
    assert reply("a STOP b", stop=["STOP"], hit_limit=True) == ReplyText("a ", "", (), "stop", "STOP")
    assert reply("a", cancelled=True).reason == "cancelled"


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    parser = ReplyParser(TOKENIZER)
    events = parser.push([id_ for id_ in range(TOKENIZER.size) if TOKENIZER.token_bytes(id_) == b"\xc3"])
    assert collect_reply([*events, *parser.finish()]).content == "\ufffd"


def test_events_of_a_stream() -> None:
    parser = ReplyParser(TOKENIZER, stop=["STOP"])
    assert parser.push(TOKENIZER.encode("Hi")) == [ContentDelta("Hi")]
    assert parser.push(TOKENIZER.encode(GOOD[:-5])) == [
        FunctionCallStarted(0, "f"),
        FunctionArgumentsDelta(0, '{"a": 1'),
    ]
    assert parser.push(TOKENIZER.encode_plain(GOOD[-5:])) == [
        FunctionArgumentsDelta(0, "}"),
        FunctionCallEnded(0, complete=True),
    ]
    assert not parser.stopped
    parser.push(TOKENIZER.encode("STOP leak"))
    assert parser.stopped
    assert parser.finish() == [Finished("tool_calls", "STOP")]
