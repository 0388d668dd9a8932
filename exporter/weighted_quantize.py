"""Symmetric INT4 whose scales minimise the error of a matrix's output instead of that of its weights.

A row w of a matrix meets inputs x. Its output is off by Σ_i (w_i - s q_i) x_i; over many x, taken as uncorrelated, the
mean of its square is

    Σ_i E[x_i²] (w_i - s q_i)²

the diagonal of the Hessian 2 E[x xᵀ] that GPTQ (Frantar et al., 2022, arXiv 2210.17323, section 3, after Optimal Brain
Surgeon) quantises with, and the second-moment form of what AWQ (Lin et al., 2023, arXiv 2306.00978, section 3) takes
from a calibration set: that a weight matters as much as its input is large. E[x_i²] is what exporter/calibration.py calls importance.
"""

from __future__ import annotations

import numpy as np

from clover.exporter.quantize import (
    AT_ONCE,
    CHUNK,
    INT4,
    LARGEST_WEIGHT,
    SMALLEST_SCALE,
    Bytes,
    Floats,
    Values,
    check_quantisable,
    pack_int4,
    round_to_bfloat16,
)
from clover.runtime.errors import CloverError

# Starting scales abs-max / level. Where large weights meet small inputs it pays to clip further than for plain errors.
LEVELS = (7.0, 7.4, 7.8, 8.3, 8.9, 9.6, 10.5, 11.7, 13.3, 15.5)
REFINEMENTS = 1  # rounds of rounding under the best scale and least squares again
# Share of a group's mean importance that every channel gets on top: GPTQ's damping of the diagonal. A channel that the
# prompts left silent keeps a say.
DAMPING = 0.01


def quantize_int4_weighted(
    weight: Values, importance: Floats, group_size: int, *, name: str = "weight", signed_scales: bool = False
) -> tuple[Bytes, Floats]:
    """Quantises float32 or bfloat16 [..., K] to (packed uint8 [..., K / 2], scales float32 [..., K / group_size]).

    importance: float32 [K], mean squares E[x²] of the matrix's inputs, finite and not negative. Layout, scales exact in
    bfloat16, scale 1 for a group of zeros and `signed_scales` are those of `quantize_int4`. A group's weighted error is
    never above that of abs-max / 7 but for float32's rounding.

    Raises CloverError naming `name` when K is no multiple of `group_size`, or a weight is not finite.
    """
    check_quantisable(weight, group_size, name)
    *leading, columns = weight.shape
    if importance.shape != (columns,):
        raise ValueError(f"importance of {name} has shape {list(importance.shape)}, not {[columns]}")
    per_row = columns // group_size
    shares = damped_importance(importance, group_size)  # [K / group_size, group_size]
    groups = np.ascontiguousarray(weight).reshape(-1, group_size)
    packed = np.empty((len(groups), group_size // 2), np.uint8)
    scales = np.empty(len(groups), np.float32)
    at_once = max(1, CHUNK // columns) * per_row  # whole rows, so that the shares repeat
    with AT_ONCE:
        for start in range(0, len(groups), at_once):
            part = groups[start : start + at_once].astype(np.float32)
            h = np.tile(shares, (len(part) // per_row, 1))
            q, scales[start : start + at_once] = _quantize_groups(part, h, name, signed_scales)
            packed[start : start + at_once] = pack_int4(q)
    return packed.reshape(*leading, columns // 2), scales.reshape(*leading, per_row)


def damped_importance(importance: Floats, group_size: int) -> Floats:
    """[K] → [K / group_size, group_size]: shares of each group's mean, damped; all 1 where a group is silent."""
    h = importance.reshape(-1, group_size).astype(np.float64)
    mean = h.mean(axis=1, keepdims=True)
    shares = np.divide(h, mean, out=np.ones_like(h), where=mean > 0)
    damped: Floats = ((shares + DAMPING) / (1 + DAMPING)).astype(np.float32)
    return damped


def weighted_error(weight: Floats, restored: Floats, importance: Floats) -> float:
    """Σ importance (weight - restored)² over [..., K], importance [K]; in float64."""
    difference = weight.astype(np.float64) - restored
    return float((difference * difference * importance).sum())


def _quantize_groups(w: Floats, h: Floats, name: str, signed: bool) -> tuple[Bytes, Floats]:
    """(unsigned values uint8 [groups, group_size] of 0…15, scales [groups]) of w under h, both [groups, group_size]."""
    q = np.abs(w)
    largest = q.max(axis=1, initial=0)  # [groups]
    if not np.all(largest <= LARGEST_WEIGHT):  # NaN compares false
        raise CloverError(f"{name} holds NaN, infinite or absurdly large values and can't be quantised.")
    # in units of each group's largest weight a level is the same number for all, and no square over- or underflows
    unit = np.maximum(largest, np.float32(SMALLEST_SCALE * LEVELS[-1]))
    turn = np.where(signed & (w.max(axis=1, initial=0) == largest), np.float32(-1), np.float32(1))
    w = w * (turn / unit)[:, None]
    hw = h * w

    scale = _bfloat16_scale(unit / np.float32(INT4.high))
    _round(w, scale / unit, q)
    gain = _gain(scale / unit, *_sums(q, hw, h))

    def take_better() -> None:
        """The least-squares scale of the integers in q, where it gains more than the best so far. q is scratch."""
        nonlocal scale, gain
        products, squares = _sums(q, hw, h)
        ideal = np.divide(products, squares, out=scale / unit, where=squares > 0)
        rival = _bfloat16_scale(ideal * unit)
        its_gain = _gain(rival / unit, products, squares)
        better = its_gain > gain
        scale, gain = np.where(better, rival, scale), np.where(better, its_gain, gain)

    for level in LEVELS:
        np.multiply(w, np.float32(level), out=q)
        np.clip(np.rint(q, out=q), INT4.low, INT4.high, out=q)
        take_better()
    for _ in range(REFINEMENTS):
        _round(w, scale / unit, q)
        take_better()
    _round(w, scale / unit, q)
    q += np.float32(INT4.zero_point)
    return q.astype(np.uint8), np.where(largest > 0, scale * turn, np.float32(1))


def _round(w: Floats, scale: Floats, q: Floats) -> None:
    """Writes the nearest integers of w / scale in -8…7 to q: the best whatever the importance, for a given scale."""
    np.divide(w, scale[:, None], out=q)
    np.clip(np.rint(q, out=q), INT4.low, INT4.high, out=q)


def _sums(q: Floats, hw: Floats, h: Floats) -> tuple[Floats, Floats]:
    """(Σ h w q, Σ h q²) [groups]; q is squared in place."""
    products = np.vecdot(hw, q)
    np.multiply(q, q, out=q)
    return products, np.vecdot(h, q)


def _gain(scale: Floats, products: Floats, squares: Floats) -> Floats:
    """Σ h w² - Σ h (w - s q)²: how much of the weighted error of storing nothing a scale and its integers take away."""
    gain: Floats = scale * (2 * products - scale * squares)
    return gain


def _bfloat16_scale(ideal: Floats) -> Floats:
    """A normal number in bfloat16 near `ideal`."""
    return np.maximum(round_to_bfloat16(ideal), np.float32(SMALLEST_SCALE))
