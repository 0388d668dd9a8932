"""Replies that follow a JSON schema, through the server: those of the library, alone or in company."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from serve_support import RunningServer, nano, nano_slots

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "op": {"enum": ["assign", "dispatch", "set_radius"]},
        "uav": {"type": "integer"},
        "urgent": {"type": "boolean"},
        "site": {"type": "string", "maxLength": 20},
    },
    "required": ["op", "uav", "urgent", "site"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "order", "strict": True, "schema": SCHEMA}}
QUESTIONS = [
    f"Parse the dispatch: {order}"
    for order in (
        "Send UAV31 to Thorn, priority high.",
        "Assign survey at Cedar to UAV12.",
        "UAV9 search radius 750 m.",
    )
]


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(nano_slots(3), slots=3, cache_mb=16) as running:
        yield running


def test_a_reply_follows_the_schema_and_is_the_librarys(server: RunningServer) -> None:
    wanted = [nano().fill(chat(q), response_format=FORMAT) for q in QUESTIONS]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as opened:
        client: Any = opened
        for question, form in zip(QUESTIONS, wanted, strict=True):
            got = client.chat.completions.create(
                model="nano", messages=chat(question), response_format=FORMAT, temperature=0, max_tokens=200
            )
            assert got.choices[0].message.content == form.text and got.choices[0].finish_reason == "stop"
            assert json.loads(form.text) == form.value and form.value.keys() == SCHEMA["properties"].keys()
            assert got.usage.steps == form.steps and got.usage.completion_tokens == len(form.tokens)
            flat = {"type": "json_schema", "name": "order", "schema": SCHEMA}
            response = client.responses.create(model="nano", input=question, text={"format": flat})
            assert response.output_text == form.text and response.text.format.type == "json_schema"
            chunks = list(
                client.chat.completions.create(
                    model="nano",
                    messages=chat(question),
                    response_format=FORMAT,
                    stream=True,
                    extra_body={"stream_denoise": True},
                )
            )
            texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
            assert "".join(texts) == form.text and chunks[-1].choices[0].finish_reason == "stop"
            assert sum(not c.choices for c in chunks) == form.steps


def test_forms_share_steps_with_free_replies(server: RunningServer) -> None:
    def ask(n: int) -> str:
        question = QUESTIONS[n % 3]
        extra: dict[str, Any] = {"max_tokens": 60} if n % 2 else {"response_format": FORMAT}
        got = server.http.post(CHAT, json={"messages": chat(question), **extra})
        return str(got.json()["choices"][0]["message"]["content"])

    def alone(n: int) -> str:
        if n % 2:
            return nano().chat(chat(QUESTIONS[n % 3]), max_new_tokens=60).text
        return nano().fill(chat(QUESTIONS[n % 3]), response_format=FORMAT).text

    wanted = [alone(n) for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, [*range(6)] * 3)) == wanted * 3
    server.wait_idle()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"mode": "autoregressive"}, "mode"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"stop": ["a"]}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"enable_thinking": True}, "enable_thinking"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}}, None),
        ({"response_format": {**FORMAT, "more": 1}}, "response_format.more"),
    ],
)
def test_what_a_form_cannot_do_is_refused_by_name(
    server: RunningServer, change: dict[str, Any], field: str | None
) -> None:
    body = {"messages": chat(QUESTIONS[0]), "response_format": FORMAT, **change}
    got = server.http.post(CHAT, json=body)
    assert got.status_code == 400 and got.json()["error"]["param"] == (field or "response_format.json_schema.schema")
