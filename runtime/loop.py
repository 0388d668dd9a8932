"""The loop of one reply: plan → step → accept, until the decoder is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from clover.runtime.decoder import DecodeEvent, Decoder
from clover.runtime.session import SequenceRows, StepSession


@dataclass
class StepTimes:
    """Where a decode's time went, in seconds, and what its steps ran, where a list is given to note it in."""

    session: float = 0.0  # inside the engine
    decoder: float = 0.0  # planning and accepting
    rows: list[SequenceRows] | None = None


def decode(session: StepSession, decoder: Decoder, slot: int, times: StepTimes) -> Iterator[DecodeEvent]:
    """Runs `decoder` in `slot` to its end, giving out events as they become final."""
    clock = time.perf_counter
    while not decoder.done:
        start = clock()
        rows = decoder.plan(slot, session.max_rows)
        planned = clock()
        (candidates,) = session.step([rows], decoder.candidates)
        stepped = clock()
        events = decoder.accept(candidates)
        times.session += stepped - planned
        times.decoder += planned - start + clock() - stepped
        if times.rows is not None:
            times.rows.append(rows)
        yield from events
