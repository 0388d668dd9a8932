"""A calibration of a tiny checkpoint that several tests start from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

from engine_support import bundle
from oracle_support import tiny_checkpoint

from clover.engines.calibrate.record import record
from clover.engines.prompts import Prompt

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], list(range(20, 60)), [100]]
record_briefly = partial(record, max_new_tokens=12, threads=1)


def prompts(ids: Sequence[Sequence[int]] = PROMPTS) -> list[Prompt]:
    return [Prompt(f"line {n}", tokens=tokens) for n, tokens in enumerate(ids, 1)]


@cache
def calibrated() -> tuple[Path, Path]:
    """(a tiny checkpoint, its calibration). Few prompts and 16 experts, so that some are hit too rarely."""
    checkpoint, out = tiny_checkpoint(2), Path(mkdtemp(prefix="clover-calibration-")) / "c.safetensors"
    record_briefly(bundle(checkpoint), prompts(), out)
    return checkpoint, out
