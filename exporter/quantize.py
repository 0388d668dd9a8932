"""Symmetric INT4 and INT8 quantisation in groups along the last axis, in the layout of ONNX Runtime's
MatMulNBits and QMoE: unsigned values with an implied zero point of 8 (or 128), INT4 two a byte, low nibble first.

    value = (stored - zero_point) * scale

Scales are exactly representable in bfloat16, so that engines keeping them in bfloat16 hold the same model as those
keeping them in float32. They are positive unless `signed_scales` is asked for: TensorRT's DequantizeLinear refuses
negative ones, ONNX Runtime's kernels and ours take them, so routed experts have them and other matrices don't.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from clover.runtime.errors import CloverError

GROUP_SIZES = (128, 64, 32)
LARGEST_WEIGHT = 1e30  # beyond it sums of products would overflow float32
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)  # subnormal scales have no finite inverse, and GPUs flush them
CHUNK = 2**18  # weights at a time: larger leaves the cache, smaller costs more calls than sums
CLOSE = 1e-5  # gains nearer than this part are float32's rounding
AT_ONCE = threading.BoundedSemaphore(os.cpu_count() or 1)  # more threads would only wait for the interpreter's lock

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Values = npt.NDArray[Any]  # float32, or bfloat16 (ml_dtypes), which is widened exactly


@dataclass(frozen=True)
class _Format:
    low: int
    high: int
    zero_point: int
    per_byte: int
    # Besides from abs-max / high, the search starts from scale = abs-max / level for each level; the largest weights are
    # then clipped. By group size: the longer a group, the further its largest weight stands out. Of all triples these
    # have the least squared error on normal weights, or within 0.01 dB of it (`benchmarks/quantizers.py --curve`).
    levels: Mapping[int, Sequence[float]]
    integer: type[np.int8] | type[np.int16]  # holds every value before it is clipped


INT4 = _Format(-8, 7, 8, 2, {32: (7.4, 7.9, 8.49), 64: (7.6, 8.2, 8.8), 128: (7.9, 8.49, 9.2)}, np.int8)
INT4_SIGNED = replace(INT4, levels={32: (7.8, 8.2, 8.6), 64: (8.0, 8.4, 9.0), 128: (8.2, 8.8, 9.5)})
INT8 = _Format(-127, 127, 128, 1, dict.fromkeys(GROUP_SIZES, (130.0,)), np.int16)


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
    return _quantize(weight, group_size, name, INT4_SIGNED if signed_scales else INT4, search, signed_scales)


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
    values = np.empty((len(groups), group_size // form.per_byte), np.uint8)
    scales = np.empty(len(groups), np.float32)
    rows = CHUNK // group_size
    with AT_ONCE:
        scratch = _Scratch(min(rows, len(groups)), group_size, form)
        for start in range(0, len(groups), rows):
            part = slice(start, start + rows)
            try:
                scales[part] = _quantize_groups(groups[part], values[part], scratch, form, search, signed)
            except OverflowError:
                raise CloverError(
                    f"{name} holds NaN, infinite or absurdly large values and can't be quantised."
                ) from None
    *leading, columns = weight.shape
    return values.reshape(*leading, columns // form.per_byte), scales.reshape(*leading, -1)


class _Scratch:
    """Memory of one chunk, used again by the next: fresh pages would cost more than the sums."""

    def __init__(self, rows: int, group_size: int, form: _Format) -> None:
        self.v, self.q = np.empty((2, rows, group_size), np.float32)
        self.integers = np.empty((rows, group_size), form.integer)
        self.gains = np.empty((3, 1 + len(form.levels[group_size]), rows), np.float32)
        self.starts = np.arange(0, rows * group_size, group_size)
        self.columns = np.arange(rows)


def _quantize_groups(
    source: Values, out: Bytes, scratch: _Scratch, form: _Format, search: bool, signed: bool
) -> Floats:
    """Writes the stored values of `source` [groups, group_size] to `out`, returns the scales [groups].

    Raises OverflowError for NaN and weights beyond LARGEST_WEIGHT.
    """
    n = len(source)
    v, q, integers = scratch.v[:n], scratch.q[:n], scratch.integers[:n]
    largest, negative = _widen(source, v, q, scratch)
    plain = _bfloat16_scale(largest * np.float32(1 / form.high))  # [groups]
    # From here on a group is in units of its abs-max scale: one start of the search is then one number for all groups.
    turn = 1 / plain
    if signed:
        turn[~negative] *= -1
    v *= turn[:, None]
    scale = plain
    if search:
        scale, close = _best_scale(v, scratch, plain, form)
        if close.size:
            few = source[close].astype(np.float64)
            if signed:
                few *= np.sign(turn[close])[:, None]
            better = _error(few, scale[close], form) < _error(few, plain[close], form)
            scale[close] = np.where(better, scale[close], plain[close])
        v *= (plain / scale)[:, None]
    np.rint(v, out=v)
    np.copyto(integers, v, casting="unsafe")
    np.clip(integers, form.low, form.high, out=integers)
    integers += form.integer(form.zero_point)
    stored: npt.NDArray[Any] = integers
    if form.per_byte == 2:  # as pack_int4
        pairs = integers.view("<u2")
        shifted = np.right_shift(pairs, 4, out=q.reshape(-1).view(np.uint16)[: pairs.size].reshape(pairs.shape))
        stored = np.bitwise_or(pairs, shifted, out=shifted)
    np.copyto(out, stored, casting="unsafe")  # the lowest byte
    if signed:
        np.copysign(scale, turn, out=scale)
    scale[largest == 0] = 1
    return scale


def _widen(source: Values, w: Floats, spare: Floats, scratch: _Scratch) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Writes `source` to w as float32; each group's largest magnitude, and whether it is that of a negative weight.

    `spare` is scratch. Raises OverflowError as above.
    """
    if source.dtype == ml_dtypes.bfloat16:  # the upper half of a float32
        bits = source.view(np.uint16)
        wide = w.view(np.uint32)
        wide[...] = bits
        wide <<= np.uint32(16)
        # Magnitudes are in the order of their bits, so with the sign moved to the lowest bit one maximum tells both.
        turned, signs = spare.view(np.uint16).reshape(2, *source.shape)
        np.left_shift(bits, np.uint16(1), out=turned)
        turned |= np.right_shift(bits, np.uint16(15), out=signs)
        most = _row_max(turned, scratch)
        largest = ((most >> np.uint16(1)).astype(np.uint32) << np.uint32(16)).view(np.float32)
        negative = (most & np.uint16(1)).astype(np.bool_)
    else:
        w[...] = source
        largest = _row_max(np.abs(w, out=spare), scratch)
        negative = -np.minimum.reduceat(w.reshape(-1), scratch.starts[: len(w)]) == largest
    if not np.all(largest <= LARGEST_WEIGHT):  # NaN compares false
        raise OverflowError
    return largest, negative


def _best_scale(v: Floats, scratch: _Scratch, plain: Floats, form: _Format) -> tuple[Floats, npt.NDArray[np.intp]]:
    """(the scale [groups] of least squared error, the groups where `plain`, abs-max / high, may be as good).

    For fixed integers q the best scale is s = Σvq / Σq², and Σ(v - s q)² = Σv² - (2 s Σvq - s² Σq²): the bracket, the
    gain, is what is maximised. Rounding to the nearest integers under the new s can only lower the error further.
    v is in units of `plain` [groups], the scales are not.
    """
    n = len(v)
    q, (vq, qq, gains) = scratch.q[:n], scratch.gains[:, :, :n]
    np.rint(v, out=q)
    for i, level in enumerate((form.high, *form.levels[v.shape[1]])):
        if i:
            np.rint(np.multiply(v, np.float32(level / form.high), out=q), out=q)
        if level >= form.high + 0.5:
            np.clip(q, form.low, form.high, out=q)
        np.vecdot(v, q, out=vq[i])
        np.vecdot(q, q, out=qq[i])
    scales = _bfloat16_scale(plain * (vq / np.maximum(qq, 1)))
    in_units = scales / plain
    np.multiply(in_units, 2 * vq - in_units * qq, out=gains)
    choice, columns = gains.argmax(0), scratch.columns[:n]
    best, best_gain, plain_gain = scales[choice, columns], gains[choice, columns], 2 * vq[0] - qq[0]
    close = np.flatnonzero((best_gain <= plain_gain * np.float32(1 + CLOSE)) & (best != plain))
    return best, close


def _bfloat16_scale(ideal: Floats) -> Floats:
    """A usable scale near `ideal`: normal, and in bfloat16."""
    return np.maximum(round_to_bfloat16(ideal), np.float32(SMALLEST_SCALE))


def _error(w: npt.NDArray[np.float64], scale: Floats, form: _Format) -> npt.NDArray[np.float64]:
    """Squared error [groups] of w under `scale`."""
    steps = w / scale[:, None]
    steps -= np.clip(np.rint(steps), form.low, form.high)
    steps *= scale[:, None]
    error: npt.NDArray[np.float64] = np.vecdot(steps, steps)
    return error


def _row_max(values: npt.NDArray[Any], scratch: _Scratch) -> npt.NDArray[Any]:
    """max along the last axis: `reduceat` takes half the time of `max` on rows this short."""
    return np.maximum.reduceat(values.reshape(-1), scratch.starts[: len(values)]) if len(values) else values[:, 0]
