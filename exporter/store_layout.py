"""Where the tensors of a store file lie: safetensors whose tensors are aligned."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from clover.exporter.safetensors_file import NUMPY_DTYPES

ALIGNMENT = 64


class Entry(Protocol):
    """What the writer needs to know of a tensor. `dtype` is safetensors' name for it ("F32", "BF16", "U8")."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class StoreEntry:
    """One tensor of the file to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def layout(entries: Sequence[Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """(header bytes, name → (offset from the start of the file, size in bytes)).

    The format allows no holes between tensors. So those that are a multiple of 64 bytes come first, in the given
    order and all aligned to 64; the others follow from the most to the least divisible, each aligned to its dtype.
    """
    sizes = {e.name: math.prod(e.shape) * NUMPY_DTYPES[e.dtype].itemsize for e in entries}
    if len(sizes) != len(entries):
        raise ValueError("two entries have the same name")

    def divisor(entry: Entry) -> int:
        size = sizes[entry.name]
        return min(size & -size, ALIGNMENT) if size else ALIGNMENT

    ordered = sorted(entries, key=divisor, reverse=True)  # a stable sort
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset, starts = 0, {}
    for e in ordered:
        starts[e.name], end = offset, offset + sizes[e.name]
        header[e.name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    data = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {e.name: (data + starts[e.name], sizes[e.name]) for e in ordered}


def file_size(entries: Sequence[Entry], metadata: Mapping[str, str]) -> int:
    """Bytes of the finished file."""
    header, places = layout(entries, metadata)
    return max((offset + size for offset, size in places.values()), default=len(header))
