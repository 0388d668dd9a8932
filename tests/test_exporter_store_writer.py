from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from clover.exporter import disk, store_writer
from clover.exporter.safetensors_file import NUMPY_DTYPES, SafetensorsFile
from clover.exporter.store_layout import StoreEntry, layout
from clover.exporter.store_writer import StoreWriter
from clover.runtime.errors import CloverError

ENTRIES = [
    StoreEntry("bias", "F32", (3,)),
    StoreEntry("dense", "BF16", (16, 64)),
    StoreEntry("experts", "U8", (8, 128)),
    StoreEntry("odd", "U8", (7,)),
    StoreEntry("scales", "F32", (8, 32)),
    StoreEntry("empty", "F32", (0, 4)),
]
META = {"fingerprint": "abc"}


def value(entry: StoreEntry) -> npt.NDArray[np.generic]:
    rng = np.random.default_rng(sum(entry.name.encode()))
    return rng.integers(0, 200, entry.shape).astype(NUMPY_DTYPES[entry.dtype])


def write_all(writer: StoreWriter, entries: Sequence[StoreEntry] = ENTRIES) -> str:
    for entry in entries:
        if not writer.done(entry.name):
            writer.write(entry.name, value(entry))
    return writer.finish()


def check(path: Path, digest: str) -> None:
    """The file is what was meant, for the safetensors library as well as for ours."""
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    file = SafetensorsFile(path)
    with safe_open(path, "np") as other:
        assert other.metadata() == META
        assert set(other.keys()) == {e.name for e in ENTRIES}
        for entry in ENTRIES:
            np.testing.assert_array_equal(file.read(entry.name), value(entry))
            if entry.dtype != "BF16":
                np.testing.assert_array_equal(other.get_tensor(entry.name), value(entry))


def test_tensors_come_back_aligned(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    check(path, write_all(StoreWriter(path, ENTRIES, META)))
    offsets = {name: info.offset for name, info in SafetensorsFile(path).tensors.items()}
    assert all(offsets[name] % 64 == 0 for name in ("dense", "experts", "scales"))
    assert offsets["bias"] % 4 == 0
    # a file that is complete is recognised, not written again
    before = path.stat().st_mtime_ns
    (tmp_path / "a.safetensors.journal").write_text("left by a kill right after the rename")
    with StoreWriter(path, ENTRIES, META) as again:
        assert all(again.done(e.name) for e in ENTRIES)
        assert again.finish() == hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.stat().st_mtime_ns == before
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(NUMPY_DTYPES)), st.lists(st.integers(0, 40), max_size=3)), max_size=8))
def test_any_layout_is_dense_and_aligned_to_the_dtype(shapes: list[tuple[str, list[int]]]) -> None:
    entries = [StoreEntry(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(shapes)]
    header, places = layout(entries, {})
    assert len(header) % 64 == 0
    position = len(header)
    for offset, nbytes in places.values():
        assert offset == position
        position += nbytes
    for entry in entries:
        offset, nbytes = places[entry.name]
        assert offset % NUMPY_DTYPES[entry.dtype].itemsize == 0
        assert offset % 64 == 0 or nbytes % 64


def test_parts_in_any_order_from_several_threads(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    writer = StoreWriter(path, ENTRIES, META)
    whole = value(ENTRIES[2])
    order = list(range(8))
    random.Random(0).shuffle(order)

    def write_rows(rows: list[int]) -> None:
        for row in rows:
            writer.write_part("experts", row * 128, whole[row])

    threads = [
        threading.Thread(target=write_rows, args=(order[:3],)),
        threading.Thread(target=write_rows, args=(order[3:7],)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not writer.done("experts")
    with pytest.raises(ValueError, match="written twice"):
        writer.write_part("experts", order[0] * 128 + 5, whole[0, :1])
    writer.write_part("experts", order[7] * 128, whole[order[7]])
    assert writer.done("experts")
    check(path, write_all(writer))


def test_wrong_arrays_are_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "a.safetensors", ENTRIES, META) as writer:
        for name, array in (
            ("bias", np.zeros(4, np.float32)),
            ("bias", np.zeros(3, np.float64)),
            ("dense", np.zeros((64, 16), ml_dtypes.bfloat16)),
        ):
            with pytest.raises(ValueError, match=name):
                writer.write(name, array)
        with pytest.raises(ValueError, match="lie outside"):
            writer.write_part("bias", 2, np.zeros(2, np.float32))
        with pytest.raises(ValueError, match="are not written"):
            writer.finish()
    assert not (tmp_path / "a.safetensors").exists()


def test_resume_takes_over_intact_tensors_only(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with StoreWriter(path, ENTRIES, META) as writer:
        for name in ("bias", "dense", "scales"):
            writer.write(name, value(next(e for e in ENTRIES if e.name == name)))
        writer.write_part("experts", 0, value(ENTRIES[2])[0])
        offset = layout(ENTRIES, META)[1]["dense"][0]
    partial, journal = tmp_path / "a.safetensors.partial", tmp_path / "a.safetensors.journal"
    with partial.open("r+b") as file:  # what a power cut may leave
        file.seek(offset + 100)
        file.write(b"\xff\xff")
    journal.write_bytes(journal.read_bytes() + b'{"name": "odd", "sha2')
    with StoreWriter(path, ENTRIES, META) as writer:
        assert {e.name for e in ENTRIES if writer.done(e.name)} == {"bias", "scales", "empty"}
        writer.write("bias", np.zeros(3, np.float32))  # done: left as it is
    with StoreWriter(path, ENTRIES, META) as writer:
        assert writer.done("scales")
        digest = write_all(writer)
    check(path, digest)


def test_other_contents_start_over(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with StoreWriter(path, ENTRIES, {"fingerprint": "other"}) as writer:
        writer.write("bias", value(ENTRIES[0]))
    with StoreWriter(path, ENTRIES[:-1], META) as writer:
        assert not writer.done("bias")
        write_all(writer, ENTRIES[:-1])
    with StoreWriter(path, ENTRIES, META) as writer:  # nor is a complete file of other contents kept
        assert not writer.done("bias")
        assert not path.exists()
        digest = write_all(writer)
    check(path, digest)


def test_a_full_disk_is_found_first_and_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(CloverError, match=r"no room for a\.safetensors: it needs [\d,]+ bytes and 1,000 are free"):
            StoreWriter(path, ENTRIES, META)
        assert not list(tmp_path.iterdir())
    with StoreWriter(path, ENTRIES, META) as writer:
        writer.write("bias", value(ENTRIES[0]))

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(store_writer, "write_all", full)
            with pytest.raises(CloverError, match="no room"):
                writer.write("dense", value(ENTRIES[1]))
        assert not writer.done("dense")
    with StoreWriter(path, ENTRIES, META) as writer:
        assert writer.done("bias")
        digest = write_all(writer)
    check(path, digest)


@pytest.mark.skipif(os.name != "posix", reason="no file locks")
def test_two_writers_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with (
        StoreWriter(path, ENTRIES, META),
        pytest.raises(CloverError, match="written by another process"),
    ):
        StoreWriter(path, ENTRIES, META)


def write_in_a_child_killed_at(step: int, path: Path) -> int:
    """Wait status of a process that gets SIGKILL amid its n-th write, or right before or after another n-th step."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    left, write = step, disk.write_all

    def count() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def half_way(file: BinaryIO, data: bytes | memoryview) -> None:
        view = memoryview(data)
        file.write(view[: len(view) // 2])
        count()
        write(file, view[len(view) // 2 :])

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            count()
            result = function(*args, **kwargs)
            count()
            return result

        return inner

    try:  # patched for good: this process ends here
        pytest.MonkeyPatch().setattr(store_writer, "write_all", half_way)
        for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
            setattr(owner, name, around(getattr(owner, name)))
        write_all(StoreWriter(path, ENTRIES, META))
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.skipif(os.name != "posix", reason="forks and sends SIGKILL")
def test_kill_at_any_step_leaves_no_final_file_or_a_whole_one(tmp_path: Path) -> None:
    reference = write_all(StoreWriter(tmp_path / "reference" / "a.safetensors", ENTRIES, META))
    kept = []
    for step in range(100):
        path = tmp_path / str(step) / "a.safetensors"
        status = write_in_a_child_killed_at(step, path)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            check(path, reference)
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        whole = path.exists()
        assert not whole or hashlib.sha256(path.read_bytes()).hexdigest() == reference
        with StoreWriter(path, ENTRIES, META) as writer:
            kept.append(sum(writer.done(e.name) for e in ENTRIES))
            assert not whole or kept[-1] == len(ENTRIES)
            check(path, write_all(writer))
    assert len(kept) > 15
    assert set(range(1, len(ENTRIES) + 1)) <= set(kept)  # whatever was finished is kept
