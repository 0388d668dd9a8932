"""Streams that wait, readers that don't read, and a scheduler that died."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serve_support import RunningServer, WatchedSession, nano, nano_session, wait_until

from clover.runtime.clover import Clover
from clover.runtime.server import generation

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "Repeat: Elm"}]


@pytest.fixture
def gated() -> Iterator[tuple[RunningServer, WatchedSession]]:
    """A server whose engine can be held or made to fail."""
    alone = nano()
    session = WatchedSession(nano_session(1))
    with RunningServer(Clover(alone.bundle, session, alone.tokenizer, alone.template), cache_mb=0) as server:
        yield server, session
        session.gate.set()


@pytest.mark.parametrize(
    ("path", "mark"), [(CHAT, ": waiting"), ("/v1/responses", ": waiting"), ("/v1/messages", "event: ping")]
)
def test_a_stream_that_waits_shows_that_it_lives(
    gated: tuple[RunningServer, WatchedSession], monkeypatch: pytest.MonkeyPatch, path: str, mark: str
) -> None:
    server, session = gated
    monkeypatch.setattr(generation, "WAIT_SECONDS", 0.05)
    body: dict[str, Any] = {"stream": True}
    body |= {"input": QUESTION} if "responses" in path else {"messages": QUESTION, "max_tokens": 20}
    session.gate.clear()
    with server.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        marks = 0
        lines = []
        for line in response.iter_lines():
            lines.append(line)
            marks += line == mark
            if marks == 3:
                session.gate.set()
        assert marks >= 3
    assert any("[DONE]" in line or "completed" in line or "message_stop" in line for line in lines)


def test_whole_replies_wait_too(gated: tuple[RunningServer, WatchedSession], monkeypatch: pytest.MonkeyPatch) -> None:
    server, session = gated
    monkeypatch.setattr(generation, "WAIT_SECONDS", 0.01)
    session.gate.clear()
    threading.Timer(0.2, session.gate.set).start()
    got = server.http.post(CHAT, json={"messages": QUESTION, "max_tokens": 20}).json()
    assert got["choices"][0]["message"]["content"] == nano().chat(QUESTION, max_new_tokens=20).text


def test_a_failed_step_is_a_500_and_the_next_request_is_answered(gated: tuple[RunningServer, WatchedSession]) -> None:
    server, session = gated
    for stream in (False, True):
        session.fail_next = True
        got = server.http.post(CHAT, json={"messages": QUESTION, "max_tokens": 20, "stream": stream})
        assert got.status_code == 500 and got.json()["error"]["code"] == "engine_error"
        assert "Traceback" not in got.text and "the engine failed" not in got.text
    assert server.http.post(CHAT, json={"messages": QUESTION, "max_tokens": 20}).status_code == 200
    assert server.http.get("/health").status_code == 200


def test_a_dead_scheduler_is_told_by_health_and_nobody_waits_for_it(
    gated: tuple[RunningServer, WatchedSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, session = gated
    session.gate.clear()
    answers: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: answers.append(server.http.post(CHAT, json={"messages": QUESTION, "max_tokens": 20}))
    )
    waiting.start()
    wait_until(lambda: server.service.scheduler.live == 1)
    monkeypatch.setattr(server.service.scheduler, "_step", lambda: 1 / 0)
    session.gate.set()
    waiting.join(30)
    got = answers[0] if answers else None
    assert got is not None and got.status_code in (200, 500)
    assert server.http.post(CHAT, json={"messages": QUESTION}).status_code in (500, 503)
    wait_until(lambda: server.http.get("/health").status_code == 503)
    assert server.http.get("/ready").status_code == 503
    assert server.http.post(CHAT, json={"messages": QUESTION}).status_code == 503
