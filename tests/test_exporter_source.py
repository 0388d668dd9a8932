"""Where a checkpoint may come from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clover.exporter.source import resolve_source
from clover.runtime.errors import CheckpointError


def cached_repository(root: Path, *snapshots: str, main: str | None = None) -> Path:
    """A repository as the Hugging Face cache lays it out: snapshots of symlinks into blobs."""
    repository = root / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "abc").write_text("{}")
    for name in snapshots:
        folder = repository / "snapshots" / name
        folder.mkdir(parents=True)
        (folder / "config.json").symlink_to(repository / "blobs" / "abc")
    if main:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(main)
    return repository


def test_a_directory_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_source(tmp_path) == tmp_path


def test_a_cached_repository_is_its_main_snapshot(tmp_path: Path) -> None:
    repository = cached_repository(tmp_path, "one", "two", main="two")
    assert resolve_source(repository) == repository / "snapshots" / "two"


def test_a_cached_repository_with_one_snapshot_needs_no_ref(tmp_path: Path) -> None:
    repository = cached_repository(tmp_path, "one")
    assert resolve_source(repository) == repository / "snapshots" / "one"


def test_which_snapshot_is_never_guessed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"one, two.*give one's path"):
        resolve_source(cached_repository(tmp_path, "one", "two"))


@pytest.mark.parametrize("source", ["/nowhere/at/all", "nowhere", "../x/y"])
def test_what_is_not_there_is_said(source: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_source(source)


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_source(tmp_path / "file")


def test_offline_a_hub_name_is_one_sentence(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom clover.exporter.source import resolve_source\nfrom clover.runtime.errors import CheckpointError\n"
        "try: resolve_source('org/name')\nexcept CheckpointError as e: print(e)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    shown = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "not in the Hugging Face cache" in shown.stdout and "\n" not in shown.stdout.strip()
