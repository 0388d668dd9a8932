"""`clover serve` as a process: how it starts, what it refuses to start with, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine_support
import httpx
import pytest

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
def serving(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """(process, its address, lines of its log so far) of a server on a free port."""
    process = subprocess.Popen(command("--port", "0", *flags), stderr=subprocess.PIPE, text=True)
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
