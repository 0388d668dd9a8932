"""Clients that are slow, endless or rude on the wire: each is told so and let go, with both of uvicorn's parsers."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from serve_support import RunningServer, nano_slots, wait_until

from clover.runtime.server import connections, generation

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ASKED = {"messages": [{"role": "user", "content": "Repeat: Elm"}], "max_tokens": 5}
HEAD = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
GIVE_UP = 20.0  # a connection that the server does not close within this is held open


@pytest.fixture(scope="module", params=["httptools and uvloop", "h11 and asyncio"])
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        if "h11" in request.param:
            patch.setattr(connections, "_over_httptools", lambda: None)
        else:
            pytest.importorskip("httptools")
        running = RunningServer(nano_slots(1), slots=1, client_timeout=0.2, max_body_mb=1)
        if "asyncio" in request.param:
            running.config.loop = "asyncio"
        with running:
            yield running


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=GIVE_UP)


def rest(connection: socket.socket) -> bytes:
    """What the server still sends until it closes. A timeout is a failure: the connection was held open."""
    received = b""
    with suppress(ConnectionError):
        while part := connection.recv(65536):
            received += part
    return received


def drip(server: RunningServer, start: bytes, more: bytes) -> bytes:
    """Sends `more` again and again, always in time for an idle limit, until the server has had enough."""
    with connect(server) as connection:
        connection.sendall(start)
        until = time.monotonic() + GIVE_UP
        connection.settimeout(0.05)
        received = b""
        while time.monotonic() < until:
            try:
                connection.sendall(more)
                if not (part := connection.recv(65536)):
                    return received
                received += part
            except TimeoutError:
                continue
            except ConnectionError:
                return received
        raise AssertionError("the connection was held open")


def error(answer: bytes) -> tuple[int, dict[str, Any]]:
    """(status, body) of a raw answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower(), answer
    return int(head.split()[1]), json.loads(body)


def answers(server: RunningServer) -> None:
    assert server.http.post(CHAT, json=ASKED).status_code == 200


def test_a_client_that_says_nothing_is_let_go(server: RunningServer) -> None:
    with connect(server) as connection:
        assert rest(connection) == b""
    assert drip(server, b"", b"\r\n").split()[1:2] in ([], [b"400"]), "empty lines are no request"
    answers(server)


@pytest.mark.parametrize("more", [b"", b"x", b"a: b\r\n"])
def test_slow_headers_are_a_408(server: RunningServer, more: bytes) -> None:
    status, body = error(drip(server, HEAD % CHAT.encode(), more))
    assert status == 408 and body["error"]["type"] == "timeout_error" and "headers" in body["error"]["message"]
    assert 'clover_requests_total{route="none",status="408"}' in server.http.get("/metrics").text
    answers(server)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize(
    ("framing", "more"),
    [
        (b"content-length: 500000", b""),
        (b"content-length: 500000", b" "),
        (b"transfer-encoding: chunked", b"1\r\n \r\n"),
    ],
)
def test_slow_bodies_are_a_408_in_the_dialect(server: RunningServer, path: str, framing: bytes, more: bytes) -> None:
    status, body = error(drip(server, HEAD % path.encode() + framing + b"\r\n\r\n", more))
    assert status == 408 and body["error"]["type"] == "timeout_error" and "body" in body["error"]["message"]
    assert ("request_id" in body) == (path == MESSAGES)
    answers(server)


def test_a_slow_body_nobody_waits_for_is_let_go(server: RunningServer) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500000\r\n\r\n"
    status, _ = error(drip(server, head, b" "))
    assert status == 404
    trailers = HEAD % CHAT.encode() + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    assert drip(server, trailers, b"x-trailer: 1\r\n").split()[1] in (b"400", b"408")
    answers(server)


def test_headers_without_end_are_a_431(server: RunningServer) -> None:
    line = b"x-long: " + b"a" * 4000 + b"\r\n"
    status, body = error(drip(server, HEAD % CHAT.encode(), line * 20))
    assert status in (400, 431) and body["error"]["type"] == "invalid_request_error"
    answers(server)


def test_what_is_no_http_is_a_400(server: RunningServer) -> None:
    for junk in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"NONSENSE\r\n\r\n", b"GET / HTTP/x.y\r\n\r\n"):
        with connect(server) as connection:
            connection.sendall(junk)
            status, body = error(rest(connection))
            assert status in (400, 408) and body["error"]["message"], junk
    answers(server)


def test_a_client_that_takes_nothing_is_let_go(server: RunningServer) -> None:
    """Answers that nobody takes: pipelined requests for the chat page, many times what the system buffers."""
    asked = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2000
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(GIVE_UP)
        connection.connect(("127.0.0.1", server.port))
        with suppress(ConnectionError):
            connection.sendall(asked)
        wait_until(lambda: not [c for c in server.connections if c.flow.write_paused])
        with suppress(ConnectionError):
            assert len(rest(connection)) < 2000 * len(server.http.get("/").content)
    answers(server)


def test_an_idle_connection_between_requests_is_kept(server: RunningServer) -> None:
    """Clients' pools keep connections far longer than a request may take to arrive."""
    wrong = json.dumps({**ASKED, "what": 1}).encode()
    right = json.dumps(ASKED).encode()
    with connect(server) as connection:
        for body, status in ((wrong, b"400"), (right, b"200"), (wrong, b"400")):
            connection.sendall(HEAD % CHAT.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
            received = b""
            while b"}}" not in received:
                received += connection.recv(65536)
            assert received.split()[1] == status
            time.sleep(0.5)


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    body = json.dumps(ASKED).encode()
    post = HEAD % CHAT.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
    get = b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(post + get + post + last)
        received = rest(connection)
    assert re.findall(rb"HTTP/1\.1 (\d+)", received) == [b"200", b"404", b"200", b"200"]


def test_junk_behind_a_request_does_not_get_into_its_answer(server: RunningServer) -> None:
    body = json.dumps({**ASKED, "stream": True}).encode()
    post = HEAD % CHAT.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
    with connect(server) as connection:
        connection.sendall(post + b"\x00junk\r\n\r\n")
        received = rest(connection)
    assert received.count(b"HTTP/1.1") <= 1 or b"[DONE]" in received.partition(b"HTTP/1.1 400")[0]
    server.wait_idle()
    answers(server)


@pytest.mark.parametrize("length", ["declared", "chunked"])
def test_a_client_learns_that_its_body_is_too_large(server: RunningServer, length: str) -> None:
    """However much of it is still on its way."""
    body = b" " * (16 * 2**20)
    content: Any = body if length == "declared" else iter([body[: 2**20]] * 16)
    for path in (CHAT, MESSAGES):
        if length == "chunked":
            content = iter([body[: 2**20]] * 16)
        got = server.http.post(path, content=content, headers={"content-type": "application/json"})
        assert got.status_code == 413 and got.json()["error"]["message"]
    answers(server)


def test_too_many_connections_are_told_so(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until(lambda: len(server.connections) <= 1)
    monkeypatch.setattr(server.config.http_protocol_class, "most", 0)
    with connect(server) as connection:
        status, body = error(rest(connection))
    assert status == 503 and body["error"]["type"] == "server_error"
    monkeypatch.undo()
    answers(server)


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "most"),
    [
        (1024, 4096, 2100, 2000),
        (1024, 1024, 1024, 924),
        (256, 1500, 1500, 1400),
        (65536, 65536, 65536, 2000),
        (64, 64, 64, 1),
    ],
)
def test_connections_fit_into_the_files_that_may_be_open(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int, most: int
) -> None:
    resource = pytest.importorskip("resource")
    limits = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    assert connections.most_connections() == most and limits == [raised, hard]


def test_a_reply_whose_client_falls_behind_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot is free long before the client has read what was waiting."""
    monkeypatch.setattr(generation, "MOST_WAITING", 5)
    endless = {**ASKED, "max_tokens": 1000, "threshold": 1.0, "logit_bias": {"0": -100, "2": -100}}
    with RunningServer(nano_slots(1), slots=1) as server:
        behind = asyncio.Event()

        async def slow(events: Any) -> Any:
            async for event in events:
                yield event
                if not behind.is_set():
                    behind.set()
                    while server.service.scheduler.live:
                        await asyncio.sleep(0.01)

        from clover.runtime.server import chat

        inner: Callable[..., Any] = chat.stream
        monkeypatch.setattr(chat, "stream", lambda *args: slow(inner(*args)))
        with server.http.stream("POST", CHAT, json={**endless, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert json.loads(lines[-1][6:])["error"]["code"] == "slow_client"
        assert not any('"finish_reason":"' in line for line in lines)
        whole = server.http.post(CHAT, json={**endless, "max_tokens": 100})
        assert whole.json()["usage"]["completion_tokens"] == 100, "a whole reply can't fall behind"


def test_http_methods_and_their_answers(server: RunningServer) -> None:
    for path in ("/", "/health", "/ready", "/v1/models", "/metrics"):
        got = server.http.head(path)
        assert got.status_code == 200 and not got.content, path
    for method, path in (("PUT", CHAT), ("DELETE", "/v1/models"), ("OPTIONS", MESSAGES), ("PATCH", "/health")):
        got = server.http.request(method, path)
        assert got.status_code == 405 and got.json()["error"]["message"] and got.headers["allow"], (method, path)
    upgrade = {"connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}
    assert server.http.get("/v1/models", headers=upgrade).status_code == 200
    assert server.http.post(CHAT, json=ASKED, headers=upgrade).status_code == 200, "the body must not be lost"
    with pytest.raises(httpx.HTTPError):
        server.http.request("CONNECT", "/", headers={"host": "localhost"}).raise_for_status()
    answers(server)
