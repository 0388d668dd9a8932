"""Memory of this machine: how much a process may still take, and taking less of it while a session is made."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # mallopt's parameters, from glibc's malloc.h
_MMAP_MAX_DEFAULT = 65536
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # what glibc's own adjustment ends at; its trim threshold is twice that


def available_memory() -> int | None:
    """Bytes a process may still take without swapping, with the limits of its control group; None where unknown."""
    found = [n for n in (_meminfo(), *_group_limits()) if n is not None]
    return min(found) if found else None


@contextmanager
def reused_buffers() -> Iterator[None]:
    """Large buffers that are freed inside are used again instead of being given back and taken anew page by page.

    ONNX Runtime packs weight after weight into a buffer of its own and frees it when the cached file has the same; to
    have the system clear each page of them took half the time of opening a session. Only with the GNU C library.
    """
    library = _gnu_library()
    if library is None:
        yield
        return
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        library.mallopt(_MMAP_MAX, _MMAP_MAX_DEFAULT)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)
        library.malloc_trim(0)


def _gnu_library() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  other C libraries have no such function
        library.malloc_trim.argtypes = [ctypes.c_size_t]
        return library
    return None


def _meminfo() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def _group_limits() -> Iterator[int | None]:
    """What is left under the memory limits of this process's control group and of those above it."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers:  # version 2
                yield from _limits(Path("/sys/fs/cgroup"), name, "memory.max", "memory.stat", "anon")
            elif "memory" in controllers.split(","):
                root = Path("/sys/fs/cgroup/memory")
                yield from _limits(root, name, "memory.limit_in_bytes", "memory.stat", "total_rss")


def _limits(root: Path, name: str, limit: str, statistics: str, used: str) -> Iterator[int]:
    """Limit less what can't be dropped, of the group `name` (in a container the root itself) and its parents."""
    group = root / name.strip("/")
    for place in dict.fromkeys((root, *(p for p in (group, *group.parents) if root in p.parents))):
        with suppress(OSError, ValueError, KeyError):
            allowed = int((place / limit).read_text(encoding="ascii"))  # "max" is no number
            lines = (place / statistics).read_text(encoding="ascii").splitlines()
            yield allowed - int(dict(line.split() for line in lines)[used])
