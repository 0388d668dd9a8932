"""`clover calibrate` and `clover build --calibration` as a user types them, and what they refuse."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrate_support import calibrated
from cli_support import clover, refused
from engine_support import NANO, bundle
from oracle_support import tiny_checkpoint
from safetensors.numpy import load_file, save_file

from clover.exporter.calibration import LEAST_ROWS, Calibration, load_calibration, save_calibration
from clover.exporter.safetensors_file import SafetensorsFile


def test_the_verb_calibrates_nano_for_a_build(tmp_path: Path) -> None:
    file, out = tmp_path / "p.jsonl", tmp_path / "c.safetensors"
    lines: list[Any] = [
        {"prompt": "Send UAV7 to Cedar, priority high."},
        {"messages": [{"role": "user", "content": "Weather for Oslo?"}, {"role": "assistant", "content": "Cold."},
                      {"role": "user", "content": "And Lima?"}]},
        {"text": "Alder Birch Cedar"},
        {"tokens": [5, 6, 7]},
    ]  # fmt: skip
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    arguments: list[str | Path] = [
        "calibrate",
        bundle(NANO).directory,
        "--prompts",
        file,
        "-o",
        out,
        "--max-new-tokens",
        "24",
        "--threads",
        "1",
    ]
    data = json.loads(clover(*arguments, "--json").stdout)
    assert data["recorded"]["prompts"] == 4 and data["recorded"]["rows"]["preview"] > 0
    found = load_calibration(out)
    assert data["sha256"] == found.sha256
    for x in data["layers"]:
        counts = found.statistics[f"layers.{x['layer']}.experts.down"].count
        assert x["rows"] == counts.tolist() and sum(x["rows"]) == 2 * sum(data["recorded"]["rows"].values())
        assert x["never"] == np.flatnonzero(counts == 0).tolist()
        assert x["rare"] == np.flatnonzero((counts > 0) & (counts < LEAST_ROWS)).tolist()
    assert any(x["rare"] or x["never"] for x in data["layers"])
    assert "already exists" in refused(clover(*arguments))
    shown = clover(*arguments, "--force", "--mode", "autoregressive")
    assert shown.exit_code == 0 and "4 prompts" in shown.stdout and "0 previewed" in shown.stdout
    assert "never hit" in shown.stdout and "weight-only" in shown.stdout
    built = clover("build", NANO, "-o", tmp_path / "b", "--int4", "--calibration", out, "--json")
    assert json.loads(built.stdout)["manifest"]["calibration"]["prompts"] == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "c.safetensors", "p.jsonl"], "nothing is left beside"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "a"}\n\n{broken', "line 3 is no JSON"),
        ('{"prompt": "a", "text": "b"}', "line 1 must be an object with one of"),
        ('{"tokens": [1, "x"]}', "line 1 must be"),
        ('{"tokens": []}', "line 1 holds no tokens"),
        ('{"text": "a"}\n{"tokens": [99999]}', "line 2 holds token 99999"),
        ('{"tokens": [3]}', "line 1"),
        (json.dumps({"tokens": [5] * 4096}), "line 1 has 4096 tokens and the context holds 4096"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": [{"role": 1}]}', "line 2"),
    ],
)
def test_prompts_that_can_not_be_run_are_refused_by_line(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    line = refused(clover("calibrate", bundle(NANO).directory, "--prompts", file, "-o", tmp_path / "c.safetensors"))
    assert told in line and f"--prompts {file}" in line
    assert [p.name for p in tmp_path.iterdir()] == ["p.jsonl"]


def test_other_mistakes_with_calibrate_are_sentences(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("Hello\n")
    nano = bundle(NANO).directory
    mistakes: list[tuple[list[str | Path], str]] = [
        ([nano, "--prompts", tmp_path / "none.txt", "-o", tmp_path / "c"], "No such file"),
        ([nano, "--prompts", file, "-o", tmp_path / "none" / "c"], "is not a directory"),
        ([nano, "--prompts", file, "-o", tmp_path], "is a directory"),
        ([nano, "--prompts", file, "-o", tmp_path / "c", "--mode", "quick"], "mode"),
        ([nano, "--prompts", file, "-o", tmp_path / "c", "--max-new-tokens", "0"], "max-new-tokens"),
        ([nano, "--prompts", file, "-o", tmp_path / "c", "--threads", "0"], "threads is 0"),
        ([bundle(tiny_checkpoint(2)).directory, "--prompts", file, "-o", tmp_path / "c"], "takes only `tokens`"),
        ([NANO, "--prompts", file, "-o", tmp_path / "c"], "is not a bundle"),
    ]
    for arguments, told in mistakes:
        assert told in refused(clover("calibrate", *arguments)), arguments
    assert [p.name for p in tmp_path.iterdir()] == ["p.txt"]


def test_a_full_disk_is_named_with_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("clover.engines.calibrate.record.save_calibration", full)
    (tmp_path / "p.txt").write_text("Hello\n")
    options: list[str | Path] = ["--prompts", tmp_path / "p.txt", "-o", tmp_path / "c", "--max-new-tokens", "1"]
    sentence = refused(clover("calibrate", bundle(NANO).directory, *options, "--json"))
    assert sentence.startswith(f"--out {tmp_path / 'c'} can't be written (No space left"), sentence
    assert not (tmp_path / "c").exists()


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def rewritten(**metadata: str) -> Callable[[Path], None]:
    """The same tensors under other metadata, as another program would write them."""

    def change(path: Path) -> None:
        save_file(load_file(path), path, {**SafetensorsFile(path).metadata, **metadata})

    return change


def without_a_matrix(path: Path) -> None:
    found = load_calibration(path)
    kept = {n: s for n, s in found.statistics.items() if n != "lm_head"}
    save_calibration(path, Calibration(kept, found.checkpoint, found.model, found.recorded))


def not_finite(path: Path) -> None:
    found = load_calibration(path)
    found.statistics["lm_head"].mean_square[0] = np.nan
    save_calibration(path, found)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (Path.unlink, "does not exist"),
        (flipped, "is damaged"),
        (cut, "is damaged"),
        (lambda path: path.write_text("{}"), "is damaged, or no calibration"),
        (lambda path: save_file({"a": np.zeros(1)}, path), "was not made by `clover calibrate`"),
        (rewritten(version="2"), "has format version 2"),
        (rewritten(checkpoint="0" * 64), "is damaged"),
        (without_a_matrix, "has nothing for lm_head"),
        (not_finite, "no numbers"),
    ],
)
def test_a_calibration_that_can_not_be_used_is_refused(
    change: Callable[[Path], Any], told: str, tmp_path: Path
) -> None:
    checkpoint, file = calibrated()[0], tmp_path / "c.safetensors"
    shutil.copyfile(calibrated()[1], file)
    change(file)
    line = refused(clover("build", checkpoint, "-o", tmp_path / "b", "--int4", "--calibration", file))
    assert told in line and f"--calibration {file}" in line
    assert not (tmp_path / "b").exists() and not (tmp_path / ".b.partial").exists()


def test_a_calibration_without_a_use_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint, file = calibrated()
    out: list[str | Path] = ["-o", tmp_path / "b", "--calibration", file]
    assert "recorded with another checkpoint" in refused(clover("build", tiny_checkpoint(3), *out))
    assert "--calibration acts on integer weights, and bf16 has none" in refused(
        clover("build", checkpoint, *out, "--bf16")
    )
    for precision in ("int8", "fp32,embed=int4"):
        assert "has nothing to act on" in refused(clover("build", checkpoint, *out, "--precision", precision))
    assert not (tmp_path / "b").exists()
