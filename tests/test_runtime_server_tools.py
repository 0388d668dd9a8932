"""Tools and reasoning through every dialect, with a model that replies what the test scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from serve_support import RunningServer, ScriptedSession, nano

from clover.runtime.clover import Clover
from clover.runtime.errors import RequestError
from clover.runtime.text.chat_template import ChatTemplate
from clover.runtime.text.json_schema import check_schema, fits, text_fits

TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + (('<think>' + m.reasoning_content + '</think>') if m.reasoning_content else '') + m.content }}
{%- for call in m.tool_calls or [] %}{{ '[' + call.id + ' ' + call.function.name + ' ' + (call.function.arguments | tojson) + ']' }}{% endfor %}
{{- (' (' + m.tool_call_id + ')') if m.tool_call_id else '' }}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('<think>\n' if enable_thinking else '') }}{% endif %}"""

CALLS = """<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}
</tool_call>
<tool_call>
<function=get_time>
<parameter=zone>
7
</parameter>
</function>
</tool_call>"""
ARGUMENTS = [{"city": "Oslo", "days": 2}, {"zone": 7}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TIME_SCHEMA = {"type": "object", "properties": {"zone": {"type": "integer"}}}
FUNCTIONS = [
    {"name": "get_weather", "description": "Forecast.", "parameters": SCHEMA},
    {"name": "get_time", "parameters": TIME_SCHEMA},
]


def script(prompt: str) -> str:
    """What the model replies: thinks when asked to, calls both tools, then reports what they gave."""
    thought = "Let me see.\n</think>\n\n" if prompt.endswith("<think>\n") else ""
    if "<|im_start|>tool" in prompt:
        return thought + "It is 3 degrees at noon."
    if "At once" in prompt:
        return thought + CALLS
    if "get_weather" not in prompt:
        return thought + "I have no tools. " + CALLS
    return thought + "Looking.\n" + CALLS


class Engine(Clover):
    """Records the prompts the model saw."""

    prompts: list[str]


@pytest.fixture(scope="module")
def engine() -> Engine:
    alone = nano()
    tokenizer = alone.tokenizer
    assert tokenizer is not None
    prompts: list[str] = []

    def reply(ids: list[int]) -> list[int]:
        prompts.append(tokenizer.decode(ids, keep_control_tokens=True))
        return [*tokenizer.encode(script(prompts[-1])), 2]

    made = Engine(alone.bundle, ScriptedSession(reply), tokenizer, ChatTemplate(TEMPLATE, tokenizer))
    made.prompts = prompts
    return made


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[RunningServer]:
    with RunningServer(engine, slots=2, cache_mb=0) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as opened:
        yield opened


@pytest.fixture
def claude(server: RunningServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as opened:
        yield opened


def result_of(call_id: str, name: str) -> str:
    return {"get_weather": "3 degrees", "get_time": "noon"}[name]


@pytest.mark.parametrize("thinking", [False, True])
def test_a_chat_loop_with_tools(client: Any, engine: Engine, thinking: bool) -> None:
    asked: dict[str, Any] = {
        "model": "nano",
        "tools": [{"type": "function", "function": f} for f in FUNCTIONS],
        "extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}},
    }
    messages: list[Any] = [{"role": "user", "content": "Weather and time?"}]
    first = client.chat.completions.create(messages=messages, **asked).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.content == "Looking."
    calls = first.message.tool_calls or []
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("get_weather", ARGUMENTS[0]),
        ("get_time", ARGUMENTS[1]),
    ]
    assert first.message.model_dump().get("reasoning_content") == ("Let me see." if thinking else None)
    messages.append(first.message.model_dump(exclude_none=True))
    for call in calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result_of(call.id, call.function.name)})
    second = client.chat.completions.create(messages=messages, **asked).choices[0]
    assert (second.message.content, second.finish_reason) == ("It is 3 degrees at noon.", "stop")
    # the model saw its own calls and each result under the call's id
    for call in calls:
        assert f"[{call.id} {call.function.name} " in engine.prompts[-1]
        assert f"({call.id})" in engine.prompts[-1]


def test_streamed_calls_join_to_the_same(client: Any) -> None:
    chunks = list(
        client.chat.completions.create(
            model="nano",
            messages=[{"role": "user", "content": "Weather?"}],
            tools=[{"type": "function", "function": f} for f in FUNCTIONS],
            stream=True,
            extra_body={"enable_thinking": True},
        )
    )
    names, arguments, ids = {}, {0: "", 1: ""}, set()
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            if call.function.name:
                names[call.index] = call.function.name
                ids.add(call.id)
            arguments[call.index] += call.function.arguments or ""
    assert names == {0: "get_weather", 1: "get_time"} and len(ids) == 2
    assert [json.loads(a) for a in arguments.values()] == ARGUMENTS
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert "".join(c.choices[0].delta.model_dump().get("reasoning_content") or "" for c in chunks) == "Let me see."
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Looking."


def test_without_tools_a_call_is_only_text(client: Any) -> None:
    for extra in ({}, {"tools": [{"type": "function", "function": FUNCTIONS[0]}], "tool_choice": "none"}):
        got = client.chat.completions.create(model="nano", messages=[{"role": "user", "content": "Hi"}], **extra)
        message = got.choices[0].message
        assert not message.tool_calls and "<tool_call>" in (message.content or "")
        assert got.choices[0].finish_reason == "stop"


def test_one_call_at_most_ends_the_reply_behind_it(client: Any, claude: Any) -> None:
    asked: dict[str, Any] = {"model": "nano", "messages": [{"role": "user", "content": "Weather?"}]}
    tools = [{"type": "function", "function": f} for f in FUNCTIONS]
    both = client.chat.completions.create(tools=tools, **asked)
    for limit in (None, 500):
        one = client.chat.completions.create(tools=tools, parallel_tool_calls=False, max_tokens=limit, **asked)
        assert one.choices[0].finish_reason == "tool_calls" and one.choices[0].message.content == "Looking."
        assert [json.loads(c.function.arguments) for c in one.choices[0].message.tool_calls] == ARGUMENTS[:1]
        assert one.usage.completion_tokens < both.usage.completion_tokens
    response = client.responses.create(
        model="nano",
        input="Weather?",
        tools=[{"type": "function", **f} for f in FUNCTIONS],
        parallel_tool_calls=False,
    )
    assert [o.type for o in response.output] == ["message", "function_call"] and not response.parallel_tool_calls
    message = claude.messages.create(
        max_tokens=500,
        tools=[{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        **asked,
    )
    assert [b.type for b in message.content] == ["text", "tool_use"] and message.stop_reason == "tool_use"


def test_a_strict_tool_is_called_with_what_fits_its_schema_or_not_at_all(client: Any) -> None:
    narrow = {**SCHEMA, "properties": {"city": {"enum": ["Lyon"]}, "days": {"type": "integer"}}}
    asked: dict[str, Any] = {"model": "nano", "messages": [{"role": "user", "content": "Weather?"}]}
    for schemas, names in (
        ((SCHEMA, TIME_SCHEMA), ["get_weather", "get_time"]),
        ((narrow, TIME_SCHEMA), ["get_time"]),
        ((narrow, {**TIME_SCHEMA, "required": ["hour"]}), []),
    ):
        tools = [
            {"type": "function", "function": {"name": f["name"], "parameters": schema, "strict": True}}
            for f, schema in zip(FUNCTIONS, schemas, strict=True)
        ]
        got = client.chat.completions.create(tools=tools, **asked).choices[0]
        assert [c.function.name for c in got.message.tool_calls or []] == names
        assert got.finish_reason == ("tool_calls" if names else "stop")
        assert got.message.content.count("<tool_call>") == 2 - len(names)
        streamed = list(client.chat.completions.create(tools=tools, stream=True, **asked))
        calls = [c for chunk in streamed for c in chunk.choices[0].delta.tool_calls or []]
        assert [c.function.name for c in calls if c.function.name] == names
        assert sorted({c.index for c in calls}) == list(range(len(names)))
        assert streamed[-1].choices[0].finish_reason == got.finish_reason


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
LIST = {"$defs": {"node": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]}, "pair": {
    "type": "object", "properties": {"head": {"type": "string"}, "tail": {"$ref": "#/$defs/node"}},
    "required": ["head", "tail"]}}, "$ref": "#/$defs/node"}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (OBJECT, [{"a": 1}, {"a": 2.0}], [{}, {"a": "1"}, {"a": True}, {"a": 1, "b": 2}, [], None, {"a": 1.5}]),
        (
            LIST,
            [None, {"head": "x", "tail": {"head": "y", "tail": None}}],
            [1, {"head": "x"}, {"head": 1, "tail": None}],
        ),
        ({"enum": [1, "a", None]}, [1, "a", None], [True, "b", 0]),
        ({"const": False}, [False], [0, None, ""]),
        ({"type": ["string", "null"], "maxLength": 2}, ["ab", None], ["abc", 1]),
        (
            {"type": "array", "items": {"type": "number", "minimum": 0}, "maxItems": 2},
            [[], [0, 1.5]],
            [[-1], [1, 2, 3]],
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, [1, 5.5], [7, 2.5]),
        ({"allOf": [{"minimum": 1}, {"exclusiveMaximum": 3}]}, [1, 2, "x"], [0, 3]),
        ({"additionalProperties": {"type": "string"}}, [{"a": "b"}, 3], [{"a": 1}]),
        ({"$ref": "#/nowhere"}, [], [1, None, {}]),
        ({"$ref": "#"}, [], [1]),  # says nothing but itself
        (True, [1, None], []),
    ],
)
def test_strict_schemas(schema: Any, good: list[Any], bad: list[Any]) -> None:
    check_schema(schema, "schema")
    assert all(fits(value, schema) for value in good)
    assert not any(fits(value, schema) for value in bad)


def test_a_tangled_schema_costs_no_more_than_its_budget() -> None:
    knot: dict[str, Any] = {"$defs": {"a0": {"type": "null"}}, "$ref": "#/$defs/a60"}
    for i in range(60):  # 2 to the 60 ways to fail
        knot["$defs"][f"a{i + 1}"] = {"anyOf": [{"$ref": f"#/$defs/a{i}"}] * 2}
    check_schema(knot, "schema")
    assert not fits(1, knot)
    assert not text_fits("[" * 50_000 + "]" * 50_000, {"items": {"$ref": "#"}})
    assert not text_fits("9" * 10_000, {"type": "integer"})


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "a"},
        {"type": "text"},
        {"items": {"if": {}}},
        {"required": [1]},
        {"$ref": "http://x"},
        3,
        {"enum": 1},
    ],
)
def test_schemas_that_cannot_be_held_to_are_refused(schema: Any) -> None:
    with pytest.raises(RequestError):
        check_schema(schema, "schema")


def test_a_call_cut_by_the_limit_is_not_given_out_as_one(client: Any) -> None:
    got = client.chat.completions.create(
        model="nano",
        messages=[{"role": "user", "content": "Weather?"}],
        tools=[{"type": "function", "function": f} for f in FUNCTIONS],
        max_tokens=30,
    ).choices[0]
    calls = got.message.tool_calls or []
    assert got.finish_reason == "length" and "<tool_call>" in (got.message.content or "")
    assert [json.loads(c.function.arguments) for c in calls] == ARGUMENTS[:1]


@pytest.mark.parametrize("content", ["Hi", "At once"])
def test_reasoning_tokens_are_counted(client: Any, content: str) -> None:
    strict = [{"type": "function", "function": {**f, "strict": True}} for f in FUNCTIONS]  # calls that come whole
    got = client.chat.completions.create(
        model="nano",
        messages=[{"role": "user", "content": content}],
        extra_body={"enable_thinking": True},
        **({"tools": strict} if content == "At once" else {}),
    )
    assert bool(got.choices[0].message.tool_calls) == (content == "At once")
    tokenizer = nano().tokenizer
    assert got.usage and got.usage.completion_tokens_details and tokenizer
    reasoning = got.usage.completion_tokens_details.reasoning_tokens or 0
    least, markers = len(tokenizer.encode("Let me see.\n")), 3  # </think> and the line breaks behind it
    assert least <= reasoning <= least + markers
    assert got.usage.completion_tokens > reasoning


def test_a_responses_loop_with_tools(client: Any, engine: Engine) -> None:
    tools: list[Any] = [{"type": "function", **f} for f in FUNCTIONS]
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Weather and time?"}]}]
    asked: dict[str, Any] = {"model": "nano", "tools": tools, "extra_body": {"enable_thinking": True}}
    first = client.responses.create(input=items, **asked)
    assert [o.type for o in first.output] == ["reasoning", "message", "function_call", "function_call"]
    items += [o.model_dump(exclude_none=True) for o in first.output]
    for call in first.output:
        if call.type == "function_call":
            output = result_of(call.call_id, call.name)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    second = client.responses.create(input=items, instructions="Be brief.", **asked)
    assert second.output_text == "It is 3 degrees at noon."
    assert "<think>Let me see.</think>Looking.[call_" in engine.prompts[-1] and "Be brief." in engine.prompts[-1]
    events = list(client.responses.create(input=items[:1], stream=True, **asked))
    kinds = [e.type for e in events if not e.type.endswith(".delta")]
    message = ["response.content_part.added", "response.{}.done", "response.content_part.done"]
    wanted = ["response.created", "response.in_progress"]
    for parts in (
        [k.format("reasoning_text") for k in message],
        [k.format("output_text") for k in message],
        ["response.function_call_arguments.done"],
        ["response.function_call_arguments.done"],
    ):
        wanted += ["response.output_item.added", *parts, "response.output_item.done"]
    assert kinds == [*wanted, "response.completed"]
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [json.loads(e.arguments) for e in done] == ARGUMENTS
    for end in done:
        deltas = [
            e.delta for e in events if e.type == "response.function_call_arguments.delta" and e.item_id == end.item_id
        ]
        assert "".join(deltas) == end.arguments
    final = events[-1].response
    assert [o.type for o in final.output] == [o.type for o in first.output]


def test_a_messages_loop_with_tools(claude: Any, engine: Engine) -> None:
    tools: list[Any] = [
        {"name": f["name"], "description": "d", "input_schema": f["parameters"], "cache_control": {"type": "ephemeral"}}
        for f in FUNCTIONS
    ]
    asked: dict[str, Any] = {"model": "nano", "max_tokens": 500, "tools": tools, "thinking": {"type": "adaptive"}}
    messages: list[Any] = [{"role": "user", "content": "Weather and time?"}]
    first = claude.messages.create(messages=messages, **asked)
    assert first.stop_reason == "tool_use"
    assert [b.type for b in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [b.input for b in first.content if b.type == "tool_use"] == ARGUMENTS
    with claude.messages.stream(messages=messages, **asked) as stream:
        streamed = stream.get_final_message()
    assert [b.type for b in streamed.content] == [b.type for b in first.content]
    assert [b.input for b in streamed.content if b.type == "tool_use"] == ARGUMENTS
    assert streamed.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": b.id, "content": [{"type": "text", "text": result_of(b.id, b.name)}]}
        for b in first.content
        if b.type == "tool_use"
    ]
    results[1]["is_error"] = True
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = claude.messages.create(messages=messages, **asked)
    assert [b.text for b in second.content if b.type == "text"] == ["It is 3 degrees at noon."]
    assert second.stop_reason == "end_turn"
    assert "<think>Let me see.</think>Looking.[call_" in engine.prompts[-1] and "Error: noon" in engine.prompts[-1]
