"""The few shapes a GPU session runs: each is captured as a CUDA graph once, so there should not be many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clover.runtime.errors import RequestError
from clover.runtime.session import SequenceRows


@dataclass(frozen=True)
class StepShape:
    """sequences S, rows T, logit rows R, candidates K, adjusted ids P: none of them 0."""

    sequences: int
    rows: int
    logit_rows: int
    candidates: int
    adjusted: int


@dataclass(frozen=True)
class ShapeLimits:
    """The largest shapes of an engine, and the row counts steps are padded to."""

    rows: int
    logit_rows: int
    candidates: int
    adjusted: int
    row_steps: tuple[int, ...]  # ascending: 1, the block sizes, twice the largest, up to `rows`

    def largest(self, sequences: int) -> StepShape:
        """The largest shape of a session with so many sequences."""
        return StepShape(sequences, self.rows, self.logit_rows, self.candidates, self.adjusted)

    def shape_of(self, plans: Sequence[SequenceRows], candidates: int) -> StepShape:
        """The shape that holds a step. Raises RequestError naming what the engine was not built for."""
        rows = max(len(p.tokens) for p in plans)
        logit_rows = max(len(p.logit_rows) for p in plans)
        adjusted = max(len(p.adjustment.ids) for p in plans)
        for field, value, limit in (
            ("rows", rows, self.rows),
            ("logit_rows", logit_rows, self.logit_rows),
            ("candidates", candidates, self.candidates),
            ("logit_bias", adjusted, self.adjusted),
        ):
            if value > limit:
                raise RequestError(field, f"a step has {value} {field} and this bundle's engine takes {limit}.")
        padded = next(r for r in self.row_steps if r >= rows)
        return StepShape(
            1 + max(p.slot for p in plans),
            padded,
            1 if logit_rows <= 1 else next(r for r in (*self.row_steps, self.logit_rows) if r >= logit_rows),
            min(_power_of_two(candidates), self.candidates),
            min(max(_power_of_two(adjusted), 16), self.adjusted),
        )


def shape_limits(
    max_rows: int, prefill_chunk: int, logit_rows: int, candidates: int, adjusted: int, block_sizes: Sequence[int]
) -> ShapeLimits:
    """Limits of an engine; a prompt is fed in chunks of `prefill_chunk` rows, whose tail runs in half or quarter size."""
    decode = {1, *block_sizes, *(2 * b for b in block_sizes)}
    steps = {r for r in (*decode, prefill_chunk // 4, prefill_chunk // 2, prefill_chunk, max_rows) if r >= 1}
    return ShapeLimits(max_rows, logit_rows, candidates, adjusted, tuple(sorted(r for r in steps if r <= max_rows)))


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
