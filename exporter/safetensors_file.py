"""One .safetensors file, read tensor by tensor with plain reads.

Not mapped: pages of a mapped 69 GB checkpoint stay in the process's resident set, plain reads into a fresh
buffer do not.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from clover.runtime.errors import CheckpointError

# safetensors' names for what NumPy can hold; 8-bit and smaller floats are left out on purpose
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `offset` is in bytes from the start of the file."""

    dtype: str  # safetensors' name: "BF16", "F32", ...
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """The header of one file, checked on construction, and reads of its tensors.

    Raises CheckpointError when the file is missing, cut short, or not safetensors, and later when it has changed since.
    Safe to use from several threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size, self._modified = _check(path)
        self.tensors, self.metadata = _read_header(path)

    def read(self, name: str) -> npt.NDArray[Any]:
        """The whole tensor, in its stored dtype."""
        info = self.tensors[name]
        return self._read(name, info.offset, info.shape)

    def read_slice(self, name: str, index: int | slice) -> npt.NDArray[Any]:
        """`tensor[index]` along the first axis (an index, or a slice of step 1), reading only those bytes."""
        info = self.tensors[name]
        if not info.shape:
            raise IndexError(f"{name} is a scalar")
        rows, *rest = info.shape
        row_bytes = info.nbytes // rows if rows else 0
        if isinstance(index, slice):
            start, stop, step = index.indices(rows)
            if step != 1:
                raise IndexError(f"a slice of {name} needs step 1, not {step}")
            return self._read(name, info.offset + start * row_bytes, (max(stop - start, 0), *rest))
        start = index + rows if index < 0 else index
        if not 0 <= start < rows:
            raise IndexError(f"index {index} is out of range for {name} of shape {list(info.shape)}")
        return self._read(name, info.offset + start * row_bytes, tuple(rest))

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Raw bytes of the file, `offset` counted from its start."""
        buffer = np.empty(nbytes, np.uint8)
        self._fill(buffer, offset)
        return buffer.tobytes()

    def _read(self, name: str, offset: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        stored = self.tensors[name].dtype
        dtype = NUMPY_DTYPES.get(stored)
        if dtype is None:
            raise CheckpointError(
                f"{name} in {self.path} is stored as {stored}, which is not supported; use the BF16 checkpoint."
            )
        buffer = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
        self._fill(buffer, offset)
        return buffer.view(dtype).reshape(shape)

    def _fill(self, buffer: npt.NDArray[np.uint8], offset: int) -> None:
        view = buffer.data
        done = 0
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(offset)
                while done < len(view):  # one read returns at most 2 GiB
                    count = file.readinto(view[done : done + 2**30])
                    if not count:
                        raise CheckpointError(f"{self.path} became shorter while it was read; download it again.")
                    done += count
                self._check_unchanged(os.fstat(file.fileno()))
        except OSError as error:
            raise CheckpointError(f"{self.path} can't be read ({error.strerror}); check the disk.") from None

    def _check_unchanged(self, state: os.stat_result) -> None:
        """Bytes of two versions of a file would make a model that nobody has trained."""
        if (state.st_size, state.st_mtime_ns) != (self.size, self._modified):
            raise CheckpointError(
                f"{self.path} was changed while it was read; wait until the download or training run that writes it is "
                "done, then start again."
            )


def _check(path: Path) -> tuple[int, int]:
    """The file's size and time of its last change in ns, after the safetensors library has accepted its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
            state = os.fstat(file.fileno())
            size = state.st_size
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror}).") from None
    if start == LFS_POINTER:
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` to fetch them.")
    try:
        with safe_open(path, "np"):
            pass
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise CheckpointError(
            f"{path} ({size} bytes) is cut short or is not a safetensors file ({reason}); download it again."
        ) from None
    return size, state.st_mtime_ns


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return out


def _read_header(path: Path) -> tuple[MappingProxyType[str, TensorInfo], dict[str, str]]:
    """Byte offsets of every tensor. Bounds, holes and overlaps were checked by the library, duplicates were not."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        start = 8 + length
        metadata = header.pop("__metadata__", None) or {}
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = TensorInfo(entry["dtype"], tuple(entry["shape"]), start + begin, end - begin)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has a damaged header ({error}); download it again.") from None
    return MappingProxyType(tensors), metadata
