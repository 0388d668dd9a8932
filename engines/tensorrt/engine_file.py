"""Reads what an engine file says of itself, without a GPU: TensorRT itself can't open one there.

The layout is what TensorRT-RTX 1.7 writes, found by building the same network for different cards and versions: a magic
word, the size of the whole file, the version that wrote it, one bit for each compute capability, and a directory of two
sections, the engine proper and its weights.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from clover.runtime.errors import BundleError

_MAGIC, _ENGINE, _WEIGHTS = b"vtrt", b"NGNE", b"THGW"
_HEADER = struct.Struct("<4s12xQ4B")
_CARDS = struct.Struct("<32xQ")
_DIRECTORY = struct.Struct("<64x4s4xQQ4s4xQQ")
_CARD_BITS = (75, 80, 86, 89, 120, 121)  # TensorRT-RTX's list of compute capabilities: bit n is the n-th


@dataclass(frozen=True)
class EngineHeader:
    """size: bytes of the file by its own account. version: of the TensorRT-RTX that built it, as 1.7.1.116. sms: compute
    capabilities (times ten) it runs on. weight_bytes: of the weights in it. The last two are None in a layout that is not
    known here."""

    size: int
    version: str
    sms: tuple[int, ...] | None
    weight_bytes: int | None


def read_header(path: Path) -> EngineHeader:
    """The header of a TensorRT-RTX engine. Raises BundleError when the file is not one, or is cut short."""
    try:
        with path.open("rb") as file:
            start = file.read(_DIRECTORY.size)
        actual = path.stat().st_size
    except OSError as error:
        raise BundleError(f"{path} can't be read ({error.strerror}); build the bundle again.") from None
    if len(start) < _DIRECTORY.size or not start.startswith(_MAGIC):
        raise BundleError(f"{path} is not a TensorRT-RTX engine; build the bundle again.")
    _, size, *version = _HEADER.unpack_from(start)
    if size != actual:
        raise BundleError(f"{path} has {actual} bytes and its header says {size}; build the bundle again.")
    (bits,) = _CARDS.unpack_from(start)
    engine, at, nbytes, weights, weights_at, weight_bytes = _DIRECTORY.unpack_from(start)
    known = (engine, weights) == (_ENGINE, _WEIGHTS)
    if known and (at + nbytes > actual or weights_at + weight_bytes > actual):
        raise BundleError(f"{path} lists parts that lie beyond its end; build the bundle again.")
    sms = tuple(sm for n, sm in enumerate(_CARD_BITS) if bits >> n & 1)
    return EngineHeader(
        size, ".".join(map(str, version)), sms if known and sms else None, weight_bytes if known else None
    )


def check_engine_file(path: Path, version: str, sm: int | None = None) -> EngineHeader:
    """The header of an engine that `version` must have built, for compute capability `sm` / 10. BundleError otherwise."""
    header = read_header(path)
    if header.version != version:
        raise BundleError(
            f"{path} was built by TensorRT-RTX {header.version}, and the bundle says {version}; build the bundle again."
        )
    if sm is not None and header.sms is not None and sm not in header.sms:
        cards = ", ".join(map(str, header.sms))
        raise BundleError(f"{path} is an engine for SM {cards}, and the bundle says SM {sm}; build the bundle again.")
    return header
