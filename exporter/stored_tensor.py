"""One tensor of a checkpoint's files, read whole or by rows, and checked to be finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.exporter.prequantized import PackedMatrix, PackedRows, concatenate
from clover.exporter.safetensors_file import SafetensorsFile, TensorInfo
from clover.runtime.errors import CheckpointError

CHUNK_BYTES = 16 * 2**20  # converted at a time, so that only one float32 copy of a tensor exists
CHECKED = 2**18  # numbers checked at a time, so that the temporary fits the cache

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[Any] | PackedRows  # float32, bfloat16 as it is stored, or INT4 as it is stored


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as it lies in a file, under that file's name for it."""

    file: SafetensorsFile
    name: str

    @property
    def info(self) -> TensorInfo:
        return self.file.tensors[self.name]

    @property
    def nbytes(self) -> int:
        return self.info.nbytes


def to_float(rows: Rows) -> Floats:
    """What was read without widening, as float32."""
    return rows.dequantize() if isinstance(rows, PackedRows) else rows.astype(np.float32, copy=False)


def stack_rows(parts: Sequence[Rows]) -> Rows:
    """Rows under each other; in float32 when they are not stored alike."""
    packed = [part for part in parts if isinstance(part, PackedRows)]
    if len(packed) == len(parts):
        return concatenate(packed)
    same = not packed and len({part.dtype for part in parts if not isinstance(part, PackedRows)}) == 1
    return np.concatenate([part if same else to_float(part) for part in parts])


def read_rows(stored: StoredTensor | PackedMatrix, start: int | None = None, stop: int | None = None) -> Rows:
    """The tensor, its item `start`, or its rows `start:stop`; CheckpointError unless all are finite."""
    if isinstance(stored, PackedMatrix):
        return stored.read(start or 0, stop)
    if stored.info.dtype != "BF16" or not stored.info.shape:
        return read_float(stored, start, stop)
    index: int | slice = start if start is not None and stop is None else slice(start, stop)
    values = stored.file.read_slice(stored.name, index)
    bits = values.view(np.uint16).reshape(-1)
    for piece in range(0, bits.size, CHECKED):
        if (bits[piece : piece + CHECKED] & np.uint16(0x7FFF)).max() >= 0x7F80:
            raise _not_finite(stored)
    return values


def read_float(stored: StoredTensor | PackedMatrix, start: int | None = None, stop: int | None = None) -> Floats:
    """The tensor, its item `start`, or its rows `start:stop`, as float32; CheckpointError unless all are finite."""
    if isinstance(stored, PackedMatrix):
        return stored.dequantize(start or 0, stop)
    info = stored.info
    if start is not None and stop is None:
        out = _widen(stored.file.read_slice(stored.name, start))
    elif len(info.shape) < 2 or info.nbytes <= CHUNK_BYTES:
        index = slice(start, stop)
        out = _widen(stored.file.read_slice(stored.name, index) if info.shape else stored.file.read(stored.name))
    else:
        first, last, _ = slice(start, stop).indices(info.shape[0])
        out = np.empty((max(last - first, 0), *info.shape[1:]), np.float32)
        rows = max(1, CHUNK_BYTES * info.shape[0] // info.nbytes)
        for row in range(first, last, rows):
            end = min(row + rows, last)
            out[row - first : end - first] = _widen(stored.file.read_slice(stored.name, slice(row, end)))
    # min and max let NaN through, and need no temporary of the tensor's size
    if out.size and not (np.isfinite(out.min()) and np.isfinite(out.max())):
        raise _not_finite(stored)
    return out


def _not_finite(stored: StoredTensor) -> CheckpointError:
    return CheckpointError(
        f"{stored.name} in {stored.file.path} holds NaN or values beyond float32's range; the file is damaged or "
        "the training run diverged."
    )


def _widen(values: npt.NDArray[Any]) -> Floats:
    if values.dtype.itemsize == 2 and values.dtype.kind != "f":  # bfloat16 is the upper half of a float32
        return (values.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # reported by the caller, by name
        return values.astype(np.float32, copy=False)
