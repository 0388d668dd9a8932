"""Builds bundles of tiny checkpoints and drives their sessions, for tests."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.engines.build import BuildRequest, build_target
from clover.engines.bundle import Bundle
from clover.engines.open import open_session
from clover.runtime.session import Candidates, SequenceRows, StepSession

REPOSITORY = Path(__file__).resolve().parent.parent
NANO = REPOSITORY / "examples" / "nano"


@lru_cache(maxsize=64)
def bundle(checkpoint: Path, **options: Any) -> Bundle:
    """A bundle of `checkpoint`, built once per set of options (BuildRequest's fields)."""
    directory = Path(tempfile.mkdtemp(prefix="clover-bundle-"))
    return build_target(BuildRequest(checkpoint, directory / "bundle", **{"precision": "fp32", **options}))


def session(checkpoint: Path, *, sequences: int = 1, max_context: int = 512, **options: Any) -> StepSession:
    """A session over a bundle that gives logits out."""
    built = bundle(checkpoint, with_logits=True, **options)
    return open_session(built, sequences=sequences, max_context=max_context, threads=1, cache=False)


def rows(
    tokens: Sequence[int] | npt.NDArray[np.int64],
    commit: int,
    *,
    slot: int = 0,
    top_p: float = 0.9,
    logits: bool = True,
) -> SequenceRows:
    """Rows of one sequence, asking for the logits of every row."""
    array = np.asarray(tokens, np.int64)
    asked = np.arange(len(array), dtype=np.int64) if logits else np.zeros(0, np.int64)
    return SequenceRows(slot, array, commit, asked, coreset_top_p=top_p)


def logits_of(candidates: Candidates) -> npt.NDArray[np.float32]:
    """The logits of a step, copied out of the session's buffer."""
    assert candidates.logits is not None
    return candidates.logits.copy()


def state_of(engine: StepSession, slot: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Committed state by name."""
    return engine.snapshot(slot).tensors


def relative_error(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
