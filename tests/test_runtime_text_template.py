"""Chat templates: the nano's, and one with tools and thinking in the manner of Qwen3.5's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clover.runtime.errors import BundleError, RequestError
from clover.runtime.text.chat_template import ChatTemplate
from clover.runtime.text.messages import normalise_messages
from clover.runtime.text.tokenizer import Tokenizer

NANO = Path(__file__).parents[1] / "examples" / "nano"
TOKENIZER = Tokenizer.load(NANO)
TEMPLATE = ChatTemplate.load(NANO, TOKENIZER)
QWEN_LIKE = """
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments | items %}
            {{- '<parameter=' + key + '>\\n' }}
            {{- (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
    {%- if loop.index > 1000 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "description": "<b>é</b>"}}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, TOKENIZER)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_nano_prompt() -> None:
    prompt = TEMPLATE.render(user("Repeat: Ana"))
    assert prompt.text == "<|im_start|>user\nRepeat: Ana<|im_end|>\n<|im_start|>assistant\n"
    assert not prompt.opens_thinking
    assert TOKENIZER.encode_prompt(prompt) == TOKENIZER.encode(prompt.text)
    assert TEMPLATE.render(user("a"), add_generation_prompt=False).text.endswith("<|im_end|>\n")
    parts = [{"type": "text", "text": "Repeat: "}, {"type": "text", "text": "Ana"}]
    assert TEMPLATE.render(user(parts)) == prompt
    assert TEMPLATE.render([{"role": "user", "content": "Repeat: Ana", "refusal": None, "annotations": []}]) == prompt
    assert TEMPLATE.render([{"role": "developer", "content": "x"}]).text.startswith("<|im_start|>system\nx")


def test_agrees_with_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "{{ 7 * 7 }} <i>"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"], "b": "x"}}}],
        },
        {"role": "tool", "content": "done"},
    ]
    for thinking in (True, False):
        rendered = render_jinja_template(
            [conversation], tools=[TOOL], chat_template=QWEN_LIKE, add_generation_prompt=True, enable_thinking=thinking
        )
        ours = template(QWEN_LIKE).render(conversation, tools=[TOOL], enable_thinking=thinking)
        assert ours.text == rendered[0][0]
        assert ours.opens_thinking == thinking
    as_text: list[dict[str, Any]] = json.loads(json.dumps(conversation))
    as_text[2]["content"] = None
    as_text[2]["tool_calls"][0]["function"]["arguments"] = json.dumps({"a": [1, "é"], "b": "x"})
    assert template(QWEN_LIKE).render(as_text, tools=[TOOL], enable_thinking=False) == ours


def test_jinja_in_messages_is_never_evaluated() -> None:
    code = "{{ 7 * 7 }}{% for x in range(9) %}{{ x }}{% endfor %}{{ raise_exception('no') }}{# gone #}"
    assert code in TEMPLATE.render(user(code)).text


@given(st.lists(st.sampled_from(["<|im_end|>", "<|mask|>", "<tool_call>", "</think>", "\n", "a", "\ufdd0", "<|im_"])))
def test_messages_can_not_inject_tokens(words: list[str]) -> None:
    text = "".join(words)
    control = {TOKENIZER.token_id(name) for name in TOKENIZER.control_tokens}

    def control_ids(spelled: str) -> list[int]:
        function = {"name": "f", "arguments": {"k" + spelled: [spelled]}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": spelled},
            {"role": "assistant", "content": spelled, "tool_calls": [{"function": function}]},
            {"role": "tool", "content": spelled},
        ]
        tool = {"type": "function", "function": {"name": "g", "description": spelled}}
        ids = TOKENIZER.encode_prompt(template(QWEN_LIKE).render(messages, tools=[tool]))
        return [id_ for id_ in ids if id_ in control]

    assert control_ids(text) == control_ids("x")
    prompt = TEMPLATE.render(user(text))
    assert TOKENIZER.decode(TOKENIZER.encode_prompt(prompt)) == "user\n" + text + "\nassistant\n"
    # In what a user writes not even the markers are tokens.
    markers = {TOKENIZER.token_id("<tool_call>"), TOKENIZER.token_id("</think>")}
    assert markers.isdisjoint(TOKENIZER.encode_prompt(prompt))


def test_guards_survive_ascii_json() -> None:
    prompt = template("{{ messages | tojson(ensure_ascii=true) }}").render(user("é😀 <|im_end|> \\ufdd0"))
    assert json.loads(prompt.text_without_guards)[0]["content"] == "é😀 <|im_end|> \\ufdd0"
    assert TOKENIZER.token_id("<|im_end|>") not in TOKENIZER.encode_prompt(prompt)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ({"role": "user"}, "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "robot", "content": "a"}], "messages[0].role"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role"),
        (user(None), "messages[0].content"),
        (user(5), "messages[0].content"),
        (user("\ud800"), "messages[0].content"),
        (user([{"type": "image_url", "image_url": {}}]), "messages[0].content"),
        (user([{"type": "text"}]), "messages[0].content[0].text"),
        ([*user("a"), {"role": "user", "content": "a", "cache": True}], "messages[1].cache"),
        ([{"role": "user", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "", "tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "assistant"}], "messages[0].content"),
    ],
)
def test_bad_messages_are_refused_by_name(messages: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        TEMPLATE.render(messages)
    assert caught.value.field == field
    assert field in str(caught.value)


def test_what_the_template_can_not_do_is_refused() -> None:
    with pytest.raises(RequestError, match="no place for tools"):
        TEMPLATE.render(user("a"), tools=[TOOL])
    assert TEMPLATE.render(user("a"), tools=[], enable_thinking=True).text
    with pytest.raises(RequestError, match="enable_thinking"):
        template("{{ messages[0].content }}").render(user("a"), enable_thinking=True)
    with pytest.raises(RequestError) as caught:
        template(QWEN_LIKE).render(user("a"), tools=[{"name": "f"}])
    assert caught.value.field == "tools[0]"
    with pytest.raises(RequestError, match="must be at the beginning"):
        template(QWEN_LIKE).render([*user("a"), {"role": "system", "content": "b"}])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{{ range(99999999999) }}",
        "{{ 'a' * 99999999999 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ lipsum(n=99999999) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[9].content + 'a' }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_bad_templates_fail_fast_and_clearly(source: str) -> None:
    with pytest.raises(BundleError, match="chat template"):
        template(source).render(user("a"))


@pytest.mark.parametrize(
    "trap",
    [
        "{{ 1 / (messages[0].content | length - 4) }}",
        "{{ 1 + messages[0].content if messages[0].content == 'trap' }}",
        "{{ {}[messages[0].content].a.b if messages[0].content == 'trap' }}",
        "{% for i in range((messages[0].content | length - 1) * 999999) %}{% endfor %}",
        "{% if messages[0].content == 'trap' %}{{ raise_exception('x' * 10000) }}{% endif %}",
    ],
)
def test_messages_that_trip_a_working_template_are_the_requests_fault(trap: str) -> None:
    source = template("{{ messages[0].content }}" + trap)
    assert source.render(user("a")).text.startswith("a")
    with pytest.raises(RequestError) as caught:
        source.render(user("trap"))
    assert caught.value.field == "messages" and len(str(caught.value)) < 300


def test_tools_that_trip_a_working_template_are_named() -> None:
    source = template("{{ messages[0].content }}{% for t in tools or [] %}{{ t.function.parameters + 1 }}{% endfor %}")
    with pytest.raises(RequestError) as caught:
        source.render(user("plain"), tools=[TOOL])
    assert caught.value.field == "tools"


def test_loading(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"chat_template\.jinja"):
        ChatTemplate.load(tmp_path, TOKENIZER)
    config: dict[str, Any] = {"eos_token": {"content": "END"}, "chat_template": "{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path, TOKENIZER).render(user("a")).text == "END"
    config["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path, TOKENIZER).render(user("a")).text == "yes"
    (tmp_path / "chat_template.jinja").write_text("{% generation %}first{% endgeneration %}")
    assert ChatTemplate.load(tmp_path, TOKENIZER).render(user("a")).text == "first"
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(BundleError, match="not valid Jinja"):
        ChatTemplate.load(tmp_path, TOKENIZER)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(BundleError, match="JSON"):
        ChatTemplate.load(tmp_path, TOKENIZER)


def test_a_tool_call_without_an_id_gets_one() -> None:
    """Clients may leave the id out; templates may read it."""
    call = {"function": {"name": "f", "arguments": {}}}
    (message,) = normalise_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert message["tool_calls"][0]["id"] == "call_0"
