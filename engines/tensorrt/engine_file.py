"""Checks an engine file without a GPU: TensorRT itself can't open one there."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from clover.runtime.errors import BundleError

# What TensorRT-RTX 1.7 writes: a magic word, the size of the whole file, the version that wrote it.
_MAGIC = b"vtrt"
_HEADER = struct.Struct("<4s12xQ4B")


@dataclass(frozen=True)
class EngineHeader:
    """size: bytes of the file by its own account. version: of the TensorRT-RTX that built it, as 1.7.1.116."""

    size: int
    version: str


def read_header(path: Path) -> EngineHeader:
    """The header of a TensorRT-RTX engine. Raises BundleError when the file is not one, or is cut short."""
    try:
        with path.open("rb") as file:
            start = file.read(_HEADER.size)
        actual = path.stat().st_size
    except OSError as error:
        raise BundleError(f"{path} can't be read ({error.strerror}); build the bundle again.") from None
    if len(start) < _HEADER.size or not start.startswith(_MAGIC):
        raise BundleError(f"{path} is not a TensorRT-RTX engine; build the bundle again.")
    _, size, *version = _HEADER.unpack(start)
    if size != actual:
        raise BundleError(f"{path} has {actual} bytes and its header says {size}; build the bundle again.")
    return EngineHeader(size, ".".join(map(str, version)))


def check_engine_file(path: Path, version: str) -> EngineHeader:
    """The header of an engine that `version` must have built. Raises BundleError otherwise."""
    header = read_header(path)
    if header.version != version:
        raise BundleError(
            f"{path} was built by TensorRT-RTX {header.version}, and the bundle says {version}; build the bundle again."
        )
    return header
