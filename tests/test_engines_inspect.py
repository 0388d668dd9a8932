"""`clover inspect`'s and `clover doctor`'s content: what they say must add up with what is on the disk."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import NANO, bundle
from oracle_support import Layout, load_oracle, tiny_checkpoint
from rich.console import Console

from clover.engines.build import BuildRequest, build_target
from clover.engines.doctor import PACKAGES, diagnose, render_diagnosis
from clover.engines.gpu_driver import DetectedGpu
from clover.engines.inspect import inspect_path, render_inspection
from clover.exporter.safetensors_file import SafetensorsFile
from clover.runtime.errors import CheckpointError, CloverError


def text(renderable: object) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


# -- inspect ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["fused", "per_expert"])
def test_a_checkpoints_classes_are_what_its_tensors_hold(layout: Layout) -> None:
    path = tiny_checkpoint(0, layout, "language_model")
    data = inspect_path(path)
    sizes = [t.size for t in load_oracle(path).t.values()]
    assert data["kind"] == "checkpoint"
    assert data["model"]["parameters"] == sum(sizes) == sum(c["parameters"] for c in data["classes"].values())
    assert sum(c["bytes"] for c in data["classes"].values()) == 4 * sum(sizes)
    assert {c["bits_per_weight"] for c in data["classes"].values()} == {32.0}
    assert data["classes"]["experts"]["precision"] == "F32"
    assert data["files"]["config.json"] == (path / "config.json").stat().st_size


@pytest.mark.parametrize(
    "options",
    [{"precision": "int4", "group_size": 32}, {"precision": "int8", "overrides": {"lm_head": "bf16"}}, {}],
    ids=["int4", "mixed", "fp32"],
)
def test_a_bundles_classes_are_the_bytes_of_its_store(tmp_path: Path, options: dict[str, Any]) -> None:
    built = build_target(BuildRequest(tiny_checkpoint(0), tmp_path / "bundle", **{"precision": "fp32", **options}))
    data = inspect_path(built.directory)
    stored = [
        info.nbytes
        for name in data["files"]
        if name.endswith(".safetensors")
        for info in SafetensorsFile(built.directory / name).tensors.values()
    ]
    assert sum(c["bytes"] for c in data["classes"].values()) == sum(stored)
    assert data["classes"]["router"]["bits_per_weight"] == data["classes"]["small"]["bits_per_weight"] == 32.0
    assert data["bytes"] == sum(data["files"].values())
    if "group_size" in options:
        assert data["classes"]["experts"]["bits_per_weight"] == 4 + 32 / 32  # a float32 scale for 32 weights
    if "overrides" in options:
        assert data["classes"]["lm_head"]["precision"] == "bf16"
        assert data["classes"]["lm_head"]["bits_per_weight"] == 16.0


def test_the_cost_of_a_precision_is_measured_against_the_checkpoint() -> None:
    path = tiny_checkpoint(0)
    found = inspect_path(bundle(path, precision="int4").directory, path)["quantisation"]
    assert found["classes"]["never quantised"] is None, "exact"
    assert 17 < found["classes"]["experts"] < 24
    levels = [e["snr_db"] for e in found["worst"]]
    assert levels == sorted(levels) and levels[0] <= found["snr_db"]
    finer = inspect_path(bundle(path, precision="int8").directory, path)["quantisation"]
    assert 20 < finer["snr_db"] - found["snr_db"] < 30, "four more bits are worth 24 dB"
    exact = inspect_path(bundle(path).directory, path)["quantisation"]
    assert exact["snr_db"] is None and exact["worst"] == []
    with pytest.raises(CheckpointError, match="fingerprints differ"):
        inspect_path(bundle(path).directory, tiny_checkpoint(1))


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CloverError, match="no bundle and no checkpoint"):
        inspect_path(tmp_path)
    with pytest.raises(CloverError, match="is not a directory"):
        inspect_path(tmp_path / "absent")
    with pytest.raises(CloverError, match="--checkpoint compares a bundle"):
        inspect_path(tiny_checkpoint(0), tiny_checkpoint(0))


def test_inspection_reads_as_text_and_as_json() -> None:
    data = inspect_path(bundle(NANO, precision="int4").directory, NANO)
    json.dumps(data, allow_nan=False)
    shown = text(render_inspection(data))
    for expected in (
        "experts",
        "int4",
        "coreset_top_p 0.9",
        "block sizes: 8, 16, 32, 64",
        "onnxruntime",
        "Worst tensors",
    ):
        assert expected in shown
    assert np.isclose(data["classes"]["experts"]["bits_per_weight"], 4.5)


# -- doctor -----------------------------------------------------------------------------------------


def nothing_but(*present: str) -> Callable[[tuple[str, ...]], str | None]:
    return lambda names: "1.0" if any(PACKAGES[p] == names for p in present) else None


def card(sm: int) -> list[DetectedGpu]:
    return [DetectedGpu(0, "Some Card", sm, 16 * 2**30, 900.0)]


def no_driver() -> list[DetectedGpu]:
    raise CloverError("--gpu auto finds no NVIDIA driver on this machine; install it.")


BASE = ("onnxruntime", "onnx", "numpy", "safetensors", "tokenizers")


def test_a_base_installation_builds_and_runs_on_the_cpu() -> None:
    data = diagnose(nothing_but(*BASE), no_driver)
    assert data["backends"]["onnxruntime"]["build"] and data["backends"]["onnxruntime"]["run"]
    rtx = data["backends"]["tensorrt-rtx"]
    assert not rtx["build"] and not rtx["run"]
    assert "tensorrt_rtx: pip install '.[tensorrt-rtx]' in Clover's checkout" in rtx["missing"]
    assert "to run: no NVIDIA driver on this machine" in rtx["missing"]
    assert not data["serve"]["ready"] and ".[serve]" in data["serve"]["missing"][0]


def test_engines_build_without_a_gpu_and_run_on_a_card_that_fits() -> None:
    installed = (*BASE, "tensorrt_rtx", "triton", "cuda.bindings")
    without = diagnose(nothing_but(*installed), no_driver)["backends"]["tensorrt-rtx"]
    assert without["build"] and not without["run"]
    fitting = diagnose(nothing_but(*installed), lambda: card(120))["backends"]
    assert fitting["tensorrt-rtx"]["run"] and fitting["tensorrt-rtx"]["notes"] == ["runs on Some Card"]
    assert not fitting["tensorrt"]["build"]
    hopper = diagnose(nothing_but(*installed), lambda: card(90))["backends"]["tensorrt-rtx"]
    assert hopper["build"] and not hopper["run"] and "Some Card (SM 90)" in hopper["missing"][-1]


def test_the_diagnosis_shows_what_to_type() -> None:
    shown = text(render_diagnosis(diagnose(nothing_but(*BASE), no_driver)))
    assert "pip install '.[tensorrt-rtx]'" in shown
    assert "not installed: tensorrt_rtx" in shown
