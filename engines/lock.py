"""A lock that dies with its process: one build at a time into one directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clover.runtime.errors import BundleError


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds the file `path` locked. Raises BundleError when another process holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            _lock(handle)
        except OSError:
            raise BundleError(f"another build is writing to {path.parent}; wait for it or give another path.") from None
        yield
    finally:
        os.close(handle)  # closing frees the lock


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
