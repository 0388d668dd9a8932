"""Weights packed for the CPU: the same tokens from mapped files, and nothing foreign or damaged is ever used."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from oracle_support import tiny_checkpoint

from clover.engines import cpu_cache, cpu_memory, cpu_pack, verified
from clover.engines.build import BuildRequest, build_target
from clover.engines.bundle import Bundle
from clover.engines.open import open_session
from clover.engines.verified import hash_file
from clover.runtime.session import SequenceRows


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cpu-cache") / "bundle"
    build_target(BuildRequest(tiny_checkpoint(), out, precision="int4", group_size=32))
    return out


@pytest.fixture
def bundle(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A fresh copy of the bundle whose small weights are worth a cache, packed in several parts."""
    monkeypatch.setattr(cpu_cache, "MIN_BYTES", 1)
    monkeypatch.setattr(cpu_pack, "PART_BYTES", 100_000)
    monkeypatch.setattr(verified, "user_cache", lambda: tmp_path / "user")
    return Bundle.open(shutil.copytree(built, tmp_path / "bundle"))


class Decoded(NamedTuple):
    scores: bytes
    mapped: set[str]  # files of caches in this process's memory map


def decode(bundle: Bundle, **options: Any) -> Decoded:
    """Commits and previews a few rows."""
    session = open_session(bundle, max_context=64, **options)
    tokens = np.arange(3, 19, dtype=np.int64)
    scores = [
        session.step([SequenceRows(0, tokens, commit, np.arange(16))], candidates=5)[0].scores.tobytes()
        for commit in (16, 0, 8)
    ]
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    mapped = {line.split("/")[-1] for line in lines if f"/{cpu_cache.PREFIX}" in line}
    session.close()
    return Decoded(b"".join(scores), mapped)


def entry(bundle: Bundle) -> Path:
    (only,) = cpu_cache.cache_entries(bundle)
    return only.directory


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name != cpu_cache.STAMP}


def flip_byte(path: Path, *, keep_time: bool) -> None:
    """Changes one byte in the middle of the packed weights."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(times.st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    if keep_time:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def poison(directory: Path, name: str) -> None:
    """Zeros a file of an entry and makes the stamp agree: whole in itself, and wrong wherever it is used."""
    path = directory / name
    path.write_bytes(bytes(path.stat().st_size))
    stamp = json.loads((directory / cpu_cache.STAMP).read_text())
    stamp["files"][name] = {**cpu_cache._size_and_time(path), "sha256": hash_file(path)}
    del stamp["sha256"]
    (directory / cpu_cache.STAMP).write_text(json.dumps({**stamp, "sha256": cpu_cache._digest(stamp)}))


def test_packed_weights_are_mapped_and_give_the_same_scores(bundle: Bundle) -> None:
    plain = decode(bundle, cache=False)
    first = decode(bundle)
    written = (entry(bundle) / cpu_cache.STAMP).stat().st_mtime_ns
    again = decode(bundle)
    assert (entry(bundle) / cpu_cache.STAMP).stat().st_mtime_ns == written  # used, not made again
    assert first.scores == again.scores == plain.scores
    assert entry(bundle).parent.parent == bundle.directory
    parts = {p.name for p in entry(bundle).glob("part-*")}
    assert len(parts) > 1
    if sys.platform == "linux":
        assert not plain.mapped
        assert parts <= first.mapped and parts <= again.mapped


def test_every_quantised_product_is_packed_ahead(bundle: Bundle) -> None:
    import onnx

    decode(bundle)
    model = onnx.load_model(entry(bundle) / cpu_cache.MODEL, load_external_data=False)
    packed = {t.name for t in model.graph.initializer if any(e.key.startswith("prepacked") for e in t.external_data)}
    expected = {
        i for n in model.graph.node for i in n.input if n.op_type in ("MatMulNBits", "QMoE") and i.endswith(".qweight")
    }
    assert expected and expected <= packed


@pytest.mark.parametrize("keep_time", [True, False])
def test_a_damaged_entry_is_made_again(bundle: Bundle, keep_time: bool) -> None:
    plain = decode(bundle, cache=False).scores
    decode(bundle)
    before = contents(entry(bundle))
    for name in before:
        flip_byte(entry(bundle) / name, keep_time=keep_time)
        # times alone tell when a file was written to; a bit that rotted takes the hashes
        assert decode(bundle, verify=keep_time).scores == plain
        assert contents(entry(bundle)) == before


def test_a_copied_bundle_keeps_its_entry(bundle: Bundle, tmp_path: Path) -> None:
    decode(bundle)
    copy = Bundle.open(shutil.copytree(bundle.directory, tmp_path / "copy", copy_function=shutil.copyfile))
    stamp = (entry(copy) / cpu_cache.STAMP).stat().st_mtime_ns
    decode(copy)
    assert (entry(copy) / cpu_cache.STAMP).stat().st_mtime_ns == stamp


def test_weights_packed_for_another_cpu_are_not_used(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = decode(bundle, cache=False).scores
    with monkeypatch.context() as other:
        other.setattr(cpu_cache, "cpu_features", lambda: "sve sme")
        decode(bundle)
        foreign = entry(bundle)
        poison(foreign, "part-000.bin")
    assert decode(bundle).scores == plain
    entries = {e.directory: e.current for e in cpu_cache.cache_entries(bundle)}
    assert entries.pop(foreign) is False and list(entries.values()) == [True]

    # the same, under the name this machine looks for
    (mine,) = entries
    shutil.rmtree(mine)
    foreign.rename(mine)
    assert decode(bundle).scores == plain
    assert json.loads((mine / cpu_cache.STAMP).read_text())["identity"] == cpu_cache.cache_identity(bundle)
    assert any((mine / "part-000.bin").read_bytes())


def test_no_room_and_no_place_to_write_only_cost_memory(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = decode(bundle, cache=False).scores
    beside, users = cpu_cache.cache_roots(bundle)

    with monkeypatch.context() as full, caplog.at_level(logging.WARNING, "clover"):
        full.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
        assert decode(bundle).scores == plain
    assert len(caplog.records) == 1 and "no room" in caplog.text and "\n" not in caplog.messages[0]
    assert not cpu_cache.cache_entries(bundle) and not list(beside.glob("*"))

    def fail_late(*args: Any) -> bytes:
        (beside / cpu_cache.PARTIAL / "part-000.bin").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as failing:
        failing.setattr(cpu_pack, "pack_weights", fail_late)
        assert decode(bundle).scores == plain
    assert not list(beside.glob("*"))

    shutil.rmtree(beside)
    beside.write_text("in the way")  # as if the bundle were read-only
    assert decode(bundle).scores == plain
    assert entry(bundle).parent == users


def test_entries_are_few_and_can_be_cleared(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(cpu_cache.ENTRIES_KEPT + 1):
        monkeypatch.setattr(cpu_cache, "cpu_name", lambda n=n: f"CPU {n}")
        left = cpu_cache.cache_roots(bundle)[0] / cpu_cache.PARTIAL  # of a process that was killed
        left.mkdir(parents=True)
        (left / "part-000.bin").write_bytes(b"half")
        assert cpu_cache.packed_model(bundle)
        assert not left.exists()
    entries = cpu_cache.cache_entries(bundle)
    assert [e.cpu for e in entries] == ["CPU 2", "CPU 1"]
    assert cpu_cache.clear_cache(bundle) == sum(e.nbytes for e in entries) > 0
    assert not (bundle.directory / ".cache").exists()


def test_a_small_bundle_is_packed_at_every_load(built: Path) -> None:
    assert cpu_cache.packed_model(Bundle.open(built)) is None
    assert not (built / ".cache").exists()


def test_without_room_in_memory_weights_stay_as_they_are_stored(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither disk nor memory for packed weights: it still runs, and says why it is slow."""
    plain = np.frombuffer(decode(bundle, cache=False).scores, np.float32)
    monkeypatch.setattr(cpu_cache, "available_memory", lambda: 10)
    with caplog.at_level(logging.WARNING, "clover"):
        slow = np.frombuffer(decode(bundle, cache=False).scores, np.float32)
    assert len(caplog.records) == 1 and "0.0 GB are free" in caplog.text and "\n" not in caplog.messages[0]
    np.testing.assert_allclose(slow, plain, atol=0.05 * np.abs(plain).max())
    monkeypatch.undo()


def test_memory_left_is_the_least_of_machine_and_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    (tmp_path / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("5000\n")
    (group.parent / "memory.stat").write_text("file 4000\nanon 1500\n")
    (group / "memory.max").write_text("9000\n")
    (group / "memory.stat").write_text("anon 1000\n")
    assert list(cpu_memory._limits(tmp_path, "/a/b", "memory.max", "memory.stat", "anon")) == [8000, 3500]
    monkeypatch.setattr(cpu_memory, "_meminfo", lambda: 7000)
    monkeypatch.setattr(cpu_memory, "_group_limits", lambda: iter([8000, 3500, None]))
    assert cpu_memory.available_memory() == 3500
    monkeypatch.undo()
    if sys.platform == "linux":
        assert 0 < (cpu_memory.available_memory() or 0) < 2**50
