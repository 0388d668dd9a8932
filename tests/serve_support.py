"""A nano model with several slots, and owners of scheduled jobs, for tests of the scheduler and the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import engine_support

from clover.engines.open import open_session
from clover.runtime.clover import Clover
from clover.runtime.decoder import DecodeEvent, TokensEvent
from clover.runtime.scheduler.job import Job, Outcome
from clover.runtime.session import StepSession
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
        self.steps = 0
        self.outcomes: list[Outcome] = []
        self.ended = threading.Event()
        self.started = threading.Event()

    def push(self, events: Sequence[DecodeEvent]) -> bool:
        self.steps += 1
        self.started.set()
        self.tokens += [t.id for e in events if isinstance(e, TokensEvent) for t in e.tokens]
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
    return Job(decoder, list(prompt), owner, full_rows=2 * chosen.block_size), owner


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits for another thread. Raises AssertionError when the condition doesn't come true."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "the condition never came true"
        time.sleep(0.002)
