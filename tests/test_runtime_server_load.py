"""Many clients at once, some of them badly behaved: every answer is the answer of a lone request, and nothing stays."""

from __future__ import annotations

import gc
import json
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import httpx
import psutil
import pytest
from serve_support import RunningServer, nano, nano_slots, wait_until

CLIENTS, REQUESTS = 16, 6
CHAT = "/v1/chat/completions"
WORDS = ["Alder", "Birch", "Cedar", "Elm", "Oslo", "Kai", "survey", "12", "07:30"]
ENDLESS = {"max_tokens": 1800, "threshold": 1.0, "logit_bias": {"0": -100, "2": -100}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(nano_slots(4), slots=4, cache_mb=8, max_queue=64) as running:
        yield running


def question(number: int) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """One of 12 questions, with its decode options."""
    words = random.Random(number % 12).choices(WORDS, k=3 + 7 * (number % 12))
    options: dict[str, Any] = {"max_tokens": 10 + number % 12 * 4}
    if number % 3 == 0:
        options |= {"temperature": 0.8, "seed": number % 12}
    if number % 4 == 1:
        options |= {"mode": "autoregressive"}
    return [{"role": "user", "content": "Repeat: " + " ".join(words)}], options


@cache
def alone(number: int) -> str:
    messages, options = question(number)
    limit = options.pop("max_tokens")
    return nano().chat(messages, max_new_tokens=limit, **options).text


class Client:
    """One client's work: a mixture of good, streamed, abandoned and bad requests."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self.server, self.random = server, random.Random(seed)
        self.answered = self.abandoned = self.refused = 0

    def run(self) -> Client:
        with httpx.Client(base_url=self.server.url, timeout=60, trust_env=False) as http:
            for _ in range(REQUESTS):
                self.random.choice([self.whole, self.whole, self.streamed, self.abandon, self.vanish, self.bad])(http)
        return self

    def whole(self, http: httpx.Client) -> None:
        number = self.random.randrange(12)
        messages, options = question(number)
        got = http.post(CHAT, json={"messages": messages, **options})
        assert got.status_code == 200, got.text
        assert got.json()["choices"][0]["message"]["content"] == alone(number)
        self.answered += 1

    def streamed(self, http: httpx.Client) -> None:
        number = self.random.randrange(12)
        messages, options = question(number)
        text = ""
        with http.stream("POST", CHAT, json={"messages": messages, **options, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        assert text == alone(number)
        self.answered += 1

    def abandon(self, http: httpx.Client) -> None:
        """Leaves in the middle of a stream."""
        messages, _ = question(0)
        with http.stream("POST", CHAT, json={"messages": messages, **ENDLESS, "stream": True}) as response:
            for count, _ in enumerate(response.iter_lines()):
                if count > self.random.randrange(6):
                    break
        self.abandoned += 1

    def vanish(self, http: httpx.Client) -> None:
        """Sends a request, whole or half of it, and is gone."""
        body = json.dumps({"messages": question(0)[0], **ENDLESS}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        request = head + f"content-length: {len(body)}\r\n\r\n".encode() + body
        with socket.create_connection(("127.0.0.1", self.server.port)) as connection:
            connection.sendall(request[: self.random.choice([len(request), len(request) - 9, 60])])
            if self.random.random() < 0.5:
                wait_until(lambda: self.server.service.scheduler.live > 0)
        self.abandoned += 1

    def bad(self, http: httpx.Client) -> None:
        change: dict[str, Any] = self.random.choice(
            [{"temperature": -1}, {"messages": []}, {"what": 1}, {"messages": [[[]]]}]
        )
        got = http.post(CHAT, json={"messages": question(0)[0], **change})
        assert got.status_code == 400
        self.refused += 1


def test_a_crowd_of_clients(server: RunningServer) -> None:
    for number in range(12):
        alone(number)
    crowd = [Client(server, seed) for seed in range(CLIENTS)]
    crowd[0].run()  # warm
    server.wait_idle()
    gc.collect()
    threads, memory = threading.active_count(), psutil.Process().memory_info().rss
    with ThreadPoolExecutor(CLIENTS) as pool:
        done = list(pool.map(Client.run, crowd))
    assert sum(c.answered for c in done) >= 30 and all(
        sum(getattr(c, k) for c in done) for k in ("abandoned", "refused")
    )
    server.wait_idle()
    cache = server.service.scheduler.cache
    assert cache.nbytes <= 8 * 2**20 and cache.counts.hits > 0
    gc.collect()
    assert threading.active_count() <= threads + 1
    assert psutil.Process().memory_info().rss - memory < 200 * 2**20
    Client(server, 99).whole(server.http)


def test_a_client_that_leaves_frees_its_slot_within_a_step(server: RunningServer) -> None:
    server.wait_idle()
    before = server.service.metrics.text()
    for stream in (True, False):
        body = json.dumps({"messages": question(0)[0], **ENDLESS, "stream": stream}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + body)
            wait_until(lambda: server.service.scheduler.live == 1)
        server.wait_idle()
    assert b"clover_cancelled_total" in before and server.service.metrics.text() != before
