"""The files of examples/deploy: every setting, command and probe in them is run against the real server."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import engine_support
import httpx
import pytest

from clover.runtime.server.settings import ServeSettings, load_settings

DEPLOY = engine_support.REPOSITORY / "examples" / "deploy"
KEY = "a-long-enough-key"
CHAT = {"messages": [{"role": "user", "content": "Parse the dispatch: Send UAV7 to Cedar."}], "max_tokens": 8}


@contextmanager
def serving(arguments: Sequence[str], port: int) -> Iterator[subprocess.Popen[str]]:
    """`clover` with these arguments, once it answers."""
    process = subprocess.Popen([sys.executable, "-m", "clover.cli", *arguments], stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(600):
            try:
                if httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
                time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def answers_only_with_its_key(port: int) -> None:
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    assert httpx.post(url, json=CHAT, trust_env=False).status_code == 401
    headers = {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(url, json=CHAT, headers=headers, trust_env=False, timeout=60)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0


# -- clover.toml and the unit --------------------------------------------------------------------


def test_every_setting_of_the_example_is_accepted(tmp_path: Path) -> None:
    text = (DEPLOY / "clover.toml").read_text()
    settings = load_settings(DEPLOY / "clover.toml", {})
    assert settings.loopback and settings.model_name == ("clover",)
    everything = tmp_path / "clover.toml"
    everything.write_text(re.sub(r"^# (?=[a-z-]+ = )", "", text, flags=re.M))
    shown = tomllib.loads(everything.read_text())["serve"]
    assert len(shown) > len(tomllib.loads(text)["serve"]), "the commented settings were not found"
    load_settings(everything, {})
    assert {name.replace("-", "_") for name in shown} <= {f.name for f in fields(ServeSettings)}


def unit() -> dict[str, list[str]]:
    """The unit's settings; a name may be given more than once."""
    settings: dict[str, list[str]] = {}
    for line in (DEPLOY / "clover.service").read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(name, []).append(value)
    return settings


def test_the_units_command_serves_and_stops_in_time(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY + "\n")
    port = free_port()
    config = (DEPLOY / "clover.toml").read_text().replace("port = 8000", f"port = {port}")
    (tmp_path / "clover.toml").write_text(config)
    (command,) = unit()["ExecStart"]
    places = {
        "/srv/clover/bundle": str(engine_support.bundle(engine_support.NANO).directory),
        "/etc/clover/clover.toml": str(tmp_path / "clover.toml"),
        "${CREDENTIALS_DIRECTORY}": str(tmp_path),
    }
    for place, here in places.items():
        assert place in command
        command = command.replace(place, here)
    binary, *arguments = shlex.split(command)
    assert binary == "/opt/clover/bin/clover"
    with serving([*arguments, "--threads", "1"], port) as process:
        answers_only_with_its_key(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    # what SIGTERM starts must be over before systemd kills: the grace, and the server's own 5 s after it
    assert int(unit()["TimeoutStopSec"][0]) > load_settings(DEPLOY / "clover.toml", {}).shutdown_grace + 5


def test_systemd_takes_the_unit_and_calls_it_closed(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    system = Path("/usr/lib/systemd/system")
    if analyze is None or not system.is_dir():
        pytest.skip("systemd-analyze is not installed")
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    (tmp_path / "opt/clover/bin").mkdir(parents=True)
    shutil.copytree(system, tmp_path / "usr/lib/systemd/system", symlinks=True)
    shutil.copy("/bin/true", tmp_path / "opt/clover/bin/clover")
    placed = tmp_path / "etc/systemd/system/clover.service"

    def complaints(text: str) -> str:
        placed.write_text(text)
        done = subprocess.run(
            [analyze, "verify", f"--root={tmp_path}", "clover.service"], capture_output=True, text=True
        )
        return done.stderr + ("" if done.returncode == 0 else "failed")

    text = (DEPLOY / "clover.service").read_text()
    assert complaints(text.replace("ProtectClock", "ProtectClocks")), "systemd-analyze finds nothing here"
    assert complaints(text) == ""
    exposure = [analyze, "security", "--offline=yes", f"--root={tmp_path}", "--threshold=20", "clover.service"]
    done = subprocess.run(exposure, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout.splitlines()[-1]


# -- the image -----------------------------------------------------------------------------------


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, arguments) in order."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def last(name: str) -> str:
    return [rest for instruction, rest in dockerfile() if instruction == name][-1]


def test_the_images_command_serves_and_its_probe_tells(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "keys").write_text(KEY + "\n")
    command: list[str] = json.loads(last("ENTRYPOINT")) + json.loads(last("CMD"))
    binary, *arguments = command
    assert binary == "clover" and last("USER") not in ("", "0", "root")
    assert arguments[arguments.index("--host") + 1] == "0.0.0.0", "Docker forwards to the container's address"
    at = {
        "/bundle": str(engine_support.bundle(engine_support.NANO).directory),
        "/run/keys": str(tmp_path / "keys"),
        "0.0.0.0": "127.0.0.1",  # tests stay on this machine
    }
    arguments = [at.get(argument, argument) for argument in arguments]
    options, _, probe_json = last("HEALTHCHECK").partition("CMD ")
    assert "--timeout=5s" in options
    _, *probe = json.loads(probe_json.replace(":8000", f":{port}"))
    # a probe must not depend on proxies, nor on the names that clients use
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    with serving([*arguments, "--port", str(port), "--threads", "1", "--allowed-host", "127.0.0.1"], port):
        answers_only_with_its_key(port)
    with serving([*arguments, "--port", str(port), "--threads", "1", "--allowed-host", "clover.example.org"], port):
        assert httpx.get(f"http://127.0.0.1:{port}/", trust_env=False).status_code == 403
        assert subprocess.run([sys.executable, *probe], env=environment).returncode == 0
    assert subprocess.run([sys.executable, *probe], env=environment, capture_output=True).returncode != 0


def test_the_image_copies_what_the_package_is_made_of() -> None:
    copied = " ".join(rest for name, rest in dockerfile() if name == "COPY").split()
    project = tomllib.loads((engine_support.REPOSITORY / "pyproject.toml").read_text())
    rooms = {name.split(".")[1] for name in project["tool"]["setuptools"]["packages"] if "." in name}
    files = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert rooms | files | {"cli.py", "__init__.py", "py.typed"} <= set(copied)


# -- conversations -------------------------------------------------------------------------------


def load(name: str) -> ModuleType:
    """A module of examples/deploy/ray."""
    spec = importlib.util.spec_from_file_location(name, DEPLOY / "ray" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_all_turns_of_a_conversation_have_one_key() -> None:
    key = load("conversation").conversation_key
    system = {"role": "system", "content": "You are terse."}
    said = {"role": "assistant", "content": "1"}
    families: list[list[dict[str, Any]]] = [
        [
            {"messages": [system, user("one")]},
            {"messages": [system, user([{"type": "text", "text": "one"}]), said, user("and?")], "stream": True},
        ],
        [{"messages": [system, user("two")]}, {"messages": [system, user("two"), said, user("one")]}],
        [{"messages": [user("one")]}, {"messages": [user("one"), said, user("more")], "max_tokens": 3}],
        [{"system": "s", "messages": [user("one")]}, {"system": "s", "messages": [user("one"), said, user("x")]}],
        [{"instructions": "i", "input": "one"}, {"instructions": "i", "input": [user("one"), said, user("x")]}],
        [{"prompt": "long" * 40}, {"prompt": "long" * 40 + "er"}],
        [{"prompt": list(range(40))}, {"prompt": list(range(50))}],
        [{"prompt": ["a", "b"]}, {"prompt": ["a", "c"]}],
        [{"prompt_cache_key": "k", "messages": [user("one")]}, {"prompt_cache_key": "k", "messages": [user("two")]}],
    ]
    keys = [{key({}, body) for body in family} for family in families]
    assert all(len(found) == 1 and "" not in found for found in keys)
    assert len(set.union(*keys)) == len(families), "different conversations share a key"
    named = key({"x-session-id": "mine"}, families[0][0])
    assert named == key({"x-session-id": "mine"}, None) and named not in set.union(*keys)


@pytest.mark.parametrize("body", [None, 3, [], {}, {"messages": []}, {"messages": 1}, {"prompt": 1}, {"input": None}])
def test_a_request_without_a_conversation_has_no_key(body: Any) -> None:
    assert load("conversation").conversation_key({}, body) == ""


@pytest.mark.parametrize("body", [{"messages": [1]}, {"messages": [{"role": []}]}, {"prompt": [[{}]]}, {"input": [[]]}])
def test_a_request_that_will_be_refused_does_not_trip_the_front(body: Any) -> None:
    assert isinstance(load("conversation").conversation_key({}, body), str)


def test_the_ray_configuration_names_what_the_application_has() -> None:
    config = (DEPLOY / "ray" / "clover.yaml").read_text()
    code = ast.parse((DEPLOY / "ray" / "clover_ray.py").read_text())
    classes = {node.name for node in code.body if isinstance(node, ast.ClassDef)}
    assert set(re.findall(r"- name: ([A-Z]\w+)", config)) == {"Front", "Model"} <= classes
