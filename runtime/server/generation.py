"""From a job on the scheduler's thread to events in the server's loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clover.runtime.decoder import DecodeEvent, Decoder, StepEvent, TokenInfo
from clover.runtime.scheduler.job import Job, Outcome
from clover.runtime.scheduler.scheduler import Scheduler
from clover.runtime.server.errors import ClientFault, outcome_error
from clover.runtime.server.parts import Parts
from clover.runtime.text.finish import FinishReason
from clover.runtime.text.function_calls import FunctionArgumentsDelta
from clover.runtime.text.reply import Finished, ReplyDelta, ReplyParser
from clover.runtime.text.stream_parser import ContentDelta, ReasoningDelta

WAIT_SECONDS = 10.0
MOST_WAITING = 4096  # steps that a client may be behind its reply, beyond what the connection's buffers hold


@dataclass(frozen=True)
class Usage:
    """What a reply took. `steps` could produce tokens, `prefill_steps` only committed prompt tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    blocks: int = 0
    steps: int = 0

    @property
    def tokens_per_step(self) -> float:
        return round(self.completion_tokens / self.steps, 3) if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step gave to one choice. `tokens` are the reply's, in order; `steps` only when asked for."""

    choice: int
    events: Sequence[ReplyDelta]
    tokens: Sequence[TokenInfo]
    steps: Sequence[StepEvent] = ()


@dataclass(frozen=True, slots=True)
class FormValues:
    """What a form's holes hold, and how sure the model was of each. `value` is the form's result, a JSON value."""

    value: Any
    values: Mapping[str, Any]
    confidences: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one choice."""

    choice: int
    reason: FinishReason
    stop_string: str | None
    usage: Usage
    form: FormValues | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """A choice ended before its reply did."""

    outcome: Outcome | ClientFault


class Generation:
    """The choices of one request, as one stream of Piece and Ended in the order they happen.

    Whoever takes one must `close` it, whatever happens: that is what frees the slots of a client who left.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Piece | Ended | Broken] = asyncio.Queue()
        self._seen: deque[Piece | Ended | Broken] = deque()
        self._jobs: list[Job] = []
        self._open = 0
        self._overrun = False
        self._prompts: dict[int, int] = {}  # choice → which prompt
        self._usages: dict[int, Usage] = {}
        self.started = time.monotonic()
        self.first_token: float | None = None

    def run(self, jobs: Sequence[Job], choices_per_prompt: int) -> None:
        """Submits the jobs, one per choice. Raises QueueFullError or DrainingError."""
        self._open = len(jobs)
        self._prompts = {i: i // choices_per_prompt for i in range(len(jobs))}
        self._scheduler.submit(jobs)
        self._jobs = list(jobs)

    def post(self, item: Piece | Ended | Broken) -> None:
        """Hands an item over, from any thread. A client that falls too far behind loses its reply: it must hold neither a
        slot nor memory."""
        if self._overrun:
            return
        if self._queue.qsize() >= MOST_WAITING:
            self._overrun, item = True, Broken("slow")
            for job in self._jobs:
                self._scheduler.cancel(job)
        self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens of the first choice that came from the conversation cache; known from its first item on."""
        return self._jobs[0].cached_tokens

    @property
    def choices(self) -> int:
        return len(self._jobs)

    @property
    def ended(self) -> bool:
        """Every choice ended as it should."""
        return self._open == 0

    @property
    def usage(self) -> Usage:
        """Of the choices that ended. A prompt counts once, however many choices answer it."""
        total = Usage()
        seen: set[int] = set()
        for choice, usage in self._usages.items():
            fresh = self._prompts[choice] not in seen
            seen.add(self._prompts[choice])
            total = Usage(
                total.prompt_tokens + usage.prompt_tokens * fresh,
                total.completion_tokens + usage.completion_tokens,
                total.cached_tokens + usage.cached_tokens * fresh,
                total.reasoning_tokens + usage.reasoning_tokens,
                total.blocks + usage.blocks,
                total.steps + usage.steps,
            )
        return total

    async def wait_first(self) -> None:
        """Waits for the first item, which iteration still gives, or for WAIT_SECONDS. Raises ApiError when a choice broke
        before it."""
        item = await self._next()
        if isinstance(item, Broken):
            raise outcome_error(item.outcome)
        if item is not None:
            self._seen.append(item)

    async def _next(self) -> Piece | Ended | Broken | None:
        if not self._queue.empty():
            return self._queue.get_nowait()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                return await self._queue.get()
        except TimeoutError:
            return None

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Piece | Ended | None:
        """The next item, or None when there was none for WAIT_SECONDS. Raises ApiError when a choice broke off: what came
        before is not a whole reply."""
        if not self._open:
            raise StopAsyncIteration
        item = self._seen.popleft() if self._seen else await self._next()
        if isinstance(item, Broken):
            raise outcome_error(item.outcome)
        if isinstance(item, Ended):
            self._open -= 1
            self._usages[item.choice] = item.usage
        elif item is not None and (item.tokens or item.events) and self.first_token is None:
            self.first_token = time.monotonic()
        return item

    def give_up(self) -> None:
        """Ends the stream of items: nobody reads them any more."""
        self._queue.put_nowait(Broken("gone"))

    def close(self) -> None:
        """Cancels what is still running."""
        if self._open:
            for job in self._jobs:
                self._scheduler.cancel(job)


class ChoiceSink:
    """Owns one job: turns its tokens into reply events, on the scheduler's thread, and posts them."""

    def __init__(
        self,
        generation: Generation,
        choice: int,
        decoder: Decoder,
        parser: ReplyParser,
        *,
        steps: bool,
    ) -> None:
        self._generation, self._choice, self._decoder, self._parser = generation, choice, decoder, parser
        self._steps = steps
        self._tokens = self._reasoning_tokens = 0
        self.job: Job | None = None

    def push(self, events: Sequence[DecodeEvent]) -> bool:
        """See Sink. Tokens are parsed one at a time, so that none behind a stop string is counted."""
        texts: list[ReplyDelta] = []
        tokens: list[TokenInfo] = []
        steps: list[StepEvent] = []
        for event in events:
            if isinstance(event, StepEvent):
                if self._steps:
                    steps.append(event)
                continue
            for token in event.tokens:
                if self._parser.stopped:
                    break
                tokens.append(token)
                for delta in self._parser.push((token.id,)):
                    _append(texts, delta)
                self._reasoning_tokens += self._parser.in_reasoning
        self._tokens += len(tokens)
        if texts or tokens or steps:
            self._generation.post(Piece(self._choice, texts, tokens, steps))
        return self._parser.stopped

    def finish(self, outcome: Outcome) -> None:
        """See Sink."""
        if outcome != "done":
            self._generation.post(Broken(outcome))
            return
        *events, end = self._parser.finish(hit_limit=self._decoder.truncated)
        assert isinstance(end, Finished)
        texts: list[ReplyDelta] = []
        for event in events:
            assert not isinstance(event, Finished)
            _append(texts, event)
        if texts:
            self._generation.post(Piece(self._choice, texts, ()))
        counts = self._decoder.counts
        usage = Usage(
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=self._tokens,
            cached_tokens=self.job.cached_tokens if self.job else 0,
            reasoning_tokens=self._reasoning_tokens,
            blocks=counts.blocks,
            steps=counts.steps,
        )
        self._generation.post(Ended(self._choice, end.reason, end.stop_string, usage))


def _append(texts: list[ReplyDelta], delta: ReplyDelta) -> None:
    """Appends, joining text of the same kind."""
    last = texts[-1] if texts else None
    if isinstance(last, ContentDelta) and isinstance(delta, ContentDelta):
        texts[-1] = ContentDelta(last.text + delta.text)
    elif isinstance(last, ReasoningDelta) and isinstance(delta, ReasoningDelta):
        texts[-1] = ReasoningDelta(last.text + delta.text)
    elif isinstance(last, FunctionArgumentsDelta) and isinstance(delta, FunctionArgumentsDelta):
        texts[-1] = FunctionArgumentsDelta(last.index, last.text + delta.text)  # calls never interleave
    else:
        texts.append(delta)


@dataclass
class Choice:
    """A whole choice."""

    parts: Parts = field(default_factory=Parts)
    tokens: list[TokenInfo] = field(default_factory=list)
    end: Ended | None = None


async def collect(generation: Generation) -> list[Choice]:
    """Waits for every choice. Raises ApiError when one breaks off."""
    choices = [Choice() for _ in range(generation.choices)]
    async for item in generation:
        if item is None:
            continue
        choice = choices[item.choice]
        if isinstance(item, Ended):
            choice.end = item
            choice.parts.finish()
        else:
            choice.parts.feed(item.events)
            choice.tokens += item.tokens
    return choices
