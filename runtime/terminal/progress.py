"""Progress of long work: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

PLAIN_INTERVAL = 5.0  # seconds between plain lines
STEADY_INTERVAL = 0.2  # seconds between drawings of a steady bar


class Progress:
    """Call it with (what, done, total); a total of 0 is a phase without a measure. When `done` falls, new work began.

    Writes to stderr, so that stdout stays the command's result. `steady`: draws when called only, never beside the work,
    which may be timed.
    """

    def __init__(self, title: str, unit: str, *, quiet: bool = False, steady: bool = False) -> None:
        self._title, self._unit, self._quiet = title, unit, quiet
        self._bar: Any = None
        self._task: Any = None
        self._start = self._last = time.monotonic()
        self._done, self._steady = 0, steady
        if not quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
                auto_refresh=not steady,
            )
            self._task = self._bar.add_task(title, total=None, rate="")

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not total:
            self._phase(what)
            return
        now = time.monotonic()
        if done < self._done:
            self._start = now
        self._done = done
        speed = done / max(now - self._start, 1e-9)
        rate = " ".join(f"{human(speed)}{self._unit}/s".split())
        if self._bar:
            self._bar.update(
                self._task,
                completed=done,
                total=total,
                description=f"{self._title} {what}",
                rate=rate,
                refresh=self._steady and (now - self._last >= STEADY_INTERVAL or done >= total),
            )
            self._last = now if now - self._last >= STEADY_INTERVAL else self._last
        elif not self._quiet and (now - self._last >= PLAIN_INTERVAL or done >= total):
            self._last = now
            left = (total - done) / max(speed, 1e-9)
            print(
                f"{self._title}: {100 * done / max(total, 1):.0f} % ({what}), {rate}, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def _phase(self, what: str) -> None:
        if self._bar:
            self._bar.update(self._task, total=None, description=f"{self._title}: {what}", rate="")
        elif not self._quiet:
            print(f"{self._title}: {what}", file=sys.stderr, flush=True)


def human(value: float) -> str:
    """A number with a decimal prefix: 1.5 G, 20 M."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {prefix}"
    return f"{value:.3g} "
