"""The verbs that look at things, as a user types them: exit codes, one clear sentence, JSON that parses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import clover, refused
from engine_support import NANO, bundle
from oracle_support import load_oracle, tiny_checkpoint

PROMPT, BLOCK = "5,6,7,8,9", ",".join(["319"] * 8)


def process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clover.cli", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


# -- logits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt", ["", PROMPT, ",".join(str(i % 300) for i in range(300))], ids=["none", "short", "chunked"]
)
def test_logits_are_the_oracles(tmp_path: Path, prompt: str) -> None:
    checkpoint, out = tiny_checkpoint(2), tmp_path / "x.npz"
    built = bundle(checkpoint, with_logits=True)
    block = "319,5,319,319,7,319,319,319"
    result = clover("logits", built.directory, "--prompt", prompt, "--block", block, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["block_size"] == 8
    found = np.load(out)
    tokens = [int(t) for t in prompt.split(",") if t]
    oracle = load_oracle(checkpoint)
    state = oracle.initial_state()
    expected = np.zeros((0, 320))
    if tokens:
        expected, state = oracle.commit(tokens, state)
    assert found["prompt"].tolist() == tokens and found["block"].tolist() == [int(t) for t in block.split(",")]
    np.testing.assert_allclose(found["commit_logits"], expected, atol=2e-3)
    np.testing.assert_allclose(
        found["preview_logits"], oracle.preview([int(t) for t in block.split(",")], state), atol=2e-3
    )
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"], "nothing is left beside it"


def test_the_coresets_share_changes_the_preview_alone(tmp_path: Path) -> None:
    built = bundle(tiny_checkpoint(2), with_logits=True)
    found = []
    for share in ("0.3", "1"):
        result = clover(
            "logits", built.directory, "--block", BLOCK, "--out", tmp_path / share, "--coreset-top-p", share
        )
        assert result.exit_code == 0, result.output
        found.append(np.load(tmp_path / share))
    assert np.array_equal(found[0]["commit_logits"], found[1]["commit_logits"])
    assert not np.allclose(found[0]["preview_logits"], found[1]["preview_logits"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--block", "5,x"], "--block: 'x' is no token id"),
        (["--block", "5,320"], "ids go from 0 to 319"),
        (["--block", ""], "--block holds 0 tokens"),
        (["--block", ",".join("5" * 65)], "--block holds 65 tokens"),
        (["--block", "5", "--prompt", "-1"], "--prompt: '-1' is no token id"),
        (["--block", "5", "--coreset-top-p", "0"], "--coreset-top-p is 0"),
        (["--block", "5", "--coreset-top-p", "nan"], "--coreset-top-p is nan"),
        (["--block", "5", "--out", "absent/x.npz"], "is not a directory"),
    ],
)  # fmt: skip
def test_logits_that_can_not_be_had_are_refused(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    built = bundle(tiny_checkpoint(2), with_logits=True)
    where: list[str | Path] = [] if "--out" in arguments else ["--out", tmp_path / "x.npz"]
    assert sentence in refused(clover("logits", built.directory, *where, *arguments))
    assert not list(tmp_path.iterdir())


def test_a_bundle_without_logits_says_how_to_get_them(tmp_path: Path) -> None:
    result = clover("logits", bundle(tiny_checkpoint(2)).directory, "--block", BLOCK, "--out", tmp_path / "x.npz")
    assert "--with-logits" in refused(result)


# -- validate ---------------------------------------------------------------------------------------


def test_validate_passes_a_sound_bundle_and_prints_a_table() -> None:
    checkpoint = tiny_checkpoint(2)
    done = process("validate", bundle(checkpoint).directory, "--checkpoint", checkpoint, "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert "passed, against its own weights" in done.stdout and "passed, against the checkpoint" in done.stdout
    assert "3 attention" in done.stdout and not done.stderr


def test_validate_exits_1_when_a_gate_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from clover.engines.validate import command, gates
    from clover.engines.validate.metrics import Gate

    gate = Gate(1.1, 0.0)
    never = gates.Gates(gate, gate, gate, gate, None, None)
    monkeypatch.setattr(command, "own_gates", lambda *_: never)
    built = bundle(tiny_checkpoint(2)).directory
    result = clover("validate", built, "--threads", "1", "--no-trace")
    assert result.exit_code == 1 and "FAILED: the embedding" in result.stdout
    result = clover("validate", built, "--threads", "1", "--no-trace", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["passed"] is False


def test_validate_refuses_what_does_not_belong_together() -> None:
    built = bundle(tiny_checkpoint(2)).directory
    assert "is not the checkpoint" in refused(clover("validate", built, "--checkpoint", tiny_checkpoint(3)))
    assert "is no token id" in refused(clover("validate", built, "--prompt", "a"))
    assert "provider 'gpu' is unknown" in refused(clover("validate", built, "--provider", "gpu"))
    assert "not a bundle" in refused(clover("validate", NANO))


# -- inspect, doctor, gpus, plan --------------------------------------------------------------------


def as_json(*arguments: str | Path) -> Any:
    result = clover(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_inspect_takes_checkpoints_and_bundles(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(2)
    built = bundle(checkpoint, precision="int4").directory
    assert as_json("inspect", checkpoint)["kind"] == "checkpoint"
    assert as_json("inspect", built, "--checkpoint", checkpoint)["quantisation"]["snr_db"] > 15
    shown = clover("inspect", built)
    assert shown.exit_code == 0 and "bits/weight" in shown.stdout
    assert "no bundle and no checkpoint" in refused(clover("inspect", tmp_path))


def test_doctor_tells_of_this_machine() -> None:
    data = as_json("doctor")
    assert data["backends"]["onnxruntime"]["run"] and data["packages"]["onnxruntime"]
    done = process("doctor")
    assert done.returncode == 0 and "onnxruntime" in done.stdout and not done.stderr


def test_gpus_lists_every_target_by_a_name_that_build_takes() -> None:
    names = [g["name"] for g in as_json("gpus")]
    assert {"rtx-5070-ti", "h200", "cpu"} <= set(names)
    table = clover("gpus").stdout
    assert all(name in table for name in names), "a pipe cuts no name off"


def test_plan_needs_no_checkpoint_and_says_by_its_exit_code_what_fits() -> None:
    assert as_json("plan", "--gpu", "rtx-5090")["fits"]
    small = clover("plan", "--sm", "120", "--memory", "1GiB", "--host-memory", "1GiB")
    assert small.exit_code == 1 and "does not fit" in small.stdout
    assert as_json("plan", NANO, "--gpu", "cpu")["fits"]
    assert "no target given" in refused(clover("plan"))
    assert "--gpu 'rtx-9999'" in refused(clover("plan", "--gpu", "rtx-9999"))


def test_plan_takes_precisions_as_build_does() -> None:
    def names(*options: str) -> dict[str, Any]:
        return {k: v for k, v in as_json("plan", NANO, "--gpu", "5070ti", *options).items() if k != "gpu"}

    assert names() == names("--int4") == names("--precision", "int4") != names("--bf16")
    assert names("--bf16") == names("--precision", "bf16")
    assert names("--precision", "int4,lm_head=bf16") != names("--int4")
    assert "exclude each other" in refused(clover("plan", "--gpu", "5070ti", "--int4", "--bf16"))
    assert "--group-size acts on" in refused(clover("plan", "--gpu", "5070ti", "--bf16", "--group-size", "32"))


@pytest.mark.parametrize("option", ["--block-skew", "--popularity-skew", "--distinct", "--hit-rate"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_assumptions_that_are_no_numbers_are_refused(option: str, value: str) -> None:
    refused(clover("plan", "--gpu", "5070ti", option, value))


@pytest.mark.parametrize("verb", ["inspect", "validate", "logits", "plan", "gpus", "doctor"])
def test_every_verb_has_help(verb: str) -> None:
    result = clover(verb, "--help")
    assert result.exit_code == 0 and "--json" in result.stdout
    assert f"  {verb}" in clover("--help").stdout
