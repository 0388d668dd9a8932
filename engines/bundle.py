"""A bundle on disk: opened with every file's hash checked, published by renaming a finished directory."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from clover.engines.manifest import MANIFEST, FileEntry, Manifest, read_manifest
from clover.runtime.errors import BundleError

_CHUNK = 8 * 2**20


@dataclass(frozen=True)
class Bundle:
    """A verified bundle."""

    directory: Path
    manifest: Manifest

    @classmethod
    def open(cls, directory: str | Path, *, verify: bool = True) -> Bundle:
        """Reads the manifest and checks every file's size and, unless `verify` is False, its hash.

        Raises BundleError naming the first file that is missing, of another size or changed.
        """
        root = Path(directory)
        manifest = read_manifest(root)
        for name, entry in manifest.files.items():
            _check_file(root / name, entry, verify)
        return cls(root, manifest)

    @property
    def graph_bytes(self) -> bytes:
        return (self.directory / self.manifest.graph.file).read_bytes()

    @property
    def nbytes(self) -> int:
        """Bytes of all files the manifest lists."""
        return sum(entry.bytes for entry in self.manifest.files.values())


def _check_file(path: Path, entry: FileEntry, verify: bool) -> None:
    try:
        size = path.stat().st_size
    except OSError:
        raise BundleError(f"{path} is missing from the bundle; build the bundle again.") from None
    if size != entry.bytes:
        raise BundleError(f"{path} has {size} bytes instead of {entry.bytes}; build the bundle again.")
    if verify and hash_file(path) != entry.sha256:
        raise BundleError(f"{path} is damaged (its hash does not match the manifest); build the bundle again.")


def hash_file(path: Path) -> str:
    """sha256 of a file, in hex."""
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def file_entry(path: Path, sha256: str | None = None) -> FileEntry:
    """The manifest's entry for a file; `sha256` when it is already known."""
    return FileEntry(bytes=path.stat().st_size, sha256=sha256 or hash_file(path))


def publish(work: Path, out: Path, *, replace: bool) -> None:
    """Renames the finished directory `work` to `out`. A bundle that stood there before goes only after that."""
    if not out.exists():
        work.rename(out)
        return
    if not replace:
        raise BundleError(f"{out} already exists; give another path or --force to replace it.")
    old = out.with_name(f".{out.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    out.rename(old)
    work.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def check_output(out: Path, *, replace: bool) -> None:
    """Refuses an output path that would lose something. Raises BundleError."""
    if out.exists() and not replace:
        raise BundleError(f"{out} already exists; give another path or --force to replace it.")
    if out.exists() and not (out / MANIFEST).is_file():
        raise BundleError(f"{out} exists and is not a bundle, so --force will not replace it; give another path.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError(f"{out.parent} can't be created ({error.strerror}); give another path.") from None
