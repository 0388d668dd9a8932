"""Builds that are killed, meet each other, a full or read-only disk, or a bundle that stands there already.

Kills are real (SIGKILL in a process of its own), at file operations and between tensors, so that a machine's speed
plays no part.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_support import NANO
from oracle_support import tiny_checkpoint

from clover.engines import bundle as bundle_module
from clover.engines.build import BuildRequest, build_target
from clover.engines.bundle import Bundle
from clover.runtime.errors import BundleError, CheckpointError, CloverError

# Builds argv[1] into argv[2] at precision argv[3]; SIGKILLs itself at the operation argv[4] that concerns the output
# (0: never). Prints `- tensor` when one is begun and `+ tensor` when it is done; at the end the number of operations.
BUILDER = """
import itertools, os, signal, sys
from pathlib import Path
from clover.engines import build as b
from clover.exporter.store_writer import StoreWriter
checkpoint, out, precision, deadly = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
counter = itertools.count(1)
def step():
    if next(counter) == deadly:
        os.kill(os.getpid(), signal.SIGKILL)
def watch(event, args):
    if event.split(".")[0] in ("open", "os", "shutil", "ctypes") and any(str(out.parent) in str(a) for a in args[:2]):
        step()
write = StoreWriter.write_part
def write_part(self, name, offset, array):
    if not self.done(name):
        os.write(1, f"- {name}\\n".encode())
    write(self, name, offset, array)
    if self.done(name):
        os.write(1, f"+ {name}\\n".encode())
    step()
StoreWriter.write_part = write_part
sys.addaudithook(watch)
b.build_target(b.BuildRequest(checkpoint, out, precision=precision, replace=True))
os.write(1, f"= {next(counter)}\\n".encode())
"""


@dataclass
class Run:
    begun: set[str]
    done: set[str]
    operations: int  # 0: the build was killed


def builder(out: Path, deadly: int = 0) -> Run:
    """Builds a tiny checkpoint in a process of its own."""
    command = [sys.executable, "-c", BUILDER, str(tiny_checkpoint(0)), str(out), "int4", str(deadly)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines()]
    names = {mark: {name for m, name in lines if m == mark} for mark in "-+="}
    return Run(names["-"], names["+"], int(next(iter(names["="]), 0)))


def tree(directory: Path) -> dict[str, str]:
    """sha256 of every file."""
    files = (p for p in directory.rglob("*") if p.is_file())
    return {p.relative_to(directory).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def loads(directory: Path) -> bool:
    try:
        Bundle.open(directory)
    except BundleError:
        return False
    return True


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], int]:
    """An uninterrupted build: its files and its number of operations."""
    out = tmp_path_factory.mktemp("whole") / "bundle"
    run = builder(out)
    assert len(run.done) > 20 and run.operations > len(run.done)
    return tree(out), run.operations


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_build_goes_on_and_ends_the_same(seed: int, tmp_path: Path, whole: tuple[dict[str, str], int]) -> None:
    files, operations = whole
    out = tmp_path / "bundle"
    rng = random.Random(seed)
    done: set[str] = set()
    for _ in range(4):
        run = builder(out, deadly=rng.randrange(1, operations // 2))
        assert not run.begun & done, "a finished tensor was written again"
        done |= run.done
        if run.operations:
            break
        assert not out.exists() and not loads(out.with_name(".bundle.partial"))
    assert not builder(out).begun & done
    assert len(done) >= 5, "the kills came too early to mean anything"
    assert tree(out) == files and loads(out)
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_replacing_a_bundle_is_atomic(tmp_path: Path, whole: tuple[dict[str, str], int]) -> None:
    """Killed at any of its last operations, the build leaves the old bundle or the new one."""
    new, _ = whole
    out = tmp_path / "bundle"
    build_target(BuildRequest(tiny_checkpoint(0), out, precision="fp32"))
    old = tree(out)
    kept = tmp_path / "kept"
    shutil.copytree(out, kept)
    operations = builder(out).operations
    states = []
    for back in range(24, -1, -3):
        shutil.rmtree(out)
        shutil.copytree(kept, out)
        builder(out, deadly=operations - back)
        assert loads(out)
        states.append("old" if tree(out) == old else "new")
        assert tree(out) in (old, new)
    assert states[0] == "old" and states[-1] == "new"
    builder(out)
    assert tree(out) == new and {p.name for p in tmp_path.iterdir()} == {"bundle", "kept"}


def test_without_an_exchange_of_names_the_old_bundle_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "bundle"
    build_target(BuildRequest(tiny_checkpoint(0), out, precision="fp32"))
    monkeypatch.setattr(bundle_module, "_exchange", lambda a, b: False)
    build_target(BuildRequest(tiny_checkpoint(0), out, precision="bf16", replace=True))
    assert Bundle.open(out).manifest.precision_plan["experts"] == "bf16"
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_what_another_build_left_never_gets_into_a_bundle(tmp_path: Path) -> None:
    """A partial build of another checkpoint, precision and kind: its tensors, templates and manifest are not taken."""
    out, clean = tmp_path / "bundle", tmp_path / "clean"
    build_target(BuildRequest(NANO, clean, precision="fp32"))
    shutil.copytree(clean, tmp_path / ".bundle.partial")
    (tmp_path / ".bundle.partial" / "engines").mkdir()
    (tmp_path / ".bundle.partial" / "engines" / "old.engine").write_bytes(b"x")
    build_target(BuildRequest(tiny_checkpoint(0), out, precision="bf16"))
    shutil.rmtree(clean)
    build_target(BuildRequest(tiny_checkpoint(0), clean, precision="bf16"))
    assert tree(out) == tree(clean) and not (out / "engines").exists()
    assert set(tree(out)) == {"clover.json", *Bundle.open(out).manifest.files}


def test_two_builds_into_one_place(tmp_path: Path) -> None:
    """The second is refused while the first is at work, and the first is not disturbed."""
    out = tmp_path / "bundle"
    request = BuildRequest(tiny_checkpoint(0), out)
    refused: list[str] = []

    def second(what: str, done: int, total: int) -> None:
        with pytest.raises(BundleError) as error:
            build_target(request)
        refused.append(str(error.value))

    build_target(request, second)
    assert refused and set(refused) == {f"another build is writing {out}; wait for it or give another path."}
    assert loads(out) and [p.name for p in tmp_path.iterdir()] == ["bundle"]
    with pytest.raises(BundleError, match="already exists"):
        build_target(request)


def test_builds_started_together_leave_one_good_bundle(tmp_path: Path, whole: tuple[dict[str, str], int]) -> None:
    out = tmp_path / "bundle"
    command = [sys.executable, "-m", "clover.cli", "build", str(tiny_checkpoint(0)), "-o", str(out), "--int4"]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [(p.communicate()[1], p.returncode) for p in running]
    assert sorted(code for _, code in ends) in ([0, 2], [0, 0]), ends
    assert all("another build" in text or "already exists" in text for text, code in ends if code)
    assert tree(out) == whole[0] and [p.name for p in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("limit", [2_000, 200_000])
def test_a_full_disk_stops_a_build_that_goes_on_later(
    limit: int, tmp_path: Path, whole: tuple[dict[str, str], int]
) -> None:
    """The kernel refuses to let a file grow, as a full disk does."""
    out = tmp_path / "bundle"
    command = [sys.executable, "-m", "clover.cli", "build", str(tiny_checkpoint(0)), "-o", str(out), "--int4"]

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    full = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=small_files)
    assert full.returncode == 2 and "Traceback" not in full.stderr
    assert full.stderr.count("\n") == 1 and "has no room" in full.stderr
    assert not out.exists()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert tree(out) == whole[0]


@pytest.mark.parametrize("file", ["step.onnx", "clover.json"])
def test_a_disk_that_fills_up_late_leaves_no_bundle(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[dict[str, str], int]
) -> None:
    out = tmp_path / "bundle"

    def full(write: Callable[..., int]) -> Callable[..., int]:
        def wrapped(self: Path, *args: Any, **options: Any) -> int:
            if self.name == file:
                raise OSError(28, os.strerror(28), str(self))
            return write(self, *args, **options)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full(Path.write_bytes))
        patch.setattr(Path, "write_text", full(Path.write_text))
        with pytest.raises(BundleError, match="No space left"):
            build_target(BuildRequest(tiny_checkpoint(0), out))
    assert not out.exists() and not loads(tmp_path / ".bundle.partial")
    build_target(BuildRequest(tiny_checkpoint(0), out))
    assert tree(out) == whole[0]


def test_a_target_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    places = [tmp_path / "file" / "bundle", Path("/proc/clover-bundle"), tmp_path / ("n" * 250)]
    if os.getuid() != 0:  # permissions don't hold the superuser
        (tmp_path / "closed").mkdir(mode=0o500)
        places.append(tmp_path / "closed" / "bundle")
    for place in places:
        with pytest.raises(CloverError) as error:
            build_target(BuildRequest(tiny_checkpoint(0), place))
        assert "can't be written" in str(error.value)
    assert {p.name for p in tmp_path.iterdir()} <= {"file", "closed"}


def test_a_damaged_checkpoint_leaves_nothing_behind(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    source = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint(0), source)
    shard = max(source.glob("*.safetensors"))
    tensors = load_file(shard)
    tensors[max(tensors)].reshape(-1)[7] = float("nan")
    save_file(tensors, shard)
    with pytest.raises(CheckpointError, match="NaN"):
        build_target(BuildRequest(source, tmp_path / "out" / "bundle"))
    assert not any((tmp_path / "out").iterdir())


def test_an_output_path_may_be_a_link_or_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    build_target(BuildRequest(tiny_checkpoint(0), real))
    link.symlink_to(real)
    build_target(BuildRequest(tiny_checkpoint(0), link, precision="bf16", replace=True))
    assert link.is_symlink() and Bundle.open(real).manifest.precision_plan["experts"] == "bf16"
    monkeypatch.chdir(real)
    build_target(BuildRequest(tiny_checkpoint(0), Path(), precision="fp32", replace=True))
    assert Bundle.open(real).manifest.precision_plan["experts"] == "fp32"
    assert {p.name for p in tmp_path.iterdir()} == {"real", "link"}


def test_only_a_bundle_is_ever_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    for name in ("notes", "file"):
        with pytest.raises(BundleError, match="already exists"):
            build_target(BuildRequest(tiny_checkpoint(0), tmp_path / name))
        with pytest.raises(BundleError, match="is not a bundle"):
            build_target(BuildRequest(tiny_checkpoint(0), tmp_path / name, replace=True))
    assert set(tree(tmp_path)) == {"notes/diary.txt", "file"}
