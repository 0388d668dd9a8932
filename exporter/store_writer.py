"""Writes one safetensors file whose shapes are known up front, tensor by tensor, and resumes after a kill.

Bytes go to `NAME.partial`; `NAME.journal` notes the hash of every finished tensor, so that a later run takes over
what is intact; `finish` renames the file into place. Nothing under the final name is ever incomplete.
"""

from __future__ import annotations

import bisect
import errno
import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from clover.exporter.safetensors_file import NUMPY_DTYPES
from clover.runtime.errors import CloverError

ALIGNMENT = 64
CHUNK_BYTES = 8 * 2**20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Entry(Protocol):
    """What the writer needs to know of a tensor. `dtype` is safetensors' name for it ("F32", "BF16", "U8")."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class StoreEntry:
    """One tensor of the file to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Place:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int


def layout(entries: Sequence[Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """(header bytes, name → (offset from the start of the file, size in bytes)).

    The format allows no holes between tensors. So those that are a multiple of 64 bytes come first, in the given
    order and all aligned to 64; the others follow from the most to the least divisible, each aligned to its dtype.
    """
    sizes = {e.name: math.prod(e.shape) * NUMPY_DTYPES[e.dtype].itemsize for e in entries}
    if len(sizes) != len(entries):
        raise ValueError("two entries have the same name")

    def divisor(entry: Entry) -> int:
        size = sizes[entry.name]
        return min(size & -size, ALIGNMENT) if size else ALIGNMENT

    ordered = sorted(entries, key=divisor, reverse=True)  # a stable sort
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset, starts = 0, {}
    for e in ordered:
        starts[e.name], end = offset, offset + sizes[e.name]
        header[e.name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    data = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {e.name: (data + starts[e.name], sizes[e.name]) for e in ordered}


def file_size(entries: Sequence[Entry], metadata: Mapping[str, str]) -> int:
    """Bytes of the finished file."""
    header, places = layout(entries, metadata)
    return max((offset + size for offset, size in places.values()), default=len(header))


def check_room(files: Mapping[Path, int], beside: int = 0) -> None:
    """Refuses, before the first byte is written, files (path → size) that don't fit together on their disk.

    What an earlier run has allocated for them counts as there; `beside` is what else will be written.
    """
    directories = {path.parent for path in files}
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    needed = beside + sum(max(0, size - _held(path)) for path, size in files.items())
    for directory in directories:
        if needed > (free := shutil.disk_usage(directory).free):
            raise CloverError(
                f"{directory} has no room for {_names(files)}: {needed:,} more bytes are needed and {free:,} are free; "
                "make room or choose another output directory."
            )


def _names(files: Mapping[Path, int]) -> str:
    return " and ".join(path.name for path in files)


def _held(path: Path) -> int:
    """Bytes that the disk has already given to a file or its partial."""
    held = 0
    for place in (path, path.with_name(path.name + ".partial")):
        with suppress(FileNotFoundError):
            stat = place.stat()
            held += getattr(stat, "st_blocks", 0) * 512 or stat.st_size
    return held


class StoreWriter:
    """A safetensors file in the making. May be written to from several threads.

    `metadata` should hold what the tensors were made from (the checkpoint's fingerprint, the precision): a partial
    file is resumed only when entries and metadata are the same, and started over otherwise.

    Raises CloverError when the disk has no room, or another process is writing the same file.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._partial = path.with_name(path.name + ".partial")
        self._journal_path = path.with_name(path.name + ".journal")
        self._header, places = layout(entries, metadata or {})
        self._places = {e.name: _Place(NUMPY_DTYPES[e.dtype], tuple(e.shape), *places[e.name]) for e in entries}
        self._at = {p.offset: name for name, p in self._places.items() if p.nbytes}
        self._size = max((p.offset + p.nbytes for p in self._places.values()), default=len(self._header))
        self._done: set[str] = set()
        self._parts: dict[str, list[tuple[int, int]]] = {}
        self._lock = threading.Lock()
        self._hash_lock = threading.Lock()
        self._digest, self._digested = hashlib.sha256(), 0  # of the file so far, and how far
        self._file: BinaryIO | None = None
        self._reader: BinaryIO | None = None
        self._journal: BinaryIO | None = None
        with self._disk_errors():
            self._open()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def size(self) -> int:
        """Bytes of the finished file."""
        return self._size

    def done(self, name: str) -> bool:
        """Whether the tensor is completely written (in this run, or in an earlier one whose bytes are intact)."""
        if name not in self._places:
            raise KeyError(name)
        return name in self._done

    def write(self, name: str, array: npt.NDArray[Any]) -> None:
        """Writes a whole tensor; nothing happens when it is done already."""
        if array.shape != self._places[name].shape:
            raise ValueError(f"{name} has shape {array.shape}, not {self._places[name].shape}")
        self.write_part(name, 0, array)

    def write_part(self, name: str, offset_elements: int, array: npt.NDArray[Any]) -> None:
        """Writes `array`'s elements at `offset_elements` of the flattened tensor, in any order, each place once."""
        place = self._places[name]
        if array.dtype != place.dtype:
            raise ValueError(f"{name} has dtype {array.dtype}, not {place.dtype}")
        start, stop = offset_elements, offset_elements + array.size
        elements = math.prod(place.shape)
        if start < 0 or stop > elements:
            raise ValueError(f"elements {start}:{stop} lie outside {name}, which has {elements}")
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        with self._lock, self._disk_errors():
            if name in self._done:
                return
            parts = self._parts.setdefault(name, [])
            at = bisect.bisect(parts, (start, stop))
            if (at and parts[at - 1][1] > start) or (at < len(parts) and parts[at][0] < stop):
                raise ValueError(f"elements {start}:{stop} of {name} are written twice")
            self._put(place.offset + start * place.dtype.itemsize, data)
            parts.insert(at, (start, stop))
            if sum(b - a for a, b in parts) != elements:
                return
        with self._hash_lock, self._disk_errors():  # other threads go on writing
            digest = self._hash_tensor(name)
            with self._lock:
                self._note(name, digest)
            self._catch_up()

    def finish(self) -> str:
        """Renames the complete file into place; its sha256 (hex). The writer is closed afterwards."""
        if missing := [name for name in self._places if name not in self._done]:
            raise ValueError(f"{len(missing)} tensors of {self.path} are not written, {missing[0]} among them")
        with self._disk_errors():
            if self._file is None:  # an earlier run got as far as the rename
                self._reader = self.path.open("rb", buffering=0)
            else:
                os.fsync(self._file.fileno())
            self._read(self._digested, self._size, self._digest)
            self.close()
            if self._partial.exists():
                self._partial.replace(self.path)
            _sync_directory(self.path.parent)
            self._journal_path.unlink(missing_ok=True)
        return self._digest.hexdigest()

    def close(self) -> None:
        """Closes the files and leaves them for a later run to resume. Harmless when closed already."""
        for file in (self._file, self._reader, self._journal):
            if file is not None:
                file.close()
        self._file = self._reader = self._journal = None

    # -- opening and resuming ------------------------------------------------------------------

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._is_complete():
            self._done = set(self._places)
            self._partial.unlink(missing_ok=True)
            return
        self._check_room()
        self._file = self._partial.open("r+b" if self._partial.exists() else "w+b", buffering=0)
        try:
            self._lock_file()
            self._reader = self._partial.open("rb", buffering=0)
            self.path.unlink(missing_ok=True)  # made from something else
            self._journal = self._journal_path.open("r+b" if self._journal_path.exists() else "w+b", buffering=0)
            if not self._resume():
                self._start_over()
            self._digest.update(self._header)
            self._digested = len(self._header)
            self._catch_up()
        except BaseException:
            self.close()
            raise

    def _is_complete(self) -> bool:
        """Whether the final file is there, with this very header."""
        try:
            with self.path.open("rb") as file:
                return os.fstat(file.fileno()).st_size == self._size and file.read(len(self._header)) == self._header
        except FileNotFoundError:
            return False

    def _check_room(self) -> None:
        if self._size - _held(self.path) > shutil.disk_usage(self.path.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _lock_file(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows, where nothing like it is released at a kill
            return
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CloverError(
                f"{self._partial} is being written by another process; wait for it or choose another output directory."
            ) from None
        except OSError:  # a file system without locks
            return

    def _resume(self) -> bool:
        """Takes over the tensors that the journal vouches for and whose bytes agree. False: nothing to resume."""
        assert self._file is not None and self._journal is not None
        if os.fstat(self._file.fileno()).st_size != self._size:
            return False
        self._file.seek(0)
        if self._file.read(len(self._header)) != self._header:
            return False
        lines = self._journal.read().splitlines(keepends=True)
        if not lines or lines[0] != self._journal_head():
            return False
        intact = lines[0]
        for line in lines[1:]:
            try:  # the last line may be torn
                note = json.loads(line)
                name, digest = note["name"], note["sha256"]
                if line.endswith(b"\n") and self._hash_tensor(name) == digest:
                    self._done.add(name)
                    intact += line
            except (ValueError, KeyError, TypeError):
                break
        self._journal.seek(0)
        self._journal.truncate()
        _write_all(self._journal, intact)
        return True

    def _start_over(self) -> None:
        assert self._file is not None and self._journal is not None
        # the journal goes first: it must never vouch for bytes of another file
        self._journal.seek(0)
        self._journal.truncate()
        self._file.truncate(0)
        _allocate(self._file, self._size)
        self._put(0, memoryview(self._header))
        _write_all(self._journal, self._journal_head())
        for name, place in self._places.items():
            if not place.nbytes:
                self._note(name, hashlib.sha256().hexdigest())

    def _journal_head(self) -> bytes:
        return json.dumps({"header": hashlib.sha256(self._header).hexdigest()}).encode() + b"\n"

    # -- bytes ---------------------------------------------------------------------------------

    def _put(self, offset: int, data: memoryview) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is closed")
        self._file.seek(offset)
        _write_all(self._file, data)

    def _hash_tensor(self, name: str) -> str:
        """A tensor's hash; the file's own goes along when it has come to this tensor, so that both take one reading."""
        place, digest = self._places[name], hashlib.sha256()
        along = [self._digest] if self._digested == place.offset else []
        self._read(place.offset, place.offset + place.nbytes, digest, *along)
        if along:
            self._digested += place.nbytes
        return digest.hexdigest()

    def _catch_up(self) -> None:
        """Takes the file's hash as far as the tensors are done."""
        while (name := self._at.get(self._digested)) is not None and name in self._done:
            self._read(self._digested, self._digested + self._places[name].nbytes, self._digest)
            self._digested += self._places[name].nbytes

    def _read(self, start: int, stop: int, *digests: Any) -> None:
        """Feeds bytes of the file to `digests`."""
        if self._reader is None:
            raise ValueError(f"{self.path} is closed")
        self._reader.seek(start)
        while start < stop and (chunk := self._reader.read(min(stop - start, CHUNK_BYTES))):
            for digest in digests:
                digest.update(chunk)
            start += len(chunk)

    def _note(self, name: str, digest: str) -> None:
        # No fsync: a kill keeps what was written, and after a power cut the hashes tell what was lost.
        assert self._journal is not None
        note = {"name": name, "nbytes": self._places[name].nbytes, "sha256": digest}
        _write_all(self._journal, json.dumps(note).encode() + b"\n")
        self._parts.pop(name, None)
        self._done.add(name)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise CloverError(f"{self._partial} can't be written ({error.strerror}).") from None
            free = shutil.disk_usage(self.path.parent).free
            raise CloverError(
                f"{self.path.parent} has no room for {self.path.name}: it needs {self._size:,} bytes and {free:,} are "
                "free; make room or choose another output directory, then run the same command again."
            ) from None


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):  # one write takes at most 2 GiB
        view = view[file.write(view[: 2**30]) :]


def _allocate(file: BinaryIO, size: int) -> None:
    """Reserves the space, so that the disk is found full now and not after hours."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
            return
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
    file.truncate(size)


def _sync_directory(directory: Path) -> None:
    """Makes a rename survive a power cut, where directories can be opened."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
