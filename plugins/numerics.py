"""Small NumPy pieces the reference implementations share. Each keeps its input's float dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]


def sigmoid(x: FloatArray) -> FloatArray:
    """1 / (1 + e^-x), without overflow at either end."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def silu(x: FloatArray) -> FloatArray:
    """x · sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: FloatArray) -> FloatArray:
    """ln(1 + e^x)."""
    return np.logaddexp(np.zeros((), x.dtype), x)


def softmax(x: FloatArray) -> FloatArray:
    """Softmax over the last axis; -inf entries get exactly 0 as long as one entry is finite."""
    e: FloatArray = np.exp(x - x.max(axis=-1, keepdims=True))
    e /= e.sum(axis=-1, keepdims=True)
    return e


def l2_normalize(x: FloatArray, epsilon: float) -> FloatArray:
    """x / sqrt(Σ x² + epsilon) over the last axis."""
    norm: FloatArray = np.sqrt((x * x).sum(axis=-1, keepdims=True) + epsilon)
    return x / norm


def rms_normalize(x: FloatArray, epsilon: float) -> FloatArray:
    """x / sqrt(mean x² + epsilon) over the last axis; the weight is the caller's."""
    norm: FloatArray = np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon)
    return x / norm


def top_indices(scores: FloatArray, count: int) -> npt.NDArray[np.intp]:
    """Indices of the `count` largest entries of the last axis, largest first; ties go to the lower index."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :count]


def row_ranges(commit_length: IntArray, row_length: IntArray, rows: int) -> list[tuple[int, int]]:
    """Per sequence (c, n): rows [0, c) commit, rows [c, n) preview, rows [n, rows) are padding.

    Raises ValueError when a sequence breaks 0 ≤ c ≤ n ≤ rows.
    """
    ranges = [(int(c), int(n)) for c, n in zip(commit_length, row_length, strict=True)]
    for s, (c, n) in enumerate(ranges):
        if not 0 <= c <= n <= rows:
            raise ValueError(
                f"sequence {s}: commit_length {c}, row_length {n} and {rows} rows must be in ascending order"
            )
    return ranges
