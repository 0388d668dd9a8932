"""A bundle on disk: opened with every file's hash checked, published by renaming a finished directory."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clover.engines.lock import exclusive
from clover.engines.manifest import MANIFEST, FileEntry, Manifest, read_manifest
from clover.engines.verified import damaged_file, hash_file
from clover.runtime.errors import BundleError, CheckpointError

Verify = bool | Literal["all"]  # hashes of no file, of those not checked before or changed since, of every file


@dataclass(frozen=True)
class Bundle:
    """A verified bundle."""

    directory: Path
    manifest: Manifest

    @classmethod
    def open(cls, directory: str | Path, *, verify: Verify = True) -> Bundle:
        """Reads the manifest and checks every file's size and, unless `verify` is False, its hash. A large file that was
        checked before and has not been written to since is not read again, unless `verify` is "all".

        Raises BundleError naming the first file that is missing, of another size, changed, or laid in later.
        """
        root = Path(directory)
        manifest = read_manifest(root)
        for name, entry in manifest.files.items():
            _check_size(root / name, entry)
        if verify:
            _check_hashes(root, manifest, recheck=verify == "all")
        for path in root.glob("tokenizer/*.j*"):  # read by name, so one laid in later would count
            if path.relative_to(root).as_posix() not in manifest.files:
                raise BundleError(f"{path} is not part of the bundle; remove it, or build the bundle again with it.")
        return cls(root, manifest)

    @property
    def graph_bytes(self) -> bytes:
        return (self.directory / self.manifest.graph.file).read_bytes()

    @property
    def nbytes(self) -> int:
        """Bytes of all files the manifest lists."""
        return sum(entry.bytes for entry in self.manifest.files.values())


def _check_size(path: Path, entry: FileEntry) -> None:
    try:
        size = path.stat().st_size
    except OSError:
        raise BundleError(f"{path} is missing from the bundle; build the bundle again.") from None
    if size != entry.bytes:
        raise BundleError(f"{path} has {size} bytes instead of {entry.bytes}; build the bundle again.")


def _check_hashes(root: Path, manifest: Manifest, *, recheck: bool) -> None:
    files = {root / name: entry.sha256 for name, entry in manifest.files.items()}
    try:
        damaged = damaged_file(root, files, recheck=recheck)
    except OSError as error:
        raise BundleError(f"{error.filename or root} can't be read ({error.strerror}); check the disk.") from None
    if damaged:
        raise BundleError(f"{damaged} is damaged (its hash does not match the manifest); build the bundle again.")


def file_entry(path: Path, sha256: str | None = None) -> FileEntry:
    """The manifest's entry for a file; `sha256` when it is already known."""
    return FileEntry(bytes=path.stat().st_size, sha256=sha256 or hash_file(path))


@contextmanager
def working_directory(out: Path, *, replace: bool) -> Iterator[Path]:
    """`.NAME.partial` beside `out`, where a bundle grows; no other build works there meanwhile.

    It stays behind when the build is interrupted or the disk is full, for the next build to go on; a damaged
    checkpoint leaves nothing. Raises BundleError when it can't be written, or another build is at work.
    """
    work = out.with_name(f".{out.name}.partial")
    busy = f"another build is writing {out}; wait for it or give another path."
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(out.with_name(f".{out.name}.lock"), busy):
            check_output(out, replace=replace)  # another build may have finished since
            work.mkdir(exist_ok=True)
            (work / MANIFEST).unlink(missing_ok=True)  # so that it is no bundle until its last file is written
            try:
                yield work
            except CheckpointError:
                shutil.rmtree(work, ignore_errors=True)
                raise
    except OSError as error:
        where = error.filename or out
        raise BundleError(
            f"{where} can't be written ({error.strerror or error}); check permissions and space."
        ) from None


def publish(work: Path, out: Path, manifest: Manifest, *, replace: bool) -> None:
    """Renames the finished directory `work` to `out`, without what the manifest does not list.

    A bundle that stood at `out` is replaced in one step where the system can exchange two names (Linux).
    """
    listed = {MANIFEST, *manifest.files}
    for path in sorted(work.rglob("*"), reverse=True):
        if path.is_dir():
            with suppress(OSError):  # not empty
                path.rmdir()
        elif path.relative_to(work).as_posix() not in listed:
            path.unlink()
    Bundle.open(work, verify=False)
    old = out.with_name(f".{out.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    check_output(out, replace=replace)
    if not out.exists():
        work.rename(out)
    elif _exchange(work, out):
        work.rename(old)
    else:
        out.rename(old)
        work.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two names atomically (Linux's renameat2 with RENAME_EXCHANGE); False where that can't be done."""
    if sys.platform != "linux":
        return False
    import ctypes

    try:
        call = ctypes.CDLL(None).renameat2
    except AttributeError:  # an old C library
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(call(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0)


def check_output(out: Path, *, replace: bool) -> None:
    """Refuses an output path that would lose something. Raises BundleError."""
    if out.exists() and not replace:
        raise BundleError(f"{out} already exists; give another path or --force to replace it.")
    if out.exists() and not (out / MANIFEST).is_file():
        raise BundleError(f"{out} exists and is not a bundle, so --force will not replace it; give another path.")
