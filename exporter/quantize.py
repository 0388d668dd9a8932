"""Symmetric INT4 and INT8 quantisation in groups along the last axis, in the layout of ONNX Runtime's
MatMulNBits and QMoE: unsigned values with an implied zero point of 8 (or 128), INT4 two a byte, low nibble first.

    value = (stored - zero_point) * scale

Scales are exactly representable in bfloat16, so that engines keeping them in bfloat16 hold the same model as those
keeping them in float32. They are positive unless `signed_scales` is asked for: TensorRT's DequantizeLinear refuses
negative ones, ONNX Runtime's kernels and ours take them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from clover.runtime.errors import CloverError

GROUP_SIZES = (128, 64, 32)
LARGEST_WEIGHT = 1e30  # beyond it a group's squared error overflows float32
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)  # subnormal scales have no finite inverse, and GPUs flush them
CHUNK = 2**18  # weights at a time: larger leaves the cache, smaller costs more calls than sums

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Values = npt.NDArray[Any]  # float32, or bfloat16 (ml_dtypes), which is widened exactly


@dataclass(frozen=True)
class _Format:
    low: int
    high: int
    zero_point: int
    per_byte: int
    # Besides from abs-max / high, the search starts from scale = abs-max / level for each level, in rising order; the
    # largest weights are then clipped. Twice as many levels win another 0.5 % of squared error.
    levels: Sequence[float]
    close: float  # gains nearer than this part are not told apart: float32's rounding, or part of the usual error


INT4 = _Format(-8, 7, 8, 2, (7.2, 7.8, 8.4, 9.2, 10.4), 1e-5)
INT8 = _Format(-127, 127, 128, 1, (127.0, 130.0), 1e-3)


def quantize_int4(
    weight: Values, group_size: int, *, name: str = "weight", search: bool = True, signed_scales: bool = False
) -> tuple[Bytes, Floats]:
    """Quantises float32 or bfloat16 [..., K] to (packed uint8 [..., K / 2], scales float32 [..., K / group_size]).

    Each group's scale is the one of least squared error among abs-max / 7 and its rivals, all refined by least
    squares; ties keep abs-max / 7, which is what `search=False` gives. A group of zeros gets the scale 1.
    `signed_scales` turns each group so that its largest weight lies on the longer, negative side of -8…7: about
    a tenth less squared error.

    Raises CloverError naming `name` when K is no multiple of `group_size`, or a weight is not finite.
    """
    return _quantize(weight, group_size, name, INT4, search, signed_scales)


def quantize_int8(
    weight: Values, group_size: int, *, name: str = "weight", search: bool = True
) -> tuple[Bytes, Floats]:
    """Quantises float32 or bfloat16 [..., K] to (uint8 [..., K] of 1…255, scales float32 [..., K / group_size])."""
    return _quantize(weight, group_size, name, INT8, search, signed=False)


def dequantize_int4(packed: Bytes, scales: Floats) -> Floats:
    """float32 [..., K] from packed uint8 [..., K / 2] and scales [..., K / group_size]."""
    return _dequantize(unpack_int4(packed), scales, INT4.zero_point)


def dequantize_int8(values: Bytes, scales: Floats) -> Floats:
    """float32 [..., K] from uint8 [..., K] and scales [..., K / group_size]."""
    return _dequantize(values, scales, INT8.zero_point)


def pack_int4(values: Bytes) -> Bytes:
    """uint8 [..., K] of 0…15 → uint8 [..., K / 2], the even element in the low nibble."""
    pairs = np.ascontiguousarray(values).view("<u2")
    packed: Bytes = (pairs | (pairs >> np.uint16(4))).astype(np.uint8)
    return packed


def unpack_int4(packed: Bytes) -> Bytes:
    """uint8 [..., K / 2] → uint8 [..., K] of 0…15."""
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1).reshape(*packed.shape[:-1], -1)


def round_to_bfloat16(values: Floats) -> Floats:
    """Nearest bfloat16 (ties to even), kept in float32."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def check_quantisable(weight: Values, group_size: int, name: str) -> None:
    """Raises CloverError naming `name` when `weight` [..., K] can't be cut into groups of `group_size`."""
    if group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise CloverError(f"group size {group_size} of {name} is not supported; choose from {sizes}.")
    if weight.ndim == 0 or weight.shape[-1] % group_size:
        raise CloverError(
            f"{name} of shape {list(weight.shape)} can't be quantised in groups of {group_size}: its last axis is no "
            "multiple of that; choose a smaller group size or leave this tensor unquantised."
        )


def _dequantize(values: Bytes, scales: Floats, zero_point: int) -> Floats:
    groups = values.reshape(*scales.shape, -1).astype(np.float32)
    groups -= np.float32(zero_point)
    groups *= scales[..., None]
    return groups.reshape(values.shape)


def _quantize(
    weight: Values, group_size: int, name: str, form: _Format, search: bool, signed: bool
) -> tuple[Bytes, Floats]:
    check_quantisable(weight, group_size, name)
    groups = np.ascontiguousarray(weight).reshape(-1, group_size)
    packed_size = group_size // form.per_byte
    values = np.empty((len(groups), packed_size), np.uint8)
    scales = np.empty(len(groups), np.float32)
    rows = CHUNK // group_size
    w, q = np.empty((2, min(rows, len(groups)), group_size), np.float32)  # fresh pages would cost more than the sums
    for start in range(0, len(groups), rows):
        part = groups[start : start + rows]
        n = len(part)
        scales[start : start + n] = _quantize_groups(part, w[:n], q[:n], form, name, search, signed)
        stored = q[:n].astype(np.uint8)
        values[start : start + n] = pack_int4(stored) if form.per_byte == 2 else stored
    *leading, columns = weight.shape
    return values.reshape(*leading, columns // form.per_byte), scales.reshape(*leading, -1)


def _quantize_groups(
    source: Values, w: Floats, q: Floats, form: _Format, name: str, search: bool, signed: bool
) -> Floats:
    """Writes the unsigned values of `source` [groups, group_size] to q, returns the scales [groups]. w is scratch."""
    w[...] = source
    largest = _row_max(np.abs(w, out=q))
    if not (largest.size == 0 or largest.max() <= LARGEST_WEIGHT):  # NaN compares false
        raise CloverError(f"{name} holds NaN, infinite or absurdly large values and can't be quantised.")
    sign = np.ones_like(largest)
    if signed:
        sign[(_row_max(w) == largest) & (largest > 0)] = -1
        w *= sign[:, None]
    scale = _scale(largest / np.float32(form.high), largest)
    if search:
        best, close = _best_scale(w, q, largest, scale, form)
        w[...] = source  # cheaper than a third array beside them in the cache
        if signed:
            w *= sign[:, None]
        if close.size:
            few, a, b = w[close], best[close], scale[close]
            best[close] = np.where(_error(few, q[: close.size], a, form) < _error(few, q[: close.size], b, form), a, b)
        scale = best
    _round(w, q, scale, form)
    q += np.float32(form.zero_point)
    return scale * sign if signed else scale


def _best_scale(
    w: Floats, q: Floats, largest: Floats, plain: Floats, form: _Format
) -> tuple[Floats, npt.NDArray[np.intp]]:
    """(the scale [groups] of least squared error, the groups where `plain`, abs-max / high, may be as good).

    For fixed integers q the best scale is s = Σwq / Σq², and Σ(w - s q)² = Σw² - (2 s Σwq - s² Σq²): the bracket, the
    gain, is what is maximised. Rounding to the nearest integers under the new s can only lower the error further.
    w and q are scratch afterwards.
    """
    wq, qq = np.empty((2, len(form.levels), len(w)), np.float32)
    _round(w, q, plain, form)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        plain_gain = plain * (2 * np.vecdot(w, q) - plain * np.vecdot(q, q))
        # in units of each group's largest weight, where that has an inverse, a level is the same number for all
        w *= np.where(largest > SMALLEST_SCALE * form.levels[-1], 1 / largest, 0)[:, None]
        for i, level in enumerate(form.levels):
            np.multiply(w, np.float32(level), out=q)
            np.rint(q, out=q)
            if level >= form.high + 0.5:
                np.clip(q, form.low, form.high, out=q)
            np.vecdot(w, q, out=wq[i])
            np.vecdot(q, q, out=qq[i])
        wq *= largest
        scales = _scale(wq / qq, qq)
        gains = scales * (2 * wq - scales * qq)
        gains[np.isnan(gains)] = -np.inf
        choice, columns = gains.argmax(0), np.arange(len(w))
        # not clearly above the plain scale's: the errors themselves decide
        close = np.flatnonzero(~(gains[choice, columns] > plain_gain * (1 + form.close)) & (largest > 0))
    return scales[choice, columns], close


def _scale(ideal: Floats, nonzero: Floats) -> Floats:
    """A usable scale near `ideal`: normal, in bfloat16, and 1 where the group is all zeros."""
    rounded = np.maximum(round_to_bfloat16(ideal), np.float32(SMALLEST_SCALE))
    return np.where(nonzero > 0, rounded, np.float32(1))


def _round(w: Floats, q: Floats, scale: Floats, form: _Format) -> None:
    np.divide(w, scale[:, None], out=q)
    np.rint(q, out=q)
    np.clip(q, form.low, form.high, out=q)


def _error(w: Floats, q: Floats, scale: Floats, form: _Format) -> Floats:
    """Squared error [groups] of w under `scale`; q is scratch."""
    _round(w, q, scale, form)
    q *= scale[:, None]
    q -= w
    with np.errstate(over="ignore", under="ignore"):
        error: Floats = np.vecdot(q, q)
    return error


def _row_max(values: Floats) -> Floats:
    """max along the last axis: `reduceat` takes half the time of `max` on rows this short."""
    rows, columns = values.shape
    return np.maximum.reduceat(values.reshape(-1), np.arange(0, rows * columns, columns)) if rows else values[:, 0]
