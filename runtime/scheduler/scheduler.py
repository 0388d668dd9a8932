"""The loop over many replies: admit → plan → step → accept, on one thread that owns the session."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from clover.runtime.scheduler.cache import ConversationCache, turn_borders
from clover.runtime.scheduler.job import Job, Outcome
from clover.runtime.scheduler.slots import SlotTable
from clover.runtime.session import NO_IDS, SequenceRows, StepSession

log = logging.getLogger("clover.scheduler")


class QueueFullError(Exception):
    """No room for more requests. `retry_after`: seconds until a place is likely to be free."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class DrainingError(Exception):
    """The scheduler takes no more work: it is shutting down, or its engine failed for good."""


@dataclass(frozen=True)
class StepReport:
    """One step, for metrics."""

    seconds: float
    engine_seconds: float  # of them, those inside the session
    sequences: int
    rows: int  # real rows, without padding


class Scheduler:
    """Runs jobs over the slots of one session. All public methods may be called from any thread.

    A step carries the next rows of every live job: chunks of prompts, previews and commits in any mixture. A job that
    lives alone takes as many rows as the session has. While several do, each is held to `shared_rows` rows (or its block,
    if that is larger): every sequence of a step costs as many rows as the longest, so a long prompt would hold the others
    up. At one block's rows a commit goes without the next block's first preview: one step more of half the rows, which
    is cheaper where time goes with rows (a CPU); at two blocks' rows they share a step, where it goes with steps (a GPU).
    """

    def __init__(
        self,
        session: StepSession,
        *,
        max_queue: int = 64,
        shared_rows: int = 32,
        cache_bytes: int = 0,
        cache_least_tokens: int = 64,
        turn_opener: int | None = None,
        on_step: Callable[[StepReport], None] | None = None,
    ) -> None:
        self.cache = ConversationCache(cache_bytes)
        self._session, self._slots = session, SlotTable(session)
        self._max_queue, self._shared_rows = max_queue, shared_rows
        self._least, self._opener, self._on_step = cache_least_tokens, turn_opener, on_step
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._draining = self._closed = False
        self._drain_until: float | None = None
        self._failed = False
        self._job_seconds = 1.0  # moving average from admission to end
        self._thread = threading.Thread(target=self._run, name="clover-scheduler", daemon=True)
        self._thread.start()

    # -- from any thread -------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Jobs in slots."""
        return len(self._slots)

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def ready(self) -> bool:
        """Whether new jobs are taken."""
        return not (self._draining or self._failed)

    @property
    def failed(self) -> bool:
        """The scheduler's thread ended though nobody closed it: only a new process helps."""
        return self._failed and not self._closed

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues jobs, all or none. Raises QueueFullError or DrainingError."""
        with self._changed:
            if not self.ready:
                raise DrainingError
            waiting = len(self._queue) + len(jobs) - self._slots.free
            if waiting > self._max_queue:
                turns = 1 + len(self._queue) / self._session.sequences
                raise QueueFullError(max(1, min(60, round(turns * self._job_seconds))))
            self._queue.extend(jobs)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Ends a job within a step. Does nothing to one that has ended."""
        with self._changed:
            job.cancelled = True
            waiting = job in self._queue
            if waiting:
                self._queue.remove(job)
        if waiting:
            self._tell(job, "cancelled")

    def drain(self, seconds: float) -> None:
        """Takes no more jobs. Those at work and in the queue may finish for `seconds`; then they end with `shutdown`."""
        with self._changed:
            self._draining = True
            until = time.monotonic() + seconds
            self._drain_until = until if self._drain_until is None else min(until, self._drain_until)
            self._changed.notify()

    def close(self) -> None:
        """Ends every job with `shutdown`, stops the thread and frees the session."""
        self.drain(0.0)
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._session.close()
        self.cache.clear()

    # -- the scheduler's thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                self._end_dead()
                self._admit()
                self._slots.compact()
                if len(self._slots):
                    self._step()
        except BaseException:  # a fault of ours: nobody may be left waiting for it
            log.exception("the scheduler failed")
        finally:
            with self._changed:
                self._failed = True
            self._end_all("shutdown" if self._closed else "error")

    def _wait(self) -> bool:
        """Blocks until there is work. False: the scheduler was closed."""
        with self._changed:
            while not (self._queue or len(self._slots) or self._closed):
                self._changed.wait()
            return not self._closed

    def _end_dead(self) -> None:
        """Ends jobs that were cancelled, ran out of time, or outlived the drain."""
        now = time.monotonic()
        drained = self._drain_until is not None and now >= self._drain_until
        for slot, job in self._slots:
            if job.cancelled or drained or job.expired(now):
                self._end(slot, job, "cancelled" if job.cancelled else "shutdown" if drained else "deadline")
        with self._changed:
            dead = [job for job in self._queue if drained or job.expired(now)]
            for job in dead:
                self._queue.remove(job)
        for job in dead:
            self._tell(job, "shutdown" if drained else "deadline")

    def _admit(self) -> None:
        while self._slots.free:
            with self._changed:
                if not self._queue:
                    return
                job = self._queue.popleft()
                slot = self._slots.take(job)
            job.admitted = time.monotonic()
            try:
                self._prepare(slot, job)
            except Exception:
                log.exception("a job could not be started")
                self._end(slot, job, "error")

    def _prepare(self, slot: int, job: Job) -> None:
        """Gives the job's slot its first state: empty, or of an earlier conversation that its prompt continues."""
        job.cacheable = job.cacheable and self.cache.enabled
        resumable = job.decoder.resumable
        state = self.cache.find(job.prompt, resumable) if job.cacheable else None
        if state is None:
            self._session.reset(slot)
        else:
            self._session.restore(slot, state)
            job.decoder.resume(state.position)
            job.committed = list(job.prompt[: state.position])
            job.cached_tokens = job.kept = job.line = state.position
        if job.cacheable:
            ahead = turn_borders(job.prompt, self._opener, self._least)
            job.borders = tuple(b for b in ahead if job.kept + self._least <= b <= resumable)

    def _step(self) -> None:
        jobs = list(self._slots)
        limit = self._session.max_rows
        if len(jobs) > 1:
            limit = min(limit, max(self._shared_rows, *(job.least_rows for _, job in jobs)))
        began = time.perf_counter()
        try:
            plans: list[SequenceRows] = [job.plan(slot, limit) for slot, job in jobs]
            candidates = max(job.decoder.candidates for _, job in jobs)
            planned = time.perf_counter()
            results = self._session.step(plans, candidates)
            engine_seconds = time.perf_counter() - planned
        except Exception:  # whose fault it was can't be told, and the state of every slot is in doubt
            log.exception("a step failed")
            for slot, job in jobs:
                self._end(slot, job, "error")
            self._probe()
            return
        for (slot, job), rows, result in zip(jobs, plans, results, strict=True):
            try:
                stopped = job.sink.push(job.accept(rows, result))
                if job.at_border:
                    self._keep(slot, job)
            except Exception:
                log.exception("a job failed")
                self._end(slot, job, "error")
                continue
            if stopped or job.decoder.done:
                self._end(slot, job, "done")
        if self._on_step:
            seconds = time.perf_counter() - began
            self._on_step(StepReport(seconds, engine_seconds, len(jobs), sum(len(rows.tokens) for rows in plans)))

    def _probe(self) -> None:
        """Asks the engine for a single row once every slot is free. What it raises ends the scheduler: an engine that can't
        do even that (a lost device) would fail every request to come."""
        self._session.reset(0)
        self._session.step([SequenceRows(0, np.zeros(1, np.int64), 1, NO_IDS)])
        self._session.reset(0)

    def _keep(self, slot: int, job: Job) -> None:
        """Keeps the slot's state: it holds exactly the tokens the job has committed."""
        job.kept = len(job.committed)
        if not self.cache.holds(job.committed):
            self.cache.keep(job.committed, self._session.snapshot(slot), job.committed[: job.line])
            job.line = job.kept

    def _end(self, slot: int, job: Job, outcome: Outcome) -> None:
        """Frees the job's slot and tells its owner; the only way out of a slot."""
        if job.admitted is not None:
            self._job_seconds += 0.2 * (time.monotonic() - job.admitted - self._job_seconds)
        # told first: keeping the state takes time, and the next step waits for it either way
        self._slots.release(slot)
        self._tell(job, outcome)
        try:
            fresh = len(job.committed) - job.kept
            if job.cacheable and outcome != "error" and not job.tentative and fresh >= self._least:
                self._keep(slot, job)
        except Exception:
            log.exception("a state could not be kept")

    def _end_all(self, outcome: Outcome) -> None:
        for slot, job in self._slots:
            self._slots.release(slot)
            self._tell(job, outcome)
        with self._changed:
            waiting, self._queue = list(self._queue), deque()
        for job in waiting:
            self._tell(job, outcome)

    @staticmethod
    def _tell(job: Job, outcome: Outcome) -> None:
        try:
            job.sink.finish(outcome)
        except Exception:
            log.exception("a job's owner could not be told of its end")
