"""Room on the disk, asked for before it is needed, and writes that are complete."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from clover.runtime.errors import CloverError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_room(files: Mapping[Path, int], beside: int = 0) -> None:
    """Refuses, before the first byte is written, files (path → size) that don't fit together on their disk.

    What an earlier run has allocated for them counts as there; `beside` is what else will be written.
    """
    directories = {path.parent for path in files}
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    needed = beside + sum(max(0, size - held_bytes(path)) for path, size in files.items())
    for directory in directories:
        if needed > (free := shutil.disk_usage(directory).free):
            raise CloverError(
                f"{directory} has no room for {_names(files)}: {needed:,} more bytes are needed and {free:,} are free; "
                "make room or choose another output directory."
            )


def _names(files: Mapping[Path, int]) -> str:
    return " and ".join(path.name for path in files)


def held_bytes(path: Path) -> int:
    """Bytes that the disk has already given to a file or its partial."""
    held = 0
    for place in (path, path.with_name(path.name + ".partial")):
        with suppress(FileNotFoundError):
            stat = place.stat()
            held += getattr(stat, "st_blocks", 0) * 512 or stat.st_size
    return held


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):  # one write takes at most 2 GiB
        view = view[file.write(view[: 2**30]) :]


def allocate(file: BinaryIO, size: int) -> None:
    """Reserves the space, so that the disk is found full now and not after hours."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
            return
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
    file.truncate(size)


def sync_directory(directory: Path) -> None:
    """Makes a rename survive a power cut, where directories can be opened."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
