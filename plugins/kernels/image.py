"""Reads a cubin's own account of its kernel: architecture, parameters and threads, without a driver.

A cubin is an ELF file. Section `.nv.info.KERNEL` lists attributes of the kernel, each as a format byte, a code, and
either 16 bits of value or a length and bytes; the codes are those that NVIDIA's `cuobjdump --dump-elf` names. It is
what the driver copies arguments by, so that a launch that disagrees with it reads or writes the wrong memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from clover.plugins.kernels.cubin import SHARED_MEMORY_LIMIT, Cubin
from clover.plugins.kernels.launch import parameter_layout
from clover.runtime.errors import BundleError

_CUDA_MACHINE = 190  # ELF's e_machine for CUDA
_PARAMETER, _THREADS, _PARAMETER_BYTES = 0x17, 0x10, 0x19  # EIATTR_KPARAM_INFO, _REQNTID, _CBANK_PARAM_SIZE
_SIZED = 0x04  # format of an attribute whose value is a length and bytes
_NEW_ABI = 8  # from this ELF ABI version on (12.0 and later) the architecture stands one byte higher


@dataclass(frozen=True)
class KernelImage:
    """sm: compute capability times ten. parameters: (offset, size) of each in bytes, in order. parameter_bytes: all of
    them. threads: of one block, 0 when the image leaves it open."""

    sm: int
    parameters: tuple[tuple[int, int], ...]
    parameter_bytes: int
    threads: int


def read_image(image: bytes, entry: str) -> KernelImage:
    """What the image says of kernel `entry`. Raises BundleError when it is no cubin, or holds no such kernel."""
    try:
        return _read(image, entry)
    except (struct.error, ValueError, IndexError) as error:
        raise BundleError(f"the image of kernel {entry} can't be read ({error}); build the bundle again") from None


def _read(image: bytes, entry: str) -> KernelImage:
    if image[:4] != b"\x7fELF" or struct.unpack_from("<H", image, 18)[0] != _CUDA_MACHINE:
        raise ValueError("it is not a cubin")
    (flags,) = struct.unpack_from("<I", image, 48)
    sections = _sections(image)
    if f".text.{entry}" not in sections or f".nv.info.{entry}" not in sections:
        raise ValueError(f"it holds no kernel {entry}")
    parameters: dict[int, tuple[int, int]] = {}
    threads, total = 0, 0
    for code, value in _attributes(sections[f".nv.info.{entry}"]):
        if code == _PARAMETER:
            _, ordinal, offset, packed = struct.unpack("<IHHI", value)
            parameters[ordinal] = offset, packed >> 18
        elif code == _THREADS:
            x, y, z = struct.unpack("<III", value)
            threads = x * y * z
        elif code == _PARAMETER_BYTES:
            (total,) = struct.unpack("<H", value)
    if sorted(parameters) != list(range(len(parameters))):
        raise ValueError("its list of parameters has gaps")
    sm = flags >> 8 & 0xFF if image[8] >= _NEW_ABI else flags & 0xFF
    return KernelImage(sm, tuple(parameters[i] for i in range(len(parameters))), total, threads)


def _sections(image: bytes) -> dict[str, bytes]:
    (start,) = struct.unpack_from("<Q", image, 40)
    size, count, names_at = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, start + i * size) for i in range(count)]
    names = image[headers[names_at][4] :]
    found = {}
    for name, kind, _, _, offset, nbytes in headers:
        content = b"" if kind == 8 else image[offset : offset + nbytes]  # 8: memory without content in the file
        if kind != 8 and len(content) != nbytes:
            raise ValueError("it is cut short")
        found[names[name : names.index(b"\0", name)].decode()] = content
    return found


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(content):
        form, code, value = struct.unpack_from("<BBH", content, at)
        at += 4
        if form == _SIZED:
            yield code, content[at : at + value]
            at += value
        else:
            yield code, struct.pack("<H", value)


def check_image(cubin: Cubin) -> KernelImage:
    """The image of a cubin that is what its description says and takes what the launcher passes. BundleError otherwise."""
    image = read_image(cubin.image, cubin.entry)
    again = "build the bundle again"
    if image.sm != cubin.sm:
        raise BundleError(f"kernel {cubin.name} is compiled for SM {image.sm}; {again}")
    if image.threads and image.threads != cubin.threads:
        raise BundleError(f"kernel {cubin.name} needs blocks of {image.threads} threads, not {cubin.threads}; {again}")
    packed = parameter_layout(cubin)
    if image.parameters != packed or image.parameter_bytes != sum(packed[-1]):
        raise BundleError(
            f"kernel {cubin.name} takes parameters (offset, bytes) {_list(image.parameters)}, and this clover passes "
            f"{_list(packed)}; {again}"
        )
    limit = SHARED_MEMORY_LIMIT.get(cubin.sm, 0)
    if cubin.shared_bytes > limit:
        raise BundleError(
            f"kernel {cubin.name} asks for {cubin.shared_bytes} bytes of shared memory of {limit}; {again}"
        )
    return image


def _list(parameters: tuple[tuple[int, int], ...]) -> str:
    return " ".join(f"{offset}:{size}" for offset, size in parameters)
