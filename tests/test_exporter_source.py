"""Where a checkpoint may come from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_support import bundle
from oracle_support import tiny_checkpoint
from typer.testing import CliRunner, Result

from clover.cli import app
from clover.exporter.checkpoint import Checkpoint
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


# -- every verb that takes a checkpoint -------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, the hub out of reach."""
    constants = pytest.importorskip("huggingface_hub.constants")
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def cached_checkpoint(cache: Path, name: str = "org--name") -> Path:
    """The tiny checkpoint as the Hugging Face cache lays it out; returns its snapshot."""
    repository = cache / f"models--{name}"
    snapshot = repository / "snapshots" / "1a2b"
    for folder in (repository / "blobs", snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    for number, path in enumerate(sorted(tiny_checkpoint(2, layout="per_expert").iterdir())):
        blob = repository / "blobs" / f"{number:040x}"
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    (repository / "refs" / "main").write_text("1a2b")
    return snapshot


def verbs(checkpoint: str | Path, tmp_path: Path) -> dict[str, Result]:
    """What each verb says to a checkpoint, with the tiny model's bundle to compare with."""
    built = bundle(tiny_checkpoint(2, layout="per_expert"), precision="int4").directory
    commands: dict[str, list[Any]] = {
        "build": ["build", checkpoint, "-o", tmp_path / "out", "--int4"],
        "plan": ["plan", checkpoint, "--gpu", "cpu"],
        "inspect": ["inspect", checkpoint],
        "inspect --checkpoint": ["inspect", built, "--checkpoint", checkpoint],
        "validate --checkpoint": ["validate", built, "--checkpoint", checkpoint, "--no-trace"],
    }
    return {verb: CliRunner().invoke(app, [str(a) for a in [*line, "--json"]]) for verb, line in commands.items()}


def test_every_verb_takes_a_checkpoint_from_the_cache(hub: Path, tmp_path: Path) -> None:
    cached_checkpoint(hub)
    for verb, result in verbs("org/name", tmp_path).items():
        assert result.exit_code == 0, (verb, result.stderr, result.exception)
        assert json.loads(result.stdout), verb


@pytest.mark.parametrize("source", ["org/absent", "/nowhere/at/all", __file__])
def test_every_verb_says_the_same_when_there_is_none(source: str, hub: Path, tmp_path: Path) -> None:
    said = {}
    for verb, result in verbs(source, tmp_path).items():
        assert result.exit_code == 2 and not result.stdout, (verb, result.exception)
        (said[verb],) = result.stderr.strip().splitlines()
        assert source in said[verb]
    assert said["build"] == said["plan"]
    assert said["inspect --checkpoint"] == said["validate --checkpoint"]
    if source == "org/absent":  # a verb that only looks does not download 69 GB
        assert all("org/absent is no directory here" in sentence for sentence in said.values()), said
        assert "hub can't be reached" in said["plan"] and "run `hf download org/absent`" in said["inspect"]
        assert said["inspect"] == said["inspect --checkpoint"]


def test_a_plan_downloads_no_weights(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[dict[str, Any]] = []

    def download(repository: str, **options: Any) -> str:
        asked.append(options)
        return str(tiny_checkpoint(2))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for fetch in ("config", "all", "nothing"):
        assert resolve_source("org/name", fetch=fetch) == tiny_checkpoint(2)
    config, everything, nothing = asked
    assert not config["local_files_only"] and not any("safetensors" in p for p in config["allow_patterns"])
    assert not everything["local_files_only"] and "*.safetensors" in everything["allow_patterns"]
    assert nothing["local_files_only"]


@pytest.mark.parametrize("place", ["the hub's cache", "a local directory", "beside the shards"])
def test_an_unfinished_download_is_named(place: str, hub: Path, tmp_path: Path) -> None:
    """Missing shards, and the files that are still growing."""
    snapshot = cached_checkpoint(hub)
    shards = sorted(snapshot.glob("*.safetensors"))
    assert len(shards) > 1
    if place == "the hub's cache":
        directory = snapshot
        growing = shards[0].resolve().with_suffix(".incomplete")
        shards[0].resolve().rename(growing)
        shards[0].unlink()
    else:
        directory = shutil.copytree(snapshot, tmp_path / "local")
        folder = directory / ".cache" / "huggingface" / "download" if place == "a local directory" else directory
        folder.mkdir(parents=True, exist_ok=True)
        growing = folder / f"{shards[0].name}.incomplete"
        (directory / shards[0].name).rename(growing)
    with pytest.raises(CheckpointError, match=f"1 of {len(shards)} shards .* a download is unfinished") as error:
        Checkpoint.open(directory)
    assert shards[0].name in str(error.value) and growing.name in str(error.value) and "\n" not in str(error.value)
