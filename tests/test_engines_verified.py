"""Hashes of large files are checked once, and again after anything has written to the file."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_support import NANO, bundle
from typer.testing import CliRunner

from clover.cli import app
from clover.engines import verified
from clover.engines.bundle import Bundle, Verify
from clover.engines.cpu_cache import clear_cache
from clover.runtime.errors import BundleError

EXPERTS = "weights/experts.safetensors"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The bundle's files that are read for their hash, every one being large enough to be noted."""
    read: list[Path] = []

    def count(path: Path) -> str:
        read.append(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(verified, "hash_file", count)
    monkeypatch.setattr(verified, "MIN_BYTES", 1)
    monkeypatch.setattr(verified, "user_cache", lambda: tmp_path / "user")
    return read


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    target = shutil.copytree(bundle(NANO, precision="int4").directory, tmp_path / "bundle")
    time.sleep(0.15)  # until a write could be told from the copy
    return target


def opened(directory: Path, hashed: list[Path], verify: Verify = True) -> set[str]:
    """Opens the bundle; returns the files of the manifest that were read for it."""
    hashed.clear()
    files = Bundle.open(directory, verify=verify).manifest.files
    return {name for name in files if directory / name in hashed}


def test_what_was_checked_is_not_read_again(copy: Path, hashed: list[Path], tmp_path: Path) -> None:
    every = set(Bundle.open(copy, verify=False).manifest.files)
    assert opened(copy, hashed) == every
    assert opened(copy, hashed) == set()
    assert opened(copy, hashed, "all") == every
    assert opened(copy, hashed, False) == set()
    again = shutil.copytree(copy, tmp_path / "again")  # with its notes, which are of other files
    assert opened(again, hashed) == every
    clear_cache(Bundle.open(copy, verify=False))
    assert not (copy / ".cache").exists()
    assert opened(copy, hashed) == every


def _flip(path: Path) -> None:
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as if never written to


def _swap(path: Path) -> None:
    spare = path.with_name("spare")
    shutil.copy2(path, spare)
    _flip(spare)
    spare.rename(path)


def _in_place(path: Path) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(status.st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("damage", [_flip, _swap, _in_place])
def test_any_write_is_noticed(damage: Callable[[Path], None], copy: Path, hashed: list[Path]) -> None:
    opened(copy, hashed)
    damage(copy / EXPERTS)
    with pytest.raises(BundleError, match=r"experts\.safetensors is damaged"):
        opened(copy, hashed)
    assert copy / EXPERTS in hashed
    with pytest.raises(BundleError, match=r"experts\.safetensors is damaged"):  # a failed check is no check
        opened(copy, hashed)


def test_a_touched_file_is_read_once_more(copy: Path, hashed: list[Path]) -> None:
    opened(copy, hashed)
    os.utime(copy / EXPERTS)
    time.sleep(0.15)
    assert opened(copy, hashed) == {EXPERTS}
    assert opened(copy, hashed) == set()


def test_a_file_of_this_very_moment_is_not_noted(copy: Path, hashed: list[Path]) -> None:
    """Its next write could bear the same time."""
    os.utime(copy / EXPERTS, ns=(0, time.time_ns() + 10**9))
    opened(copy, hashed)
    assert opened(copy, hashed) == {EXPERTS}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', "\x00"])
def test_damaged_notes_count_for_nothing(text: str, copy: Path, hashed: list[Path]) -> None:
    every = opened(copy, hashed)
    (copy / ".cache" / verified.RECEIPTS).write_text(text)
    assert opened(copy, hashed) == every
    assert opened(copy, hashed) == set()


def test_a_bundle_that_can_not_be_written_to_is_noted_elsewhere(copy: Path, hashed: list[Path], tmp_path: Path) -> None:
    (copy / ".cache").write_text("in the way")  # as if the bundle were read-only
    every = opened(copy, hashed)
    assert every and opened(copy, hashed) == set()
    assert list((tmp_path / "user").rglob(verified.RECEIPTS))


def test_inspect_verifies_what_was_checked_before(copy: Path, hashed: list[Path]) -> None:
    every = opened(copy, hashed)
    hashed.clear()
    result = CliRunner().invoke(app, ["inspect", str(copy), "--verify"])
    assert result.exit_code == 0 and "hashes: right, of every file" in result.stdout
    assert {copy / name for name in every} <= set(hashed)
    _flip(copy / EXPERTS)
    assert CliRunner().invoke(app, ["inspect", str(copy)]).exit_code == 0
    result = CliRunner().invoke(app, ["inspect", str(copy), "--verify", "--json"])
    assert result.exit_code == 2 and "experts.safetensors is damaged" in result.stderr
    result = CliRunner().invoke(app, ["inspect", str(NANO), "--verify"])
    assert result.exit_code == 2 and "--verify checks the hashes of a bundle's files" in result.stderr
