"""A nano model with several slots, and owners of scheduled jobs, for tests of the scheduler and the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import engine_support
import httpx
import numpy as np

from clover.engines.open import open_session
from clover.runtime.clover import Clover
from clover.runtime.decoder import DecodeEvent, TokensEvent
from clover.runtime.scheduler.job import Job, Outcome
from clover.runtime.server.lifecycle import Server
from clover.runtime.server.serve import listen
from clover.runtime.server.service import Service, least_rows
from clover.runtime.server.settings import ServeSettings
from clover.runtime.session import Candidates, SequenceRows, StateSnapshot, StepSession
from clover.runtime.text.chat_template import ChatTemplate


@lru_cache(maxsize=1)
def nano() -> Clover:
    """The nano checkpoint in float32, one slot: what a request gives when it is alone."""
    return Clover.load(engine_support.bundle(engine_support.NANO).directory, threads=1, max_context=2048, cache=False)


def nano_session(sequences: int, max_context: int = 2048) -> StepSession:
    built = engine_support.bundle(engine_support.NANO)
    return open_session(built, sequences=sequences, max_context=max_context, threads=1, cache=False)


def nano_slots(sequences: int, template: str | None = None) -> Clover:
    """The nano checkpoint with several slots, perhaps with another chat template."""
    alone = nano()
    assert alone.tokenizer is not None
    chat = alone.template if template is None else ChatTemplate(template, alone.tokenizer)
    return Clover(alone.bundle, nano_session(sequences), alone.tokenizer, chat)


def chat_ids(engine: Clover, *contents: str) -> list[int]:
    """The prompt of a chat whose turns alternate between user and assistant."""
    assert engine.template is not None and engine.tokenizer is not None
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return engine.tokenizer.encode_prompt(engine.template.render(turns))


class Owner:
    """Collects what a job gives."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.alternatives: list[list[int]] = []
        self.steps = 0
        self.outcomes: list[Outcome] = []
        self.ended = threading.Event()
        self.started = threading.Event()

    def push(self, events: Sequence[DecodeEvent]) -> bool:
        self.steps += 1
        self.started.set()
        fresh = [t for e in events if isinstance(e, TokensEvent) for t in e.tokens]
        self.tokens += [t.id for t in fresh]
        self.alternatives += [[i for i, _ in t.alternatives] for t in fresh]
        return False

    def finish(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.ended.set()

    def wait(self) -> list[int]:
        assert self.ended.wait(60), "the job never ended"
        assert len(self.outcomes) == 1
        return self.tokens


def job_for(engine: Clover, prompt: Sequence[int], **options: Any) -> tuple[Job, Owner]:
    chosen = engine.options(**options)
    owner = Owner()
    decoder = engine.decoder(prompt, chosen)
    return Job(decoder, list(prompt), owner, least_rows=least_rows(chosen)), owner


class WatchedSession:
    """Passes through to a session: records the shape of every step, and can hold or fail them."""

    def __init__(self, inner: StepSession) -> None:
        self._inner = inner
        self.shapes: list[tuple[int, int]] = []  # (sequences, longest)
        self.fail_next = False
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, rows: Sequence[SequenceRows], candidates: int = 1) -> list[Candidates]:
        assert self.gate.wait(60)
        assert [r.slot for r in rows] == list(range(len(rows))), "live slots must stand at the front"
        self.shapes.append((len(rows), max(len(r.tokens) for r in rows)))
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the engine failed")
        return self._inner.step(rows, candidates)


class ScriptedSession:
    """Replies what `script` says to the tokens of a prompt, every position sure. For fill decoding, without a cache."""

    def __init__(self, script: Callable[[list[int]], list[int]], sequences: int = 2, max_context: int = 2048) -> None:
        self.sequences, self.max_context, self.max_rows = sequences, max_context, 256
        self._script = script
        self._held: list[list[int]] = [[] for _ in range(sequences)]
        self._replies: list[tuple[int, list[int]] | None] = [None] * sequences

    def position(self, slot: int) -> int:
        return len(self._held[slot])

    def reset(self, slot: int) -> None:
        self._held[slot], self._replies[slot] = [], None

    def step(self, rows: Sequence[SequenceRows], candidates: int = 1) -> list[Candidates]:
        return [self._one(r, candidates) for r in rows]

    def _one(self, r: SequenceRows, k: int) -> Candidates:
        held = self._held[r.slot]
        held += r.tokens[: r.commit].tolist()
        if len(r.logit_rows) and self._replies[r.slot] is None:
            self._replies[r.slot] = len(held), self._script(list(held))
        ids = np.zeros((len(r.logit_rows), k), np.int64)
        for i, row in enumerate(r.logit_rows.tolist()):
            start, reply = self._replies[r.slot] or (0, [])
            place = len(held) + row - r.commit - start
            ids[i, 0] = reply[place] if place < len(reply) else 0
        logprobs = np.full(ids.shape, -0.01, np.float32)
        return Candidates(ids, logprobs, logprobs)

    def snapshot(self, slot: int) -> StateSnapshot:
        return StateSnapshot(len(self._held[slot]), {"held": np.array(self._held[slot]), "slot": np.array(slot)})

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        self._held[slot] = snapshot.tensors["held"].tolist()
        self._replies[slot] = self._replies[int(snapshot.tensors["slot"])]

    def close(self) -> None:
        pass


class RunningServer:
    """A server in a thread of this process."""

    def __init__(self, engine: Clover, **settings: Any) -> None:
        self.service = Service(engine, ServeSettings(port=0, **settings))
        self._server = Server(self.service)

    def __enter__(self) -> RunningServer:
        listener = listen(self.service.settings)
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not stop"

    @property
    def connections(self) -> set[Any]:
        """Those that are open now."""
        return self._server.server_state.connections

    @property
    def config(self) -> Any:
        """uvicorn's."""
        return self._server.config

    def wait_idle(self) -> None:
        """Every slot and every place in the queue is free again."""
        wait_until(lambda: self.service.scheduler.live == self.service.scheduler.queued == 0)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits for another thread. Raises AssertionError when the condition doesn't come true."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "the condition never came true"
        time.sleep(0.002)
