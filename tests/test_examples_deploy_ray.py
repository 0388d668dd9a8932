"""examples/deploy/ray for real: `serve run` with its clover.yaml, one replica that becomes two under load, on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import engine_support
import httpx
import pytest
from serve_support import nano, wait_until
from test_examples_deploy import DEPLOY, KEY, free_port

pytest.importorskip("ray.serve", reason="ray[serve] is not installed")

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"
REPLICA = "x-clover-replica"
DISPATCH = "Parse the dispatch: Send UAV{} to Cedar, priority high."


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def long(text: str = "Repeat: a b c", tokens: int = 1000) -> dict[str, Any]:
    """A request whose reply takes a while: one token a step, and no end token."""
    banned = {"0": -100, "2": -100}
    return {"messages": [user(text)], "max_tokens": tokens, "threshold": 1.0, "logit_bias": banned, "stream": True}


class Cluster:
    """`serve run` as a process."""

    def __init__(self, directory: Path) -> None:
        import yaml

        port = free_port()
        config = yaml.safe_load((DEPLOY / "ray" / "clover.yaml").read_text())
        config["http_options"]["port"] = port
        (application,) = config["applications"]
        bundle = engine_support.bundle(engine_support.NANO).directory
        application["args"] = {"bundle": str(bundle), "config": str(directory / "clover.toml")}
        (directory / "clover.toml").write_text(f'[serve]\nslots = 2\nthreads = 1\ncache = false\napi-key = "{KEY}"\n')
        front, model = application["deployments"]
        for deployment in (front, model):
            deployment["ray_actor_options"] = {"num_cpus": 0.1}
        front["num_replicas"] = 1
        model |= {"max_ongoing_requests": 3, "max_queued_requests": 2}
        quick = {"max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 0, "look_back_period_s": 2}
        model["autoscaling_config"] |= quick
        (directory / "clover.yaml").write_text(yaml.safe_dump(config))
        environment = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
            "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        }
        command = [sys.executable, "-m", "ray.serve.scripts", "run", str(directory / "clover.yaml")]
        self.log = directory / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=DEPLOY / "ray", env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        headers = {"authorization": f"Bearer {KEY}"}
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60, trust_env=False, limits=limits
        )

    def ready(self) -> bool:
        log = self.log.read_text()
        assert self.process.poll() is None and "failed with exception" not in log, log[-5000:]
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def replicas(self) -> set[str]:
        """The replicas that answer requests which belong to no conversation."""
        answers = [self.http.get("/v1/models") for _ in range(12)]
        return {answer.headers[REPLICA] for answer in answers if answer.status_code == 200}  # 429 under load

    def chat(self, body: dict[str, Any], **headers: str) -> httpx.Response:
        return self.http.post(CHAT, json=body, headers=headers)

    def stop(self) -> None:
        self.http.close()
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two replicas. The second is started by Ray because requests wait for the first."""
    running = Cluster(tmp_path_factory.mktemp("ray"))
    try:
        wait_until(running.ready, 180)
        assert len(running.replicas()) == 1
        enough = threading.Event()

        def load() -> None:
            while not enough.is_set():
                running.chat({**long(), "stream": False})

        with ThreadPoolExecutor() as pool:
            for _ in range(4):
                pool.submit(load)
            try:
                wait_until(lambda: len(running.replicas()) == 2, 120)
            finally:
                enough.set()
        yield running
    finally:
        running.stop()


def test_a_conversation_stays_where_its_state_is_and_others_go_elsewhere(cluster: Cluster) -> None:
    used = set()
    for number in range(8):
        turns = [user(DISPATCH.format(number))]
        replicas, cached = set(), 0
        for _ in range(3):
            answer = cluster.chat({"messages": turns, "max_tokens": 40})
            assert answer.status_code == 200, answer.text
            content = answer.json()["choices"][0]["message"]["content"]
            assert content == nano().chat(turns, max_new_tokens=40).text
            turns += [{"role": "assistant", "content": content}, user("Once more, as before. " * 12)]
            replicas.add(answer.headers[REPLICA])
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert len(replicas) == 1 and cached > 64
        used |= replicas
    assert len(used) == 2


def test_a_name_decides_before_the_text_does(cluster: Cluster) -> None:
    requests = [({"x-session-id": "mine"}, {}), ({}, {"prompt_cache_key": "mine"})] * 4
    seen = set()
    for number, (headers, fields) in enumerate(requests):
        body = {"messages": [user(DISPATCH.format(number))], "max_tokens": 4, **fields}
        seen.add(cluster.chat(body, **headers).headers[REPLICA])
    assert len(seen) == 1


def test_streams_and_refusals_are_those_of_the_server(cluster: Cluster) -> None:
    body = {"messages": [user(DISPATCH.format(7))], "max_tokens": 40}
    whole = cluster.chat(body).json()["choices"][0]["message"]["content"]
    with cluster.http.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert len(answer.headers.get_list("x-request-id")) == 1
        lines = [line[6:] for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines]
    assert "".join(deltas) == whole
    refused = cluster.http.post("/v1/messages", json={"model": "other", "max_tokens": 3, "messages": [user("a")]})
    assert refused.status_code == 404 and refused.json()["error"]["type"] == "not_found_error"
    assert cluster.http.post(CHAT, content=b"{", headers={"content-type": "application/json"}).status_code == 400
    big = cluster.http.post(CHAT, content=b" " * (9 << 20), headers={"content-type": "application/json"})
    assert big.status_code == 413 and "larger" in big.json()["error"]["message"]
    assert cluster.http.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401


def test_a_client_that_leaves_frees_its_slot(cluster: Cluster) -> None:
    name = {"x-session-id": "leaver"}

    def running() -> str:
        lines = cluster.http.get("/metrics", headers=name).text.splitlines()
        return next(line for line in lines if line.startswith("clover_running "))

    with cluster.http.stream("POST", CHAT, json=long(tokens=1900), headers=name) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()  # kept: a collected iterator closes the response
        next(lines)
        assert running() == "clover_running 1.0"
    wait_until(lambda: running() == "clover_running 0.0", 3)


def test_what_no_replica_has_room_for_is_told_so(cluster: Cluster) -> None:
    with ThreadPoolExecutor(14) as pool:
        answers = list(pool.map(lambda _: cluster.chat({**long(), "stream": False}), range(14)))
    done = [a for a in answers if a.status_code == 200]
    assert {a.headers[REPLICA] for a in done} == cluster.replicas(), "a full replica's requests go to the next"
    full = [a for a in answers if a.status_code != 200]
    assert full and {a.status_code for a in full} == {429}
    assert all(int(a.headers["retry-after"]) > 0 and "busy" in a.json()["error"]["message"] for a in full)


def test_a_replica_that_dies_cuts_only_its_own_replies(cluster: Cluster) -> None:
    psutil = pytest.importorskip("psutil", reason="psutil is not installed")
    here: dict[str, str] = {}  # a conversation's name on each replica
    for number in range(40):
        name = f"conversation {number}"
        here.setdefault(cluster.http.get("/v1/models", headers={"x-session-id": name}).headers[REPLICA], name)
    assert len(here) == 2
    begun, killed = threading.Barrier(3), threading.Event()

    def read(name: str) -> bool:
        """Whether the stream was whole."""
        lines: list[str] = []
        try:
            with cluster.http.stream("POST", CHAT, json=long(tokens=1500), headers={"x-session-id": name}) as answer:
                source = answer.iter_lines()
                lines.append(next(source))
                begun.wait(60)
                killed.wait(60)
                lines += [line for line in source if line]
        except httpx.HTTPError:
            return False
        return lines[-1] == "data: [DONE]"

    with ThreadPoolExecutor() as pool:
        streams = [pool.submit(read, name) for name in here.values()]
        begun.wait(60)
        children = psutil.Process(cluster.process.pid).children(recursive=True)
        models = [child for child in children if "ServeReplica:clover:Model" in "".join(child.cmdline())]
        assert len(models) == 2
        models[0].kill()
        killed.set()
        assert sorted(stream.result(120) for stream in streams) == [False, True]
    for name in here.values():  # the conversations of the dead go on elsewhere

        def answered(name: str = name) -> bool:
            answer = cluster.chat({"messages": [user("Repeat: a")], "max_tokens": 4}, **{"x-session-id": name})
            assert answer.status_code in (200, 503), answer.text
            return answer.status_code == 200

        wait_until(answered, 60)
