"""A lock that dies with its process: one build at a time into one place."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clover.runtime.errors import BundleError


@contextmanager
def exclusive(path: Path, busy: str) -> Iterator[None]:
    """Holds the file `path` locked, and removes it in the end. Raises BundleError(busy) when another process holds it."""
    handle = _acquire(path, busy)
    try:
        yield
    finally:
        with suppress(OSError):  # Windows keeps open files
            path.unlink()
        os.close(handle)  # closing frees the lock


def _acquire(path: Path, busy: str) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle)
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except FileNotFoundError:
            pass  # its last holder has just removed it: what we hold locks nobody out
        except OSError:
            os.close(handle)
            raise BundleError(busy) from None
        os.close(handle)


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
