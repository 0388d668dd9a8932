"""write_weights: the same bytes however it is run or interrupted, and one clear sentence when it can't be done."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle_support import tiny_checkpoint
from safetensors.numpy import load_file, save_file

from clover.engines.build import BuildRequest, build_target
from clover.exporter import weights
from clover.exporter.checkpoint import Checkpoint
from clover.exporter.precision import plan_precision
from clover.exporter.quantize import quantize_int4
from clover.exporter.safetensors_file import SafetensorsFile
from clover.exporter.store_plan import store_plan
from clover.exporter.weights import row_blocks, write_weights
from clover.runtime.errors import CheckpointError, CloverError

# Writes argv[1]'s weights into argv[2], and prints `+` for every piece of a tensor that it writes.
WRITER = """
import os, sys
from pathlib import Path
from clover.exporter.checkpoint import Checkpoint
from clover.exporter.precision import plan_precision
from clover.exporter.store_plan import store_plan
from clover.exporter.store_writer import StoreWriter
from clover.exporter.weights import write_weights
write = StoreWriter.write_part
def write_part(self, *arguments):
    write(self, *arguments)
    os.write(1, b"+\\n")
StoreWriter.write_part = write_part
checkpoint = Checkpoint.open(sys.argv[1])
items = store_plan(checkpoint.config, plan_precision(checkpoint.config, "int4"))
write_weights(checkpoint, items, Path(sys.argv[2]))
"""


def write(checkpoint: Checkpoint, out: Path, precision: Any = "int4", **options: Any) -> dict[str, str]:
    items = store_plan(checkpoint.config, plan_precision(checkpoint.config, precision))
    return write_weights(checkpoint, items, out, **options)


def hashes(directory: Path) -> dict[str, str]:
    files = (p for p in directory.rglob("*") if p.is_file())
    return {p.relative_to(directory).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def write_and_kill(checkpoint: Path, out: Path, after: int | None) -> int:
    """Runs WRITER, sends SIGKILL once `after` pieces are written; the number of pieces that it reported."""
    command = [sys.executable, "-c", WRITER, str(checkpoint), str(out)]
    pieces = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for _ in child.stdout:
            pieces += 1
            if pieces == after:
                child.send_signal(signal.SIGKILL)
    assert child.returncode in (0, -signal.SIGKILL)
    return pieces if child.returncode else -pieces


@pytest.mark.skipif(os.name != "posix", reason="sends SIGKILL")
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_the_store_ends_the_same(kills: int, tmp_path: Path) -> None:
    """The kill comes from outside while two threads read, quantise, write and hash, so it may fall anywhere."""
    checkpoint = tiny_checkpoint(0)
    whole = -write_and_kill(checkpoint, tmp_path / "whole", None)
    expected = hashes(tmp_path / "whole")
    assert whole > 100 and set(expected) == {"weights/dense.safetensors", "weights/experts.safetensors"}
    rng = random.Random(kills)
    killed, written = 0, 0
    while killed < kills:
        pieces = write_and_kill(checkpoint, tmp_path / "out", rng.randint(1, max(2, whole // kills)))
        written += abs(pieces)
        killed += pieces > 0
        if pieces <= 0:  # it was done; begin another store
            assert hashes(tmp_path / "out") == expected
            shutil.rmtree(tmp_path / "out")
            written = 0
    rest = -write_and_kill(checkpoint, tmp_path / "out", None)
    assert 0 <= rest <= whole
    assert hashes(tmp_path / "out") == expected


@pytest.mark.parametrize("layout", ["fused", "per_expert"])
def test_workers_change_nothing_and_every_row_is_quantised_by_itself(
    layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    checkpoint = Checkpoint.open(tiny_checkpoint(layout=layout, dtype=torch.bfloat16))
    found = write(checkpoint, tmp_path / "0")
    monkeypatch.setattr(weights, "WORKERS", 5)
    monkeypatch.setattr(weights, "WEIGHTS_AT_ONCE", 200)
    assert write(checkpoint, tmp_path / "1") == found == hashes(tmp_path / "1")
    plan = plan_precision(checkpoint.config, "int4")
    for item in store_plan(checkpoint.config, plan):
        if item.precision != "int4":
            continue
        file = SafetensorsFile(tmp_path / "0" / item.file)
        values, scales = (file.read(f"{item.name}.{part}") for part in ("qweight", "scales"))
        for first, block in row_blocks(checkpoint, item):  # float32, rows in the store's order
            rows = slice(first, first + len(block))
            signed = item.tensor_class == "experts"  # the others' engines may take no negative scales
            packed, expected = quantize_int4(block, plan.group_size, signed_scales=signed)
            np.testing.assert_array_equal(values.reshape(-1, packed.shape[1])[rows], packed)
            np.testing.assert_array_equal(scales.reshape(-1, expected.shape[1])[rows], expected)
        assert (scales.min() < 0) == (item.tensor_class == "experts")


def test_room_is_asked_for_the_whole_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either file fits alone, both together do not."""
    checkpoint = Checkpoint.open(tiny_checkpoint(0))
    write(checkpoint, tmp_path / "whole")
    sizes = [p.stat().st_size for p in (tmp_path / "whole" / "weights").iterdir()]
    free = sum(sizes) - 1
    assert all(size < free for size in sizes)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    says = rf"no room for dense\.safetensors and experts\.safetensors: {sum(sizes):,} more bytes are needed and {free:,} are"
    with pytest.raises(CloverError, match=says):
        write(checkpoint, tmp_path / "out")
    assert not hashes(tmp_path / "out")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free + 1))
    assert write(checkpoint, tmp_path / "out") == hashes(tmp_path / "out")
    with pytest.raises(CloverError, match="no room"):
        write(checkpoint, tmp_path / "other", beside=2)
    with pytest.raises(CloverError, match=r"no room .* 6[67],\d{3},\d{3} more bytes"):
        build_target(BuildRequest(tiny_checkpoint(0), tmp_path / "bundle"))


def copy_of(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def appended(shard: Path) -> None:
    with shard.open("ab") as file:
        file.write(b"x")


def replaced(shard: Path) -> None:
    other = shard.with_name("other")
    shutil.copyfile(shard, other)
    os.utime(other, ns=(0, 1))
    other.replace(shard)


def overwritten(shard: Path) -> None:
    state = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(state.st_atime_ns, state.st_mtime_ns + 1))


@pytest.mark.parametrize("change", [appended, replaced, overwritten])
def test_a_shard_that_changes_meanwhile(change: Callable[[Path], None], tmp_path: Path) -> None:
    source = copy_of(tiny_checkpoint(0), tmp_path / "source")
    changed: list[Path] = []

    def progress(*_: Any) -> None:
        if not changed:
            changed.append(max(source.glob("*.safetensors")))  # the one read last
            change(changed[0])

    with pytest.raises(CheckpointError, match=r"00002.safetensors was changed while it was read; wait until"):
        build_target(BuildRequest(source, tmp_path / "out" / "bundle"), progress)
    assert not any((tmp_path / "out").iterdir())


def test_dtypes_may_be_mixed_and_eight_bit_floats_are_refused(tmp_path: Path) -> None:
    """float16, bfloat16, float32 and float64 side by side are the numbers that they stand for."""
    source = copy_of(tiny_checkpoint(0, shards=1), tmp_path / "source")
    shard = next(source.glob("*.safetensors"))
    tensors = load_file(shard)
    dtypes: list[Any] = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
    mixed = {name: t.astype(dtypes[i % 4]) for i, (name, t) in enumerate(tensors.items())}
    save_file(mixed, shard)
    found = write(Checkpoint.open(source), tmp_path / "mixed", "fp32")
    save_file({name: t.astype(np.float32) for name, t in mixed.items()}, shard)
    plain = write(Checkpoint.open(source), tmp_path / "plain", "fp32")
    for file in found:
        a, b = (load_file(tmp_path / place / file) for place in ("mixed", "plain"))
        assert a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)
    assert found.keys() == plain.keys()

    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name = next(n for n in header if n.endswith("down_proj"))
    begin, end = header[name]["data_offsets"]
    header[name].update(dtype="F8_E4M3", shape=[*header[name]["shape"][:-1], (end - begin) // (16 * 64)])
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(CheckpointError, match=rf"{name} has dtype F8_E4M3, not one of .*; use the BF16 checkpoint"):
        build_target(BuildRequest(source, tmp_path / "bundle"))
    assert not (tmp_path / "bundle").exists()
