"""Which job lives in which slot. Live slots stay at the front, since a step runs slots 0 to the last live one."""

from __future__ import annotations

from collections.abc import Iterator

from clover.runtime.scheduler.job import Job
from clover.runtime.session import StepSession


class SlotTable:
    """Jobs by slot over a session of S slots."""

    def __init__(self, session: StepSession) -> None:
        self._session = session
        self._jobs: list[Job | None] = [None] * session.sequences

    def __len__(self) -> int:
        return sum(job is not None for job in self._jobs)

    def __iter__(self) -> Iterator[tuple[int, Job]]:
        """(slot, job) of the live jobs, by slot."""
        return iter([(slot, job) for slot, job in enumerate(self._jobs) if job is not None])

    @property
    def free(self) -> int:
        return len(self._jobs) - len(self)

    def take(self, job: Job) -> int:
        """Puts a job into the lowest free slot."""
        slot = self._jobs.index(None)
        self._jobs[slot] = job
        return slot

    def release(self, slot: int) -> None:
        self._jobs[slot] = None

    def compact(self) -> None:
        """Moves the state of the highest live slots into lower free ones, so that steps carry no empty rows."""
        while True:
            live = len(self)
            hole = self._jobs.index(None) if live < len(self._jobs) else live
            if hole >= live:
                return
            last = max(slot for slot, job in enumerate(self._jobs) if job is not None)
            self._session.restore(hole, self._session.snapshot(last))
            self._jobs[hole], self._jobs[last] = self._jobs[last], None
