"""`clover validate`, `inspect` and opening on a GPU bundle without a card: every check passes a sound one, and fails alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from engine_support import NANO
from gpu_stand_in import StandInContext, StandInDriver, StandInTensorRt, view
from gpu_support import gpu_bundle
from onnx import TensorProto
from typer.testing import CliRunner, Result

from clover.cli import app
from clover.engines.bundle import Bundle, file_entry
from clover.engines.gpu_driver import DetectedGpu
from clover.engines.inspect import inspect_path
from clover.engines.manifest import MANIFEST, Manifest
from clover.engines.tensorrt.checks import Check, check_parts, static_checks
from clover.engines.tensorrt.engine_file import read_header
from clover.engines.tensorrt.kernels import needed_operators
from clover.engines.tensorrt.open import open_gpu_session
from clover.exporter.graph.tensorrt.builder import TypedBuilder
from clover.runtime.errors import BundleError

tensorrt_rtx = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx-cu13")
pytest.importorskip("triton", reason="compiling the kernels needs triton")

ENGINE, LAYERS = "engines/step-sm120.engine", "engines/step-sm120.layers.json"
OPERATORS = ("BidirectionalGatedDeltaNet", "MoECoresetRouting", "MoEExperts")
WHOLE = ("files", "kernels in the engine")  # what opening a bundle leaves out: it has read the files already
Fault = Callable[[Path], dict[str, Any] | None]  # damages the copy; fields of the manifest to replace


@pytest.fixture(scope="module")
def sound() -> Bundle:
    return gpu_bundle("5070ti", "int4")


def broken(sound: Bundle, place: Path, fault: Fault, *, recorded: bool = True) -> Bundle:
    """A copy with a fault. recorded: with the damaged files' hashes brought up to date, as if it had been built so."""
    shutil.copytree(sound.directory, place, ignore=shutil.ignore_patterns(".cache"))
    changes = fault(place) or {}
    files = {n: file_entry(place / n) for n in sound.manifest.files if recorded and (place / n).is_file()}
    kernels = changes.get("kernels", sound.manifest.kernels)
    names = {f"kernels/{stem}{end}" for k in kernels.values() for stem in k.names for end in (".cubin", ".json")}
    files |= {n: file_entry(place / n) for n in names if recorded and (place / n).is_file()}
    manifest = sound.manifest.model_copy(update={"files": {**sound.manifest.files, **files}, **changes})
    (place / MANIFEST).write_text(manifest.dump(), encoding="utf-8")
    return Bundle(place, Manifest.model_validate_json(manifest.model_dump_json()))


def failing(checks: list[Check]) -> dict[str, str]:
    return {c.name: c.found for c in checks if c.verdict == "failed"}


def edit(place: Path, name: str, at: int, flip: int = 1) -> None:
    content = bytearray((place / name).read_bytes())
    content[at] ^= flip
    (place / name).write_bytes(content)


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def cli(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


# -- sound ------------------------------------------------------------------------------------------


def test_a_sound_bundle_passes_every_check_and_says_what_was_not_done(sound: Bundle) -> None:
    result = cli("validate", sound.directory, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["passed"] and not found["numbers_compared"] and found["comparisons"] == []
    verdicts = {c["name"]: c["verdict"] for c in found["checks"]}
    assert verdicts.pop("card here") == "not checked"
    assert set(verdicts.values()) == {"passed"} and len(verdicts) == 11
    texts = {c["name"]: c["found"] for c in found["checks"]}
    assert "for SM 120" in texts["engine"] and "18 INT4 matrices packed" in texts["weights"]
    assert all(f"kernels of {op}" in texts for op in OPERATORS)
    shown = cli("validate", sound.directory).stdout
    assert "passed, as far as it was checked" in shown and "Numbers were not compared, for want of a card" in shown
    assert "--provider cpu` compares" in " ".join(shown.split())


def test_inspection_shows_the_same_checks(sound: Bundle) -> None:
    checks = {c["name"]: c for c in inspect_path(sound.directory)["checks"]}
    assert {c.name: c.to_json() for c in static_checks(sound, []) if c.name not in WHOLE} == checks
    shown = cli("inspect", sound.directory).stdout
    assert "GPU engine" in shown and "INT4 matrices packed" in shown
    assert "length_ramp (start 8192, stop 16384, max_bias 5)" in " ".join(shown.split())


@pytest.mark.parametrize("precision", ["int4", "bf16"])
@pytest.mark.parametrize(("gpu", "sm"), [("5070ti", 120), ("4090", 89)])
def test_every_bundle_of_the_test_run_passes(gpu: str, sm: int, precision: str) -> None:
    extra: dict[str, Any] = {} if precision == "int4" else {"sequences": 3, "with_logits": True}
    if sm == 89:
        extra["reuse"] = gpu_bundle("5070ti", precision, **extra).directory
    bundle = gpu_bundle(gpu, precision, **extra)
    assert read_header(bundle.directory / bundle.manifest.engines[0].file).sms == (sm,)
    card = DetectedGpu(0, "a card", sm, 2**34, 900.0)
    assert {c.verdict for c in static_checks(bundle, [card])} == {"passed"}


def test_what_the_installed_operators_need_is_what_the_graph_asked_for(sound: Bundle) -> None:
    """Without the graph, from the config alone: the same nodes and the same kernels."""
    needed = needed_operators(sound.manifest.config, sound.manifest.precision_plan)
    cubins = check_parts(sound)
    assert {op: len(n.layers) for op, n in needed.items()} == {o: k.nodes for o, k in sound.manifest.kernels.items()}
    assert {op: set(n.kernels) for op, n in needed.items()} == {o: {c.kernel for c in cs} for o, cs in cubins.items()}


# -- one fault each ---------------------------------------------------------------------------------


def engine_of_another_card(place: Path) -> None:
    other = gpu_bundle("4090", "int4", reuse=gpu_bundle("5070ti", "int4").directory)
    shutil.copyfile(other.directory / other.manifest.engines[0].file, place / ENGINE)


def engine_with_wide_weights(place: Path) -> None:
    other = gpu_bundle("5070ti", "bf16", sequences=3, with_logits=True)
    shutil.copyfile(other.directory / ENGINE, place / ENGINE)


def kernels_of_another_card(place: Path) -> dict[str, Any]:
    other = gpu_bundle("4090", "int4", reuse=gpu_bundle("5070ti", "int4").directory)
    shutil.copytree(other.directory / "kernels", place / "kernels", dirs_exist_ok=True)
    return {"kernels": other.manifest.kernels}


def without_routing(place: Path) -> dict[str, Any]:
    kernels = dict(gpu_bundle("5070ti", "int4").manifest.kernels)
    del kernels["MoECoresetRouting"]
    return {"kernels": kernels}


def without_one_kernel(place: Path) -> dict[str, Any]:
    from clover.engines.tensorrt.kernels import read_kernels
    from clover.plugins.tensorrt_plugin import kernels_digest

    kernels = dict(gpu_bundle("5070ti", "int4").manifest.kernels)
    names = kernels["MoEExperts"].names[:-1]
    (cubins,) = read_kernels(place / "kernels", {"MoEExperts": names}).values()
    kernels["MoEExperts"] = kernels["MoEExperts"].model_copy(update={"names": names, "sha256": kernels_digest(cubins)})
    return {"kernels": kernels}


def another_version(place: Path) -> dict[str, Any]:
    target = gpu_bundle("5070ti", "int4").manifest.target
    return {"target": target.model_copy(update={"backend_version": "1.8.0.1"})}


def other_sources(place: Path) -> None:
    for path in (place / "kernels").glob("mix-*.json"):
        edit_json(path, lambda d: d.update(source="0" * 64))


def one_parameter_more(place: Path) -> None:
    for path in (place / "kernels").glob("combine-*.json"):
        edit_json(path, lambda d: d.update(hidden_parameters=3))


def layer_list(change: Callable[[dict[str, Any]], Any]) -> Fault:
    return lambda place: edit_json(place / LAYERS, change)


def no_layer_list(place: Path) -> None:
    (place / LAYERS).write_text("[]")


def rename_a_plugin(record: dict[str, Any]) -> None:
    for layer in record["layers"]:
        layer["name"] = layer["name"].replace("layers.2.moe.MoEExperts", "layers.1.moe.MoEExperts")


def one_plugin_more(record: dict[str, Any]) -> None:
    record["layers"].append({"name": "extra.Other.1", "type": "PLUGIN_V3", "plugin": "Other"})


def caches_copied(record: dict[str, Any]) -> None:
    record["layers"] = [layer for layer in record["layers"] if layer["type"] != "KV_CACHE_UPDATE"]


def no_dequantisation(record: dict[str, Any]) -> None:
    record["layers"] = [layer for layer in record["layers"] if layer["type"] != "DEQUANTIZE"]


def no_key_lengths(record: dict[str, Any]) -> None:
    record["limited_attention"] = 0


FAULTS: dict[str, tuple[Fault, str, str]] = {
    "engine of another card": (engine_of_another_card, "engine", r"is an engine for SM 89, and the bundle says SM 120"),
    "another version": (another_version, "engine", r"built by TensorRT-RTX 1\.7\.1\.116, and the bundle says 1\.8\.0\.1"),
    "header's magic": (lambda p: edit(p, ENGINE, 0), "engine", "is not a TensorRT-RTX engine"),
    "header's size": (lambda p: edit(p, ENGINE, 17), "engine", "its header says"),
    "header's directory": (lambda p: edit(p, ENGINE, 0x6C), "engine", "lie beyond its end"),
    "engine unpacked": (engine_with_wide_weights, "weights", r"holds 1\.23 MB of weights where 0\.41 MB are planned"),
    "engine of other kernels": (engine_with_wide_weights, "kernels in the engine", "built with other MoEExperts kernels"),
    "kernels of another card": (kernels_of_another_card, "kernels of MoEExperts", "compiled for sm_89, and the engine"),
    "plugin removed": (without_routing, "plugins", "has MoECoresetRouting in 0 layers, and this clover .* with 4"),
    "kernel removed": (without_one_kernel, "kernels of MoEExperts", "lacks the down_product kernel"),
    "cubin gone": (
        lambda p: next((p / "kernels").glob("mix-*.cubin")).unlink(), "kernels of BidirectionalGatedDeltaNet", "can't be read",
    ),
    "other sources": (other_sources, "kernels of BidirectionalGatedDeltaNet", "another version of .* than is installed"),
    "other parameters": (one_parameter_more, "kernels of MoEExperts", "takes parameters"),
    "layer renamed": (layer_list(rename_a_plugin), "layers", "layer 1 of the engine's network has 2 MoEExperts plugins"),
    "layer more": (layer_list(one_plugin_more), "layers", "has 11 plugins, more than the model"),
    "caches copied": (layer_list(caches_copied), "layers", "updates 0 of 4 caches in place"),
    "key lengths": (layer_list(no_key_lengths), "layers", "limits 0 of 2 attention layers"),
    "list of another engine": (layer_list(lambda r: r.update(sha256="0" * 64)), "layers", "of another engine"),
    "no list": (no_layer_list, "layers", "is no layer list"),
    "not dequantised": (layer_list(no_dequantisation), "weights", "0 of 18 INT4 matrices dequantise"),
    "tensor's type": (
        layer_list(lambda r: r["tensors"].update({"conv.0": ["HALF", [-1, 3, 256]]})), "inputs and outputs", "binds BF16",
    ),
    "tensor's size": (
        layer_list(lambda r: r["tensors"].update({"keys.1": ["BF16", [-1, 2, 99, 32]]})), "inputs and outputs", r"\[1, 2, 768",
    ),
    "tensor gone": (layer_list(lambda r: r["tensors"].pop("expert_rows")), "inputs and outputs", "lacks expert_rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_check_and_by_opening(sound: Bundle, tmp_path: Path, name: str) -> None:
    fault, check, told = FAULTS[name]
    copy = broken(sound, tmp_path / "bundle", fault)
    found = failing(static_checks(copy, []))
    assert check in found, found
    import re

    assert re.search(told, found[check]), found[check]
    assert "build" in found[check], "what to do"
    if check not in WHOLE:
        with pytest.raises(BundleError):
            check_parts(copy)
    result = cli("validate", copy.directory)
    assert result.exit_code == 1 and "FAILED" in result.stdout and "since a check failed" not in result.stdout


@pytest.mark.parametrize("file", [ENGINE, LAYERS, "kernels", "weights/experts.safetensors", "graphs/step.onnx"])
def test_a_flipped_byte_anywhere_is_a_failed_validation(sound: Bundle, tmp_path: Path, file: str) -> None:
    def flip(place: Path) -> None:
        name = next((place / file).glob("*.cubin")).relative_to(place).as_posix() if file == "kernels" else file
        edit(place, name, (place / name).stat().st_size // 2)

    copy = broken(sound, tmp_path / "bundle", flip, recorded=False)
    assert "is damaged" in failing(static_checks(copy, []))["files"]
    assert cli("validate", copy.directory).exit_code == 1


# -- this machine -----------------------------------------------------------------------------------


def test_another_tensorrt_or_card_is_told_with_the_command_that_rebuilds(sound: Bundle) -> None:
    checks = {c.name: c for c in static_checks(sound, [DetectedGpu(0, "Card", 89, 2**34, 900.0)], "1.8.0")}
    version, card = checks["TensorRT here"], checks["card here"]
    assert version.verdict == "failed" and "1.8.0 is installed here" in version.found
    assert "clover build CHECKPOINT -o BUNDLE --gpu rtx-5070-ti --precision int4" in version.found
    assert card.verdict == "not checked", "that says nothing against the bundle"
    assert "--sm 89 --memory 16GiB" in card.found, "a card that is not in the table"
    for check in (version, card):
        assert f"--reuse {sound.directory}`" in check.found


def test_without_tensorrt_the_rest_is_checked(sound: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.packages_distributions", dict)
    result = cli("validate", sound.directory, "--json")
    assert result.exit_code == 0, result.output
    checks = {c["name"]: c for c in json.loads(result.stdout)["checks"]}
    assert checks["TensorRT here"]["verdict"] == "not checked"
    assert "pip install tensorrt-rtx-cu13" in checks["TensorRT here"]["found"]


@pytest.mark.parametrize(
    "options", [["--checkpoint", str(NANO)], ["--prompt", "5,6"], ["--seed", "0"], ["--threads", "1"], ["--trace"]]
)
def test_options_for_numbers_are_refused_by_name_without_a_card(sound: Bundle, options: list[str]) -> None:
    result = cli("validate", sound.directory, *options)
    assert result.exit_code == 2 and not result.stdout
    assert options[0] in result.stderr and "--provider cpu" in result.stderr
    assert cli("validate", sound.directory, "--no-trace").exit_code == 0


def test_the_engine_asked_for_by_name_is_refused_without_a_card(sound: Bundle) -> None:
    result = cli("validate", sound.directory, "--provider", "tensorrt")
    assert result.exit_code == 2 and "has no NVIDIA GPU; add --provider cpu" in result.stderr


def test_the_graph_of_a_gpu_bundle_is_validated_on_the_cpu(sound: Bundle) -> None:
    result = cli("validate", sound.directory, "--provider", "cpu", "--threads", "1", "--no-trace", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["numbers_compared"] and found["comparisons"][0]["passed"] and found["checks"] == []


# -- on a card, as far as a stand-in shows it -----------------------------------------------------------


CARD = DetectedGpu(0, "NVIDIA GeForce RTX 5070 Ti", 120, 16 * 2**30, 896.0)


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card made of ONNX Runtime, which rounds activations to bfloat16 where the engine does."""

    def open_on_stand_in(bundle: Bundle, **options: Any) -> Any:
        driver = StandInDriver()
        stand_in = StandInTensorRt(tensorrt_rtx, bundle, driver, ml_dtypes.bfloat16)
        return open_gpu_session(bundle, stand_ins={"driver": driver, "trt": stand_in, "cards": [CARD]}, **options)

    def rounded(cast: Callable[[TypedBuilder, str], str]) -> Callable[[TypedBuilder, str], str]:
        def both_ways(self: TypedBuilder, x: str) -> str:
            if self.low != TensorProto.FLOAT:
                return cast(self, x)
            return self.op("Cast", self.op("Cast", x, to=int(TensorProto.BFLOAT16)), to=int(TensorProto.FLOAT))

        return both_ways

    for name in ("to_low", "from_low"):
        monkeypatch.setattr(TypedBuilder, name, rounded(getattr(TypedBuilder, name)))
    monkeypatch.setattr("clover.engines.tensorrt.open.open_gpu_session", open_on_stand_in)
    monkeypatch.setattr("clover.engines.validate.static.detected_cards", lambda: [CARD])


@pytest.mark.parametrize("precision", ["int4", "bf16"])
def test_on_a_card_the_engine_is_compared_with_onnxruntime(on_a_card: None, precision: str) -> None:
    extra: dict[str, Any] = {} if precision == "int4" else {"sequences": 3, "with_logits": True}
    result = cli("validate", gpu_bundle("5070ti", precision, **extra).directory, "--threads", "1", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {c["verdict"] for c in found["checks"]} == {"passed"} and found["trace_run_by"] == "tensorrt"
    compared = found["gpu_against_onnxruntime"]
    assert compared["passed"] and compared["rows"] == (134 if precision == "int4" else 202)
    assert compared["mean_total_variation"] > 1e-3, "bfloat16 is rounded at all"
    assert [name[-1] for name in compared["states"]] == list("00112233"), "in the order of layers"


@pytest.mark.parametrize("name", ["recurrent.2", "values.1"])
def test_on_a_card_the_first_wrong_state_is_named(
    on_a_card: None, monkeypatch: pytest.MonkeyPatch, sound: Bundle, name: str
) -> None:
    run = StandInContext._run

    def wrong(self: StandInContext, addresses: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        run(self, addresses, shapes)
        dtype = np.float32 if name.startswith("recurrent") else ml_dtypes.bfloat16
        view(addresses[f"next.{name}"], dtype, shapes[name])[...] *= 1.05

    monkeypatch.setattr(StandInContext, "_run", wrong)
    result = cli("validate", sound.directory, "--threads", "1", "--no-trace")
    assert result.exit_code == 1
    lines = " ".join(result.stdout.split()).partition("GPU engine against ONNX Runtime")[2]
    assert f"FAILED: the GPU engine's {name} differs from ONNX Runtime's" in lines
