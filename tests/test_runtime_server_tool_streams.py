"""Streamed tool calls in every dialect: the events and their order, and that clients make of them what a whole reply holds."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, MessageDeltaUsage, RawMessageStreamEvent, ToolParam
from call_support import CUTS, REPLIES, TOOLS, calls, parse_pieces
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from serve_support import RunningServer, nano, nano_slots

from clover.runtime.clover import Clover
from clover.runtime.errors import RequestError
from clover.runtime.reply import ReplyFinished
from clover.runtime.server import chat, completions, messages, responses
from clover.runtime.server.generation import Ended, Piece, Usage, collect
from clover.runtime.server.request import Ask, CompletionRequest
from clover.runtime.text.chat_template import ChatTemplate
from clover.runtime.text.function_calls import FunctionArgumentsDelta
from clover.runtime.text.reply import Finished, ReplyEvent

RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
Clients = tuple[openai.OpenAI, anthropic.Anthropic]
Pieces = Sequence[Sequence[ReplyEvent]]
USAGE = Usage(prompt_tokens=5, completion_tokens=9, cached_tokens=2, reasoning_tokens=3, blocks=1, steps=4)


class Played:
    """A generation of one choice that is written already."""

    choices, cached_tokens, usage = 1, USAGE.cached_tokens, USAGE

    def __init__(self, pieces: Sequence[Sequence[ReplyEvent]]) -> None:
        self._items: list[Piece | Ended] = []
        for piece in pieces:
            events = [event for event in piece if not isinstance(event, Finished)]
            if events:
                self._items.append(Piece(0, events, ()))
        end = pieces[-1][-1]
        assert isinstance(end, Finished)
        self._items.append(Ended(0, end.reason, end.stop_string, USAGE))

    def __aiter__(self) -> Played:
        return self

    async def __anext__(self) -> Piece | Ended:
        if not self._items:
            raise StopAsyncIteration
        return self._items.pop(0)


class Wire(BaseHTTPRequestHandler):
    """Answers the vendors' clients with what the test put on the wire."""

    body = b""

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(Wire.body)))
        self.end_headers()
        self.wfile.write(Wire.body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Wire) as wire:
        threading.Thread(target=wire.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{wire.server_address[1]}"
        with openai.OpenAI(base_url=url, api_key="x") as one, anthropic.Anthropic(base_url=url, api_key="x") as other:
            yield one, other
        wire.shutdown()


def play(events: AsyncIterator[bytes]) -> list[Any]:
    """Puts a stream on the wire. The JSON of its events; named events carry their own type."""

    async def read() -> bytes:
        return b"".join([chunk async for chunk in events])

    made = []
    Wire.body = asyncio.run(read())
    for event in Wire.body.decode().split("\n\n"):
        *name, data = event.split("\n")
        if data and data != "data: [DONE]":
            made.append(json.loads(data.removeprefix("data: ")))
            assert name in ([], [f"event: {made[-1].get('type')}"])
    return made


def ask() -> Ask:
    return Ask([[1, 2, 3, 4, 5]], nano().options(), "messages")


def without_ids(value: Any) -> Any:
    """A reply without what differs from one to the next."""
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "created", "created_at")}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def function_calls(message: ChatCompletionMessage) -> list[tuple[str, str]]:
    """(name, arguments) of every call."""
    found: list[tuple[str, str]] = []
    for call in message.tool_calls or []:
        assert call.type == "function"
        found.append((call.function.name, call.function.arguments))
    return found


def check_chat(clients: Clients, pieces: Pieces, one_piece: Pieces) -> None:
    request = CompletionRequest(ask(), "nano", True, True, False)
    chunks = play(chat.stream(request, Played(pieces), None))  # type: ignore[arg-type]
    seen = 0
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:  # the header: everything but the arguments, which are empty
                    assert call["index"] == seen and call["type"] == "function"
                    assert call["function"]["arguments"] == "" and call["function"]["name"]
                    seen += 1
                else:  # fragments belong to the call begun last
                    assert list(call) == ["index", "function"] and call["index"] == seen - 1
                    assert list(call["function"]) == ["arguments"] and call["function"]["arguments"]
    assert [bool(c["choices"]) and c["choices"][0]["finish_reason"] is not None for c in chunks[-2:]] == [True, False]
    assert all(c["usage"] is None for c in chunks[:-1])
    choices = asyncio.run(collect(Played(one_piece)))  # type: ignore[arg-type]
    whole = ChatCompletion.model_validate(chat.whole(request, choices, USAGE, None))  # type: ignore[arg-type]
    with clients[0].chat.completions.stream(model="nano", messages=[{"role": "user", "content": "a"}]) as stream:
        list(stream)
        got, wanted = stream.current_completion_snapshot.choices[0], whole.choices[0]
    assert chunks[-1]["usage"] == json.loads(whole.model_dump_json(include={"usage"}, exclude_unset=True))["usage"]
    assert got.finish_reason == wanted.finish_reason
    assert (got.message.content or "") == (wanted.message.content or "")
    called = function_calls(got.message)
    assert called == function_calls(wanted.message) and len(called) == seen
    complete = [is_object(arguments) for _, arguments in called]
    assert got.finish_reason != "tool_calls" or (complete and all(complete))


def check_responses(clients: Clients, pieces: Pieces, one_piece: Pieces) -> None:
    request = responses.ResponseRequest(ask(), "nano", True, {"tools": [], "tool_choice": "auto", "metadata": {}})
    request.echo.update(parallel_tool_calls=True, instructions=None, temperature=0.0, top_p=1.0, reasoning={})
    events = play(responses.stream(request, Played(pieces)))  # type: ignore[arg-type]
    for event in events:
        RESPONSE_EVENT.validate_python(event)
    with clients[0].responses.stream(model="nano", input="a") as stream:
        assert [event.type for event in stream if "." in event.type] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    whole = asyncio.run(responses.whole(request, Played(one_piece)))  # type: ignore[arg-type]
    Response.model_validate(whole)
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == whole["status"]
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    for index, item in enumerate(events[-1]["response"]["output"]):
        own = [e for e in events if e.get("output_index") == index]
        assert [e for e in events[events.index(own[0]) :]][: len(own)] == own, "items come one after the other"
        assert own[-1]["item"] == item
        if item["type"] != "function_call":
            continue
        first, *deltas = [e["type"].removeprefix("response.") for e in own]
        arguments = "function_call_arguments."
        done = [arguments + "done"] if item["status"] == "completed" else []
        grown = len(deltas) - len(done) - 1
        assert [first, *deltas] == ["output_item.added", *[arguments + "delta"] * grown, *done, "output_item.done"]
        assert own[0]["item"]["arguments"] == "" and own[0]["item"]["call_id"] == item["call_id"]
        assert "".join(e["delta"] for e in own if e["type"].endswith(".delta")) == item["arguments"]
        assert is_object(item["arguments"]) == (item["status"] == "completed")


def check_messages(clients: Clients, pieces: Pieces, one_piece: Pieces) -> None:
    request = messages.MessageRequest(ask(), "nano", True)
    events = play(messages.stream(request, Played(pieces)))  # type: ignore[arg-type]
    blocks: list[str] = []
    for event in events:
        if event["type"] == "ping":
            continue
        MESSAGE_EVENT.validate_python(event)
        if event["type"].startswith("content_block"):
            what = event["type"].removeprefix("content_block_")
            open_block = bool(blocks) and blocks[-1] != "stop"
            assert open_block == (what != "start"), "blocks come one after the other"
            assert event["index"] == blocks.count("start") - (what != "start")
            blocks.append(what)
    kinds = [event["type"] for event in events if not event["type"].startswith("content_block")]
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]
    with clients[1].messages.stream(model="nano", max_tokens=9, messages=[{"role": "user", "content": "a"}]) as stream:
        snapshot = stream.get_final_message()
    (choice,) = asyncio.run(collect(Played(one_piece)))  # type: ignore[arg-type]
    whole = messages.whole(request, choice, USAGE)
    Message.model_validate(whole)
    assert snapshot.stop_reason == whole["stop_reason"] and snapshot.stop_sequence == whole["stop_sequence"]
    streamed = json.loads(snapshot.model_dump_json(exclude_unset=True))
    assert events[-2]["usage"] == whole["usage"]
    assert {k: streamed["usage"][k] for k in MessageDeltaUsage.model_fields if k in streamed["usage"]} == {
        k: whole["usage"][k] for k in MessageDeltaUsage.model_fields if k in whole["usage"]
    }
    complete = [is_object(part.text) for part in choice.parts.calls]
    assert whole["stop_reason"] != "tool_use" or (complete and all(complete))
    uses = [[b for b in message["content"] if b["type"] == "tool_use"] for message in (streamed, whole)]
    assert without_ids([b for b, good in zip(uses[0], complete, strict=True) if good]) == without_ids(uses[1])
    if all(complete):
        assert without_ids(streamed["content"]) == without_ids(whole["content"])


def check_completions(clients: Clients, pieces: Pieces, one_piece: Pieces) -> None:
    request = CompletionRequest(ask(), "nano", True, True, False)
    *chunks, last = play(completions.stream(request, Played(pieces), None))  # type: ignore[arg-type]
    choices = asyncio.run(collect(Played(one_piece)))  # type: ignore[arg-type]
    whole = completions.whole(request, choices, USAGE, None)  # type: ignore[arg-type]
    for made in (whole, chunks[-1], last):
        Completion.model_validate(made)
    (choice,) = whole["choices"]
    for chunk in chunks[:-1]:  # OpenAI's own streams have null here, which its type forgets
        Completion.model_validate({**chunk, "choices": [{**chunk["choices"][0], "finish_reason": "stop"}]})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [choice["finish_reason"]]
    assert last["choices"] == [] and last["usage"] == whole["usage"] and all(c["usage"] is None for c in chunks)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


WRITTEN = st.one_of(
    REPLIES, st.lists(calls(), max_size=2).map(lambda made: "Hm.</think>" + "".join(c.text for c in made))
)


@pytest.mark.parametrize("check", [check_chat, check_completions, check_responses, check_messages])
@settings(deadline=None)  # the clients compile their types on first use
@given(text=WRITTEN, cuts=CUTS, kept=st.integers(1, 200), limit=st.booleans(), thinking=st.booleans())
def test_clients_make_the_whole_reply_of_any_stream(
    clients: Clients, check: Callable[..., None], text: str, cuts: list[int], kept: int, limit: bool, thinking: bool
) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "stop": ["STOP"], "hit_limit": limit, "starts_in_thinking": thinking}
    text = text[:kept] if limit else text
    if check is check_completions:  # text is all there is to it
        options = {"stop": ["STOP"], "hit_limit": limit, "parse_thinking": False, "parse_tools": False}
    check(clients, parse_pieces(text, cuts, **options), parse_pieces(text, [], **options))


def test_a_stop_string_behind_calls_leaves_them_to_be_run() -> None:
    pieces = parse_pieces('<tool_call>{"name": "f"}</tool_call>Now STOP', [1], tools=TOOLS, stop=["STOP"])
    (choice,) = asyncio.run(collect(Played(pieces)))  # type: ignore[arg-type]
    message = messages.whole(messages.MessageRequest(ask(), "nano", False), choice, USAGE)
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert [block["type"] for block in message["content"]] == ["tool_use", "text"]


@pytest.mark.parametrize(
    ("text", "limit", "stop"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1, "b', True, "max_tokens"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}} more</tool_call>', False, "end_turn"),
        ('<tool_call>{"name": "other", "arguments": {"a": 1}}</tool_call>', False, "end_turn"),
    ],
)
def test_a_whole_message_holds_no_half_call(text: str, limit: bool, stop: str) -> None:
    for cuts in ([], [1]):
        (choice,) = asyncio.run(collect(Played(parse_pieces(text, cuts, tools=TOOLS, hit_limit=limit))))  # type: ignore[arg-type]
        message = messages.whole(messages.MessageRequest(ask(), "nano", False), choice, USAGE)
        assert (message["content"], message["stop_reason"]) == ([{"type": "text", "text": text}], stop)


# nano's own turns; it was trained to answer with a call, without being shown the tools
TEMPLATE = """
{%- if tools and false %}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
REQUEST = "Book 3 seats from Lyon to Malmo on 2026-03-12 for Hana."
PROPERTIES: dict[str, Any] = {name: {"type": "string"} for name in ("passenger", "from", "to", "date")}
PROPERTIES["seats"] = {"type": "integer"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": PROPERTIES}
ARGUMENTS = {"passenger": "Hana", "from": "Lyon", "to": "Malmo", "date": "2026-03-12", "seats": 3}
BLOCK = 16  # tokens, so that a call takes several blocks


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(nano_slots(2, TEMPLATE), slots=2, cache_mb=8) as running:
        yield running


def library() -> Clover:
    alone = nano()
    assert alone.tokenizer is not None
    return Clover(alone.bundle, alone.session, alone.tokenizer, ChatTemplate(TEMPLATE, alone.tokenizer))


def answer_of(first: str, call_id: str) -> str:
    """What nano says after its call and the tool's result, by the library."""
    function = {"name": "book_trip", "arguments": first}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": REQUEST},
        {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call_id, "content": "booked"},
    ]
    return library().chat(turns, max_new_tokens=40, block_size=BLOCK).text


def test_a_streamed_chat_loop_with_nano(server: RunningServer) -> None:
    turns: list[Any] = [{"role": "user", "content": REQUEST}]
    asked: dict[str, Any] = {
        "model": "nano",
        "tools": [{"type": "function", "function": {"name": "book_trip", "parameters": SCHEMA}}],
        "extra_body": {"block_size": BLOCK},
    }
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        with client.chat.completions.stream(messages=turns, max_tokens=100, **asked) as stream:
            events = list(stream)
            first = stream.get_final_completion().choices[0]
        deltas = [e for e in events if e.type == "tool_calls.function.arguments.delta" and e.arguments_delta]
        assert len(deltas) > 2, "the call is longer than a block"
        (done,) = [e for e in events if e.type == "tool_calls.function.arguments.done"]
        assert json.loads(done.arguments) == ARGUMENTS and first.finish_reason == "tool_calls"
        whole = client.chat.completions.create(messages=turns, max_tokens=100, **asked).choices[0]
        (call,) = first.message.tool_calls or []
        assert whole.message.tool_calls[0].function.arguments == call.function.arguments == done.arguments
        turns += [
            first.message.model_dump(exclude_none=True, exclude={"parsed": True}),
            {"role": "tool", "tool_call_id": call.id, "content": "booked"},
        ]
        turns[1]["tool_calls"][0]["function"].pop("parsed_arguments", None)
        with client.chat.completions.stream(messages=turns, max_tokens=40, **asked) as stream:
            last = stream.until_done().current_completion_snapshot.choices[0]
    assert (last.message.content or "") == answer_of(call.function.arguments, call.id)


def test_a_streamed_responses_loop_with_nano(server: RunningServer) -> None:
    items: list[Any] = [{"role": "user", "content": REQUEST}]
    asked: dict[str, Any] = {
        "model": "nano",
        "tools": [{"type": "function", "name": "book_trip", "parameters": SCHEMA}],
        "extra_body": {"block_size": BLOCK},
    }
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        with client.responses.stream(input=items, max_output_tokens=100, **asked) as stream:
            events = list(stream)
            first = stream.get_final_response()
        fragments = sum(e.type == "response.function_call_arguments.delta" for e in events)
        assert first.usage is not None
        assert 2 < fragments <= (first.usage.model_extra or {})["blocks"], "a block gives one fragment"
        (call,) = first.output
        assert call.type == "function_call" and json.loads(call.arguments) == ARGUMENTS
        items += [{"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "booked"}]
        with client.responses.stream(input=items, max_output_tokens=40, **asked) as stream:
            list(stream)
            assert stream.get_final_response().output_text == answer_of(call.arguments, call.call_id)


def test_a_streamed_messages_loop_with_nano(server: RunningServer) -> None:
    turns: list[Any] = [{"role": "user", "content": REQUEST}]
    tool: ToolParam = {"name": "book_trip", "input_schema": SCHEMA}
    asked: dict[str, Any] = {"model": "nano", "max_tokens": 100, "extra_body": {"block_size": BLOCK}}
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        with client.messages.stream(messages=turns, tools=[tool], **asked) as stream:
            parts = [e.partial_json for e in stream if e.type == "input_json"]
            first = stream.get_final_message()
        assert len(parts) > 2 and json.loads("".join(parts)) == ARGUMENTS
        (block,) = first.content
        assert block.type == "tool_use" and (block.input, first.stop_reason) == (ARGUMENTS, "tool_use")
        with client.messages.stream(
            messages=turns, tools=[{**tool, "eager_input_streaming": False}], **asked
        ) as stream:
            assert [e.partial_json for e in stream if e.type == "input_json"] == ["".join(parts)]
        turns += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "booked"}]},
        ]
        with client.messages.stream(messages=turns, tools=[tool], **{**asked, "max_tokens": 40}) as stream:
            last = stream.get_final_message()
    assert "".join(b.text for b in last.content if b.type == "text") == answer_of("".join(parts), block.id)


def test_the_library_streams_calls_and_holds_them_to_strict_schemas() -> None:
    turns = [{"role": "user", "content": REQUEST}]
    narrow = {**SCHEMA, "properties": {**PROPERTIES, "seats": {"type": "integer", "maximum": 2}}}
    for schema, strict, calls_wanted in ((SCHEMA, True, 1), (narrow, False, 1), (narrow, True, 0)):
        tools = [{"type": "function", "function": {"name": "book_trip", "parameters": schema, "strict": strict}}]
        items = list(library().stream(turns, tools=tools, max_new_tokens=100, block_size=BLOCK))
        fragments = [item.text for item in items if isinstance(item, FunctionArgumentsDelta)]
        reply = items[-1].reply if isinstance(items[-1], ReplyFinished) else None
        assert reply is not None and len(reply.tool_calls) == calls_wanted
        assert [call.arguments for call in reply.tool_calls] == ["".join(fragments)] * calls_wanted
        assert len(fragments) > 2 or strict
        assert ("<tool_call>" in reply.text) == (not calls_wanted)
    for wrong, field in (
        ({"strict": 1}, "strict"),
        ({"strict": True, "parameters": {"pattern": "a"}}, "parameters.pattern"),
    ):
        with pytest.raises(RequestError, match=f"tools.0..function.{field}"):
            library().stream(turns, tools=[{"type": "function", "function": {"name": "f", **wrong}}])
