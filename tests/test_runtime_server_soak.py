"""Many clients on a server process for minutes, many of them badly behaved; and SIGTERM in the middle of it.

pytest -m slow tests/test_runtime_server_soak.py -s
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import engine_support
import httpx
import psutil
import pytest
from serve_support import nano, wait_until

CLIENTS, WARM_SECONDS, SECONDS = 64, 20.0, 120.0
HANGS = 90.0  # seconds after which a request counts as hanging
QUESTIONS = 12
CACHE_MB = 8
CHAT, FILL = "/v1/chat/completions", "/v1/fill"
TEMPLATE = '{"op": "{{op:assign|dispatch}}", "uav": {{uav:int}}, "site": "{{site:4}}"}'
WORDS = ["Alder", "Birch", "Cedar", "Elm", "Oslo", "Kai", "survey", "12", "07:30"]
ENDLESS = {"max_tokens": 1800, "threshold": 1.0, "logit_bias": {"0": -100, "2": -100}}


def question(number: int) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """A question with its decode options: short and long, greedy and sampled, in all modes whose replies can't depend on
    measured times."""
    words = random.Random(number).choices(WORDS, k=3 + 6 * number)
    options: dict[str, Any] = {"max_tokens": 16 + 14 * number}
    if number % 3 == 0:
        options |= {"temperature": 0.8, "seed": number}
    if number % 4 == 1:
        options |= {"mode": ("autoregressive", "self-speculative")[number % 8 // 5]}
    return [{"role": "user", "content": "Repeat: " + " ".join(words)}], options


@cache
def alone(number: int) -> str:
    messages, options = question(number)
    limit = options.pop("max_tokens")
    return nano().chat(messages, max_new_tokens=limit, **options).text


@cache
def alone_filled(number: int) -> str:
    return nano().fill(question(number)[0], TEMPLATE).text


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """(process, its address); its log goes to a file."""
    bundle = engine_support.bundle(engine_support.NANO).directory
    command = [sys.executable, "-m", "clover.cli", "serve", str(bundle), "--port", "0", "--threads", "1"]
    log = folder / "server.log"
    with log.open("wb") as sink:
        process = subprocess.Popen([*command, "--slots", "4", "--max-context", "2048", *flags], stderr=sink)
    try:
        wait_until(lambda: process.poll() is not None or b" at http://" in log.read_bytes(), 60)
        found = re.search(r"at (http://\S+)", log.read_text())
        assert found, log.read_text()
        wait_until(lambda: answers(found[1] + "/ready"), 60)
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def metric(url: str, name: str) -> float:
    found = re.search(rf"^clover_{name} (\S+)$", httpx.get(url + "/metrics", trust_env=False).text, re.MULTILINE)
    assert found, name
    return float(found[1])


@dataclass
class Tally:
    """What happened to a crowd's requests."""

    counts: Counter[str] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)  # seconds to the first text
    blocks: list[float] = field(default_factory=list)  # seconds from one block's end to the next's
    tokens: int = 0


class Client:
    """One client: a mixture of good, streamed, abandoned and wrong requests until its time is over."""

    def __init__(self, url: str, seed: int, tally: Tally) -> None:
        self.url, self.tally, self.random = url, tally, random.Random(seed)
        self.host, self.port = url.removeprefix("http://").split(":")

    async def run(self, until: float) -> None:
        kinds = {
            self.whole: 4,
            self.streamed: 6,
            self.fill: 2,
            self.cancel: 2,
            self.leave: 2,
            self.vanish: 2,
            self.wrong: 1,
            self.long_prompt: 1,
            self.large_body: 1,
        }
        async with httpx.AsyncClient(base_url=self.url, timeout=HANGS, trust_env=False) as http:
            while time.monotonic() < until:
                (kind,) = self.random.choices(list(kinds), list(kinds.values()))
                await asyncio.wait_for(kind(http), HANGS)

    def busy(self, response: httpx.Response) -> bool:
        """Whether the queue was full, which the server must say properly."""
        if response.status_code != 429:
            return False
        assert int(response.headers["retry-after"]) >= 1
        self.tally.counts["queue full"] += 1
        return True

    async def whole(self, http: httpx.AsyncClient) -> None:
        number = self.random.randrange(QUESTIONS)
        messages, options = question(number)
        got = await http.post(CHAT, json={"messages": messages, **options})
        if self.busy(got):
            await asyncio.sleep(self.random.random())
            return
        assert got.status_code == 200, got.text
        assert got.json()["choices"][0]["message"]["content"] == alone(number), number
        self.tally.counts["whole"] += 1
        self.tally.tokens += got.json()["usage"]["completion_tokens"]

    async def fill(self, http: httpx.AsyncClient) -> None:
        number = self.random.randrange(QUESTIONS)
        got = await http.post(FILL, json={"messages": question(number)[0], "template": TEMPLATE})
        if self.busy(got):
            await asyncio.sleep(self.random.random())
            return
        assert got.status_code == 200 and got.json()["text"] == alone_filled(number), got.text
        self.tally.counts["forms"] += 1

    async def streamed(self, http: httpx.AsyncClient) -> None:
        number = self.random.randrange(QUESTIONS)
        messages, options = question(number)
        extra = {"stream": True, "stream_denoise": True, "stream_options": {"include_usage": True}}
        began, text, last = time.monotonic(), "", ""
        first: float | None = None
        ends: dict[int, float] = {}  # when the last step of each block arrived
        async with http.stream("POST", CHAT, json={"messages": messages, **options, **extra}) as response:
            if self.busy(response):
                await asyncio.sleep(self.random.random())
                return
            async for chunk in chunks(response):
                last = "" if chunk else "[DONE]"
                for choice in chunk.get("choices", ()):
                    piece = choice["delta"].get("content") or ""
                    first = first or (time.monotonic() if piece else None)
                    text += piece
                if "denoise" in chunk:
                    ends[chunk["denoise"]["block"]] = time.monotonic()
                self.tally.tokens += (chunk.get("usage") or {}).get("completion_tokens", 0)
        assert last == "[DONE]" and text == alone(number), number
        assert first is not None
        self.tally.counts["streamed"] += 1
        self.tally.first.append(first - began)
        if "mode" not in options:  # blocks are denoised
            self.tally.blocks += [ends[block] - ends[block - 1] for block in ends if block - 1 in ends]

    async def cancel(self, http: httpx.AsyncClient) -> None:
        """Gives a whole reply up while it waits or runs."""
        task = asyncio.ensure_future(http.post(CHAT, json={"messages": question(0)[0], **ENDLESS}))
        await asyncio.wait([task], timeout=self.random.random() * 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.tally.counts["cancelled"] += 1

    async def leave(self, http: httpx.AsyncClient) -> None:
        """Leaves in the middle of a stream."""
        limit, seen = self.random.randrange(12), 0
        async with http.stream("POST", CHAT, json={"messages": question(0)[0], **ENDLESS, "stream": True}) as response:
            async for _ in response.aiter_lines():
                seen += 1
                if seen > limit:
                    break
        self.tally.counts["left"] += 1

    async def vanish(self, http: httpx.AsyncClient) -> None:
        """Sends a request, whole or a part of it, and is gone."""
        body = json.dumps({"messages": question(0)[0], **ENDLESS}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        request = head.encode() + body
        _, writer = await asyncio.open_connection(self.host, int(self.port))
        writer.write(request[: self.random.choice([len(request), len(request) - 9, 60])])
        await asyncio.sleep(self.random.random() * 0.5)
        writer.transport.abort()
        self.tally.counts["vanished"] += 1

    async def wrong(self, http: httpx.AsyncClient) -> None:
        change: dict[str, Any] = self.random.choice(
            [{"temperature": -1}, {"messages": []}, {"what": 1}, {"messages": [[[]]]}, {"logit_bias": {"x": 1}}]
        )
        got = await http.post(CHAT, json={"messages": question(0)[0], **change})
        assert got.status_code == 400 and got.json()["error"]["param"].startswith(next(iter(change))), got.text
        self.tally.counts["wrong, 400"] += 1

    async def long_prompt(self, http: httpx.AsyncClient) -> None:
        got = await http.post(CHAT, json={"messages": [{"role": "user", "content": "a b " * 3000}]})
        assert got.status_code == 400 and got.json()["error"]["code"] == "context_length_exceeded", got.text
        self.tally.counts["longer than the context, 400"] += 1

    async def large_body(self, http: httpx.AsyncClient) -> None:
        try:
            got = await http.post(CHAT, json={"messages": [{"role": "user", "content": "a" * 1_100_000}]})
            assert got.status_code == 413, got.text
        except (httpx.WriteError, httpx.ReadError):  # the server hangs up on a body that it won't read
            pass
        self.tally.counts["larger than a body may be, 413"] += 1


async def chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events' JSON; an empty object for [DONE]."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield {} if line == "data: [DONE]" else json.loads(line[6:])


def crowd(url: str, seconds: float, seed: int) -> Tally:
    tally = Tally()

    async def all_of_them() -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(Client(url, seed + n, tally).run(until) for n in range(CLIENTS)))

    asyncio.run(all_of_them())
    return tally


def spread(seconds: Sequence[float]) -> str:
    cuts = statistics.quantiles(seconds, n=20)
    return f"p50 {1000 * cuts[9]:.0f} ms, p95 {1000 * cuts[18]:.0f} ms of {len(seconds)}"


@pytest.mark.slow
def test_minutes_of_a_crowd(tmp_path: Path) -> None:
    for number in range(QUESTIONS):
        alone(number), alone_filled(number)
    flags = ("--cache-mb", str(CACHE_MB), "--max-queue", "40", "--max-body-mb", "1")
    with serving(tmp_path, *flags) as (process, url):
        server = psutil.Process(process.pid)

        def at_rest() -> bool:
            return metric(url, "running") == metric(url, "queued") == 0 and not server.net_connections()[1:]

        crowd(url, WARM_SECONDS, seed=10_000)
        wait_until(at_rest)
        memory, threads, files = server.memory_info().rss, server.num_threads(), server.num_fds()
        tally = crowd(url, SECONDS, seed=0)
        wait_until(at_rest)
        grown = server.memory_info().rss - memory
        print(
            f"\n{CLIENTS} clients, {SECONDS:.0f} s, 4 slots: " + ", ".join(f"{n} {k}" for k, n in tally.counts.items())
        )
        print(f"{tally.tokens / SECONDS:.0f} tokens/s of answered requests")
        print(f"time to first token: {spread(tally.first)}")
        print(f"a block after the one before it: {spread(tally.blocks)}")
        print(f"resident memory: {memory / 2**20:.0f} MiB before, {grown / 2**20:+.1f} MiB after")
        assert len(tally.counts) >= 10 and min(tally.counts.values()) > 0
        assert metric(url, "cache_bytes") <= CACHE_MB * 2**20 and metric(url, "cache_hits_total") > 0
        assert server.num_threads() <= threads + 2 and server.num_fds() <= files + 2
        assert grown < 64 * 2**20
        log = (tmp_path / "server.log").read_text()
        assert '"level": "error"' not in log and "Traceback" not in log
        messages, options = question(5)
        got = httpx.post(url + CHAT, json={"messages": messages, **options}, timeout=60, trust_env=False)
        assert got.json()["choices"][0]["message"]["content"] == alone(5)


@pytest.mark.parametrize("grace", [0, 30])
def test_sigterm_under_load_hangs_nobody(tmp_path: Path, grace: int) -> None:
    """Every request the server took before the signal ends whole or with an error that says so; later ones are refused."""
    outcomes: Counter[str] = Counter()

    async def one(http: httpx.AsyncClient, number: int) -> str:
        messages, options = question(number % QUESTIONS)
        stream = number % 2 == 0
        if grace == 0 and number % 3 == 0:
            options = ENDLESS
        body = {"messages": messages, **options, "stream": stream}
        async with http.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200 or not stream:
                whole = json.loads(await response.aread())
                if response.status_code != 200:
                    assert response.status_code == 503 and whole["error"]["code"] == "shutdown", whole
                    return "error"
                text = whole["choices"][0]["message"]["content"]
            else:
                text = ""
                last: dict[str, Any] = {"nothing": 1}
                async for last in chunks(response):
                    text += "".join(c["delta"].get("content") or "" for c in last.get("choices", ()))
                if last:
                    assert last["error"]["code"] == "shutdown", last
                    return "error"
        assert options is ENDLESS or text == alone(number % QUESTIONS)
        return "whole"

    async def client(url: str, number: int, later: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=HANGS, trust_env=False) as http:
            outcomes[await asyncio.wait_for(one(http, number), HANGS)] += 1
            await later.wait()
            try:
                outcomes["later, " + await asyncio.wait_for(one(http, number), HANGS)] += 1
            except httpx.TransportError:
                outcomes["refused"] += 1

    async def scene(process: subprocess.Popen[bytes], url: str) -> None:
        later = asyncio.Event()
        clients = [asyncio.ensure_future(client(url, n, later)) for n in range(CLIENTS)]

        def inside() -> float:
            return metric(url, "running") + metric(url, "queued")

        while outcomes.total() + await asyncio.to_thread(inside) < CLIENTS:  # the server has taken all of them
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        later.set()
        await asyncio.gather(*clients)

    for number in range(QUESTIONS):
        alone(number)
    with serving(tmp_path, "--max-queue", "100", "--shutdown-grace", str(grace)) as (process, url):
        asyncio.run(scene(process, url))
        assert process.wait(20) == 0
        assert "Traceback" not in (tmp_path / "server.log").read_text()
    assert outcomes["later, whole"] == 0 and outcomes["refused"] + outcomes["later, error"] == CLIENTS
    assert outcomes["whole"] + outcomes["error"] == CLIENTS
    assert outcomes["error"] > 10 if grace == 0 else outcomes["error"] == 0, outcomes
