"""Where each tensor of a weight store lies, so that a graph can point into the files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from clover.runtime.errors import BundleError


@dataclass(frozen=True)
class StoredTensor:
    """A tensor inside a safetensors file: `offset` and `nbytes` count from the start of the file."""

    file: str  # relative to the bundle
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_weight_index(bundle: Path, files: Iterable[str]) -> dict[str, StoredTensor]:
    """Every tensor of the store's files by name. Raises BundleError when a header can't be read."""
    index: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with (bundle / file).open("rb") as f:
                (length,) = struct.unpack("<Q", f.read(8))
                header = json.loads(f.read(length))
        except (OSError, struct.error, ValueError) as error:
            raise BundleError(
                f"{bundle / file} has no readable safetensors header ({error}); build the bundle again."
            ) from None
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                index[name] = StoredTensor(file, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
    return index
