"""`/v1/fill` and `/v1/decide`: what the library gives, alone or in company, and every field honoured or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serve_support import RunningServer, nano, nano_slots

FILL, DECIDE, CHAT = "/v1/fill", "/v1/decide", "/v1/chat/completions"
TEMPLATE = '{"op": "{{op:assign|dispatch|set_radius}}", "uav": {{uav:int}}, "site": "{{site:4}}", "km": {{km:number}}}'
ORDERS = ["Send UAV31 to Thorn, priority high.", "Assign survey at Cedar to UAV12.", "UAV9 search radius 750 m."]
DOCUMENT = "The lease asks for 30 days of notice; it came after 12. The walls were sound."
QUESTIONS: dict[str, list[Any]] = {
    "notice_in_time": [True, False],
    "refund": [0, 50, 100],
    "site": ["Elm", "Oak", None],
    "why": [{"a": [1, "u"]}, "late"],
}


def chat(order: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Parse the dispatch: {order}"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(nano_slots(3), slots=3, cache_mb=16) as running:
        yield running


def test_a_filled_template_is_the_librarys(server: RunningServer) -> None:
    choices: list[dict[str, Any]] = [{}, {"threshold": 0.5, "block_size": 8}]
    for order in ORDERS:
        for options in choices:
            form = nano().fill(chat(order), TEMPLATE, **options)
            got = server.http.post(FILL, json={"messages": chat(order), "template": TEMPLATE, **options})
            assert got.status_code == 200, got.text
            reply = got.json()
            assert reply["object"] == "form" and reply["text"] == form.text and json.loads(form.text)
            assert reply["values"] == form.values and list(reply["values"]) == ["op", "uav", "site", "km"]
            assert reply["confidences"] == pytest.approx(form.confidences, rel=1e-4)
            usage = reply["usage"]
            assert (usage["steps"], usage["blocks"]) == (form.steps, form.blocks)
            assert usage["completion_tokens"] == len(form.tokens) and usage["prompt_tokens"] > 0


def test_a_decision_is_the_librarys_and_its_answers_are_choices(server: RunningServer) -> None:
    wanted = nano().decide(DOCUMENT, QUESTIONS)
    reply = server.http.post(DECIDE, json={"document": DOCUMENT, "questions": QUESTIONS, "together": True}).json()
    assert reply["object"] == "decision" and reply["answers"] == wanted.answers == json.loads(reply["text"])
    assert reply["confidences"] == pytest.approx(wanted.confidences, rel=1e-4)
    assert reply["usage"]["steps"] == wanted.steps
    assert all(reply["answers"][name] in choices for name, choices in QUESTIONS.items())


def test_forms_decisions_and_free_replies_share_steps(server: RunningServer) -> None:
    def ask(n: int) -> Any:
        order = ORDERS[n // 3]
        if n % 3 == 0:
            return server.http.post(FILL, json={"messages": chat(order), "template": TEMPLATE}).json()["text"]
        if n % 3 == 1:
            return server.http.post(DECIDE, json={"document": order, "questions": QUESTIONS}).json()["answers"]
        got = server.http.post(CHAT, json={"messages": chat(order), "max_tokens": 60}).json()
        return got["choices"][0]["message"]["content"]

    wanted: list[Any] = []
    for order in ORDERS:
        wanted.append(nano().fill(chat(order), TEMPLATE).text)
        wanted.append(nano().decide(order, QUESTIONS).answers)
        wanted.append(nano().chat(chat(order), max_new_tokens=60).text)
    with ThreadPoolExecutor(9) as pool:
        assert list(pool.map(ask, [*range(9)] * 2)) == wanted * 2
    server.wait_idle()


SHARED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.5}, "temperature"),
    ({"top_p": 0.5}, "top_p"),
    # equal to what changes nothing in Python, and of another type
    *(({name: False}, name) for name in ("temperature", "top_k", "presence_penalty", "frequency_penalty")),
    *(({name: True}, name) for name in ("top_p", "repetition_penalty", "seed")),
    ({"seed": "x"}, "seed"),
    ({"seed": -5}, "seed"),
    ({"mode": "autoregressive"}, "mode"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"threshold": 2}, "threshold"),
    ({"block_size": 7}, "block_size"),
    ({"max_tokens": 3}, "max_tokens"),
    ({"stream": True}, "stream"),
    ({"stop": "a"}, "stop"),
    ({"n": 2}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"timeout": 0}, "timeout"),
    ({"model": "other"}, "model"),
    ({"colour": 1}, "colour"),
]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        *SHARED,
        ({"template": None}, "template"),
        ({"template": 3}, "template"),
        ({"template": "no hole"}, "template"),
        ({"template": "{{a:4097}}"}, "template"),
        ({"template": "{{a:1}}{{b:1}}"}, "template"),
        ({"template": "\ud800 {{a:1}}"}, "template"),
        ({"template": "{{a:4000}}"}, "template"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": chat("a b " * 2000)}, "messages"),
        ({"enable_thinking": True}, "enable_thinking"),
        ({"tools": []}, "tools"),
    ],
)
def test_what_fill_cannot_do_is_refused_by_name(server: RunningServer, change: dict[str, Any], field: str) -> None:
    _refused(server, FILL, {"messages": chat(ORDERS[0]), "template": TEMPLATE, **change}, field)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        *SHARED,
        ({"document": None}, "document"),
        ({"document": ["a"]}, "document"),
        ({"document": "\udfff"}, "document"),
        ({"document": "a b " * 2000}, "document"),
        ({"together": False}, "together"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"questions": None}, "questions"),
        ({"questions": {}}, "questions"),
        ({"questions": ["a"]}, "questions"),
        ({"questions": {"a": [True]}}, "questions"),
        ({"questions": {"a": "yes"}}, "questions"),
        ({"questions": {"a": [1, 1]}}, "questions"),
        ({"questions": {"a\ud800": [1, 2]}}, "questions"),
        ({"questions": {"a": ["\ud800", "b"]}}, "questions"),
        ({"questions": {f"q{i}": [0, 1] for i in range(9)}}, "questions"),
    ],
)
def test_what_decide_cannot_do_is_refused_by_name(server: RunningServer, change: dict[str, Any], field: str) -> None:
    _refused(server, DECIDE, {"document": DOCUMENT, "questions": QUESTIONS, **change}, field)


def _refused(server: RunningServer, path: str, body: dict[str, Any], field: str) -> None:
    got = server.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    error = got.json()["error"]
    assert got.status_code == (404 if field == "model" else 400) and error["param"] == field, error
    assert field in error["message"] and "\n" not in error["message"]
    server.wait_idle()
