"""`clover serve` as a process: how it starts, what it refuses to start with, and how it ends."""

from __future__ import annotations

import inspect
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import engine_support
import httpx
import pytest

from clover import cli
from clover.runtime.errors import CloverError
from clover.runtime.server.settings import ServeSettings, load_settings

CHAT = "/v1/chat/completions"
LONG = {
    "messages": [{"role": "user", "content": "Repeat: a secret word"}],
    "max_tokens": 300,
    "threshold": 1.0,
    "logit_bias": {"0": -100, "2": -100},
    "stream": True,
}


def command(*flags: str) -> list[str]:
    bundle = engine_support.bundle(engine_support.NANO).directory
    return [sys.executable, "-m", "clover.cli", "serve", str(bundle), "--threads", "1", *flags]


@contextmanager
def serving(*flags: str, fault: str = "") -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """(process, its address, lines of its log so far) of a server on a free port. `fault`: Python that breaks it first."""
    wanted = command("--port", "0", *flags)
    if fault:
        wanted[1:3] = ["-c", f"{fault}\nfrom clover.cli import main\nmain()"]
    process = subprocess.Popen(wanted, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"at (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(lines))
        url = found[1]
        for _ in range(400):
            try:
                if httpx.get(url + "/ready", trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.02)
        yield process, url, lines
    finally:
        process.kill()
        process.wait()


def rest_of_log(process: subprocess.Popen[str], lines: list[str]) -> list[dict[str, Any]]:
    assert process.stderr is not None
    lines += process.stderr.readlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_sigterm_lets_a_stream_finish_and_refuses_new_requests() -> None:
    with serving("--shutdown-grace", "60") as (process, url, lines), httpx.Client(trust_env=False, timeout=60) as http:
        with http.stream("POST", url + CHAT, json=LONG) as response:
            events = response.iter_lines()
            next(events)
            process.send_signal(signal.SIGTERM)
            last = [line for line in events if line]
        assert last[-1] == "data: [DONE]" and '"finish_reason":"length"' in last[-2]
        with pytest.raises(httpx.HTTPError):
            httpx.post(url + CHAT, json=LONG, trust_env=False)
        assert process.wait(20) == 0
        log = rest_of_log(process, lines)
    (line,) = [record for record in log if record.get("path") == CHAT]
    assert (
        line["status"] == 200 and line["complete"] and line["completion_tokens"] == 300 and line["first_token_ms"] > 0
    )
    assert "secret" not in "".join(lines), "prompts belong in no log unless asked for"


def test_after_the_grace_a_stream_ends_with_an_error_not_as_if_it_were_whole() -> None:
    with serving("--shutdown-grace", "0.2") as (process, url, _), httpx.Client(trust_env=False, timeout=60) as http:
        with http.stream("POST", url + CHAT, json={**LONG, "max_tokens": 3000}) as response:
            events = response.iter_lines()
            next(events)
            process.send_signal(signal.SIGTERM)
            last = [line for line in events if line]
        assert json.loads(last[-1][6:])["error"]["code"] == "shutdown"
        assert not any('"finish_reason":"' in line for line in last)
        assert process.wait(20) == 0


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_quietly(sent: signal.Signals, times: int, busy: bool) -> None:
    grace = "60" if times == 2 else "0.2"
    with (
        serving("--shutdown-grace", grace) as (process, url, lines),
        httpx.Client(trust_env=False, timeout=60) as http,
        ExitStack() as stack,
    ):
        http.get(url + "/v1/models")  # a kept connection
        if busy:
            asked = {**LONG, "max_tokens": 1_000_000}
            events = stack.enter_context(http.stream("POST", url + CHAT, json=asked)).iter_lines()
            next(events)
        for _ in range(times):
            process.send_signal(sent)
            time.sleep(0.3)
            if process.poll() is not None:
                break
        status = process.wait(20)
        log = rest_of_log(process, lines)
    assert status == (128 + sent if busy and times == 2 else 0)
    assert "Traceback" not in "".join(lines)
    assert not [record for record in log if record["level"] in ("error", "critical")], log


def test_an_engine_that_is_lost_ends_the_process_so_that_it_is_restarted() -> None:
    """Every request gets an error first, those that wait included."""
    fault = """
from clover.runtime.ort_session import OrtSession
step, steps = OrtSession.step, 0
def lost(self, rows, candidates=1):
    global steps
    steps += 1
    if steps > 150:
        raise RuntimeError("the device is lost")
    return step(self, rows, candidates)
OrtSession.step = lost
"""
    with serving("--slots", "1", fault=fault) as (process, url, lines), ThreadPoolExecutor(4) as pool:

        def one(number: int) -> tuple[int, str]:
            asked = {**LONG, "stream": number % 2 == 0}
            try:
                got = httpx.post(url + CHAT, json=asked, trust_env=False, timeout=60)
            except httpx.ConnectError:  # it came when all was over
                return 503, "refused"
            return got.status_code, got.text

        answers = list(pool.map(one, range(4)))
        assert process.wait(20) == 1
        log = rest_of_log(process, lines)
    assert all("engine_error" in text or status == 503 for status, text in answers), answers
    assert not any("[DONE]" in text for _, text in answers)
    assert sum("engine_error" in text for _, text in answers) >= 1
    (told,) = [record for record in log if record["level"] == "critical"]
    assert "status 1" in told["message"] and "trace" not in told


def test_a_request_that_fails_a_step_does_not_end_the_process() -> None:
    fault = """
from clover.runtime.ort_session import OrtSession
step = OrtSession.step
def poisoned(self, rows, candidates=1):
    if any(len(r.tokens) > 100 for r in rows):
        raise RuntimeError("poison")
    return step(self, rows, candidates)
OrtSession.step = poisoned
"""
    with serving(fault=fault) as (process, url, _), httpx.Client(trust_env=False, timeout=60) as http:
        for _ in range(3):
            bad = http.post(url + CHAT, json={"messages": [{"role": "user", "content": "poison " * 200}]})
            assert (bad.status_code, bad.json()["error"]["code"]) == (500, "engine_error")
            assert http.post(url + CHAT, json={**LONG, "stream": False, "max_tokens": 5}).status_code == 200
        assert http.get(url + "/health").status_code == 200 and process.poll() is None


def test_what_it_does_not_start_with() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cases = [
            (("--host", "0.0.0.0"), "--api-key"),
            (("--port", str(taken.getsockname()[1])), "can't listen"),
            (("--slots", "0"), "--slots"),
            (("--api-key", "short"), "--api-key"),
            (("--max-context", "99999999"), "max_context"),
        ]
        for flags, named in cases:
            ended = subprocess.run(command(*flags), capture_output=True, text=True, timeout=60)
            assert ended.returncode == 2 and named in ended.stderr, (flags, ended.stderr)
            assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr


def test_a_config_file_has_the_flags_names_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "clover.toml"
    path.write_text(
        '[serve]\nport = 9000\nslots = 2\napi-key = "a-long-key"\nmodel_name = ["m", "n"]\nrequest-timeout = 5\n'
    )
    settings = load_settings(path, {"slots": 7, "port": None, "model_name": ()})
    assert settings == ServeSettings(
        port=9000, slots=7, api_key=("a-long-key",), model_name=("m", "n"), request_timeout=5.0
    )
    for text, named in (
        ("[serve]\ncolour = 1\n", "colour"),
        ("[serve]\nmodel-name = ''\n", "--model-name is empty"),
        ("[serve]\ncors-origin = 'example.org'\n", "'example.org' is no origin"),
        ("[serve]\ncors-origin = 'https://example.org/'\n", "is no origin"),
        ("[serve]\nport = '80'\n", "port"),
        ("[serve]\nslots = true\n", "slots"),
        ("[serve]\ninsecure = 1\n", "insecure"),
        ("port = 80\n", "port"),
        ("[serve\n", "TOML"),
    ):
        path.write_text(text)
        with pytest.raises(CloverError, match=named):
            load_settings(path, {})


def test_only_loopback_needs_no_key() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert ServeSettings(host=host).loopback
    for host in ("0.0.0.0", "::", "192.168.0.4", "example.org", ""):
        with pytest.raises(CloverError, match="--api-key"):
            ServeSettings(host=host)
        assert ServeSettings(host=host, insecure=True) and ServeSettings(host=host, api_key=("a-long-key",))


def test_every_setting_is_a_flag_of_the_same_name() -> None:
    flags = set(inspect.signature(cli.serve).parameters) - {"bundle", "api_key_file", "config"}
    assert flags == {field.name for field in fields(ServeSettings)}
