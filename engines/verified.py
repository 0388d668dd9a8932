"""Which large files of a bundle have been checked against their hashes, so that not every load reads all of them.

A file counts as checked while it is the same file (device, inode), of the same size and times of change as when its
bytes were hashed. Whatever writes to it through the file system changes one of these: the time of the inode's last
change can't be set back. What they do not tell is a bit that rotted on the disk; `recheck` hashes all files again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from clover.engines.manifest import MANIFEST

RECEIPTS = "verified.json"
MIN_BYTES = 64 * 2**20  # smaller files are hashed at every load: 0.04 s and less
CHUNK = 8 * 2**20


def hash_file(path: Path) -> str:
    """sha256 of a file, in hex."""
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def damaged_file(directory: Path, files: Mapping[Path, str], *, recheck: bool = False) -> Path | None:
    """The first of `files` (path: its sha256) whose bytes are others, None when all are right. `directory`: the bundle's,
    beside which the checks are noted. `recheck`: also hash what has been checked and not changed since.

    Raises OSError when a file can't be read.
    """
    noted = {} if recheck else _read(directory)
    before = {path: path.stat() for path in files}
    doubtful = [p for p, sha256 in files.items() if noted.get(_key(p)) != [sha256, *_identity(before[p])]]
    begun = time.time_ns()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, sha256 in zip(doubtful, pool.map(hash_file, doubtful), strict=True):
            if sha256 != files[path]:
                return path
    note_checked(directory, {p: files[p] for p in doubtful if _identity(p.stat()) == _identity(before[p])}, begun)
    return None


def note_checked(directory: Path, files: Mapping[Path, str], begun: int) -> None:
    """Notes that the bytes of `files` (path: sha256), read from the time `begun` in ns on, had these hashes."""
    checked = {}
    for path, sha256 in files.items():
        status = path.stat()
        if status.st_size >= MIN_BYTES and _settled(status, begun):
            checked[_key(path)] = [sha256, *_identity(status)]
    if checked:
        _write(directory, {**_read(directory), **checked})


def cache_roots(directory: Path) -> tuple[Path, ...]:
    """Where what is kept of a bundle may lie: beside its files, else in the user's cache directory."""
    roots = [directory.resolve() / ".cache"]
    with suppress(RuntimeError, KeyError, OSError):  # no home directory, no manifest
        roots.append(user_cache() / "clover" / hash_file(directory / MANIFEST)[:16])
    return tuple(roots)


def user_cache() -> Path:
    """The system's directory for what a program may lose."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path.home() / "AppData" / "Local"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _key(path: Path) -> str:
    return str(path.resolve())


def _identity(status: os.stat_result) -> list[int]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _settled(status: os.stat_result, now: int) -> bool:
    """Whether a write after `now` would show: the clock of the file system has ticked since the file's last change."""
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    tick = 2 * 10**9 if changed % 10**9 == 0 else 10**8  # whole seconds: a file system that keeps no more
    return now - changed > tick


def _read(directory: Path) -> dict[str, Any]:
    for root in cache_roots(directory):
        with suppress(OSError, ValueError):
            noted = json.loads((root / RECEIPTS).read_text(encoding="utf-8"))
            if isinstance(noted, dict):
                return noted
    return {}


def _write(directory: Path, noted: Mapping[str, Any]) -> None:
    """Notes what was checked where that can be written; else the next load checks again."""
    present = {path: identity for path, identity in noted.items() if Path(path).exists()}
    for root in cache_roots(directory):
        with suppress(OSError):
            root.mkdir(parents=True, exist_ok=True)
            partial = root / f"{RECEIPTS}.{os.getpid()}"
            partial.write_text(json.dumps(present, indent=1), encoding="utf-8")
            partial.replace(root / RECEIPTS)
            return
