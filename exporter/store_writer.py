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
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from clover.exporter.disk import NO_ROOM, allocate, held_bytes, sync_directory, write_all
from clover.exporter.safetensors_file import NUMPY_DTYPES
from clover.exporter.store_layout import Entry, layout
from clover.runtime.errors import CloverError

CHUNK_BYTES = 2**20  # hashed at a time: stays in the cache


@dataclass(frozen=True)
class _Place:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int


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
        self._buffer = bytearray(CHUNK_BYTES)
        self._file: BinaryIO | None = None
        self._reader: FileIO | None = None
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
            sync_directory(self.path.parent)
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
        if self._size - held_bytes(self.path) > shutil.disk_usage(self.path.parent).free:
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
        write_all(self._journal, intact)
        return True

    def _start_over(self) -> None:
        assert self._file is not None and self._journal is not None
        # the journal goes first: it must never vouch for bytes of another file
        self._journal.seek(0)
        self._journal.truncate()
        self._file.truncate(0)
        allocate(self._file, self._size)
        self._put(0, memoryview(self._header))
        write_all(self._journal, self._journal_head())
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
        write_all(self._file, data)

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
        view = memoryview(self._buffer)
        while start < stop and (count := self._reader.readinto(view[: stop - start])):
            for digest in digests:
                digest.update(view[:count])
            start += count

    def _note(self, name: str, digest: str) -> None:
        # No fsync: a kill keeps what was written, and after a power cut the hashes tell what was lost.
        assert self._journal is not None
        note = {"name": name, "nbytes": self._places[name].nbytes, "sha256": digest}
        write_all(self._journal, json.dumps(note).encode() + b"\n")
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
