"""Real TensorRT-RTX engines, built without a GPU, and everything that can go wrong on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import NANO
from gpu_support import gpu_bundle

from clover.engines.build import BuildRequest, build_target
from clover.engines.bundle import Bundle
from clover.engines.gpu_driver import DetectedGpu
from clover.engines.gpus import custom_gpu, find_gpu
from clover.engines.planner.full_size import FULL_SIZE
from clover.engines.tensorrt import build as builder
from clover.engines.tensorrt.checks import check_parts
from clover.engines.tensorrt.engine_file import read_header
from clover.engines.tensorrt.kernels import OPERATORS, make_host
from clover.engines.tensorrt.machine import build_command, check_machine
from clover.engines.tensorrt.request import EngineRequest
from clover.engines.tensorrt.target import GpuBuild
from clover.exporter.precision import plan_precision
from clover.plugins.tensorrt_plugin import register, unregister
from clover.runtime.errors import BundleError, CloverError

trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx-cu13")
pytest.importorskip("triton", reason="compiling the kernels needs triton")

OPERATOR_NAMES = ("BidirectionalGatedDeltaNet", "MoECoresetRouting", "MoEExperts")


@pytest.fixture(scope="module")
def int4() -> Bundle:
    return gpu_bundle("5070ti", "int4")


def layers_of(bundle: Bundle) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((bundle.directory / bundle.manifest.engines[0].layers).read_text())
    return record


def reopened(bundle: Bundle, place: Path) -> Bundle:
    """A copy to be damaged."""
    shutil.copytree(bundle.directory, place)
    return Bundle.open(place, verify=False)


@pytest.mark.parametrize("precision", ["int4", "bf16"])
@pytest.mark.parametrize(("gpu", "sm"), [("5070ti", 120), ("4090", 89)])
def test_a_nano_engine_holds_every_custom_operator_as_a_plugin(gpu: str, sm: int, precision: str) -> None:
    extra: dict[str, Any] = {} if precision == "int4" else {"sequences": 3, "with_logits": True}
    if sm == 89:  # weights made for one card serve the next
        extra["reuse"] = gpu_bundle("5070ti", precision, **extra).directory
    bundle = gpu_bundle(gpu, precision, **extra)
    manifest = bundle.manifest
    assert (manifest.target.backend, manifest.target.sm) == ("tensorrt-rtx", sm)
    assert manifest.target.backend_version == trt.__version__
    record = layers_of(bundle)
    plugins = [(layer["plugin"], layer["name"]) for layer in record["layers"] if layer["type"] == "PLUGIN_V3"]
    config = manifest.config
    expected = [(OPERATOR_NAMES[0], len(config.gdn_layers))]
    expected += [(name, config.num_hidden_layers) for name in OPERATOR_NAMES[1:]]
    for name, count in expected:
        assert [p for p, _ in plugins].count(name) == count == manifest.kernels[name].nodes
    for layer, kind in enumerate(config.layer_types):
        if kind == "linear_attention":
            assert any(full.startswith(f"layers.{layer}.gdn.{OPERATOR_NAMES[0]}") for _, full in plugins)
    assert record["limited_attention"] == len(config.attention_layers), "attention reads live keys only"
    kinds = [layer["type"] for layer in record["layers"]]
    assert kinds.count("KV_CACHE_UPDATE") == 2 * len(config.attention_layers)
    assert ("DEQUANTIZE" in kinds) == (precision == "int4")
    cubins = check_parts(Bundle.open(bundle.directory))
    assert all(c.sm == sm for group in cubins.values() for c in group)
    if "reuse" in extra:
        for name in ("dense", "experts"):
            file = f"weights/{name}.safetensors"
            assert (extra["reuse"] / file).samefile(bundle.directory / file), "one copy on disk"


def test_an_engine_file_holds_its_plugins_attributes_and_kernel_hashes(int4: Bundle) -> None:
    """TensorRT reads what a plugin serialises after the call: memory that was freed by then would be written instead."""
    data = (int4.directory / int4.manifest.engines[0].file).read_bytes()
    for name, kernels in int4.manifest.kernels.items():
        assert data.count(kernels.sha256.encode()) >= kernels.nodes, name
    scale = np.float32(int4.manifest.config.history_readout_scale).tobytes()
    assert data.count(scale) >= int4.manifest.kernels[OPERATOR_NAMES[0]].nodes


def test_the_same_build_gives_the_same_kernels_and_an_interrupted_one_takes_its_engine_over(
    int4: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "again"
    shutil.copytree(int4.directory, tmp_path / ".again.partial")

    def never(*arguments: Any) -> Any:
        raise AssertionError("the engine is there already")

    monkeypatch.setattr("clover.engines.tensorrt.target.build_engine", never)
    request = BuildRequest(
        NANO, out, target="5070ti", precision="int4", max_context=256, block_sizes=(16, 32), reuse=int4.directory
    )
    again = build_target(request)
    assert again.manifest.kernels == int4.manifest.kernels
    assert again.manifest.engines == int4.manifest.engines
    assert again.manifest.files == int4.manifest.files


def test_progress_tells_what_is_done(tmp_path: Path, int4: Bundle) -> None:
    heard: list[str] = []
    engine = rebuilt(int4, tmp_path, lambda what, done, total: heard.append(what))
    assert engine.path.is_file()
    assert heard[0] == "reading the step graph" and heard[-1] == "engine built"
    assert any(what.startswith("engine: ") for what in heard), "TensorRT's own phases"


# -- what goes wrong -----------------------------------------------------------------------------


def device_graph(bundle: Bundle, directory: Path) -> EngineRequest:
    """The request that built a bundle's engine, its graph written again into `directory`."""
    from clover.engines.tensorrt.request import EngineShapes, profiles
    from clover.exporter.graph.tensorrt.step import DeviceGraphOptions, build_device_graph
    from clover.exporter.weight_index import read_weight_index

    shutil.copytree(bundle.directory / "weights", directory / "weights")
    manifest, entry = bundle.manifest, bundle.manifest.engines[0]
    index = read_weight_index(directory, [n for n in manifest.files if n.endswith(".safetensors")])
    options = DeviceGraphOptions(entry.capacity, manifest.excluded_token_ids)
    model = build_device_graph(manifest.config, manifest.precision_plan, index, directory, options)
    (directory / "step.onnx").write_bytes(model.SerializeToString())
    shapes = EngineShapes(entry.sequences, 32, entry.prefill_chunk, manifest.max_context, manifest.config.vocab_size)
    return EngineRequest(
        "tensorrt-rtx", 120, str(directory / "step.onnx"), str(directory / "step.engine"),
        str(bundle.directory / "kernels"),
        {op: k.nodes for op, k in manifest.kernels.items()}, {op: k.names for op, k in manifest.kernels.items()},
        profiles(manifest.config, shapes),
    )  # fmt: skip


def rebuilt(bundle: Bundle, directory: Path, *progress: Any) -> builder.BuiltEngine:
    return builder.build_engine(device_graph(bundle, directory), *progress)


def test_an_unknown_card_is_refused_with_its_neighbours(tmp_path: Path) -> None:
    with pytest.raises(CloverError, match="did you mean rtx-5070-ti"):
        build_target(BuildRequest(NANO, tmp_path / "b", target="rtx-5070-tie"))
    assert not list(tmp_path.iterdir())


def test_a_card_without_the_kernels_tensor_cores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CloverError, match="SM 75"):
        build_target(BuildRequest(NANO, tmp_path / "b", sm="75", memory="16GiB"))


def test_tensorrt_that_is_missing_is_named_with_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(CloverError, match="tensorrt is not installed; pip install tensorrt-cu13"):
        build_target(BuildRequest(NANO, tmp_path / "b", target="h100"))
    assert not list(tmp_path.iterdir())


def test_tensorrt_rtx_that_is_missing_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.packages_distributions", dict)
    with pytest.raises(CloverError, match="tensorrt-rtx is not installed; pip install tensorrt-rtx-cu13"):
        build_target(BuildRequest(NANO, tmp_path / "b", target="5070ti"))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_precision_gpus_do_not_have_is_refused_by_name(tmp_path: Path, precision: Any) -> None:
    with pytest.raises(CloverError, match=f"embed={precision} is not available on GPUs, only int4 and bf16"):
        build_target(BuildRequest(NANO, tmp_path / "b", target="5070ti", precision=precision))


def test_a_model_that_does_not_fit_is_refused_with_what_would() -> None:
    build = GpuBuild(find_gpu("5070ti"), host_memory=16 * 2**30)
    with pytest.raises(CloverError, match="What would fit"):
        build.check(FULL_SIZE, plan_precision(FULL_SIZE, "bf16"), (32,), 8192)
    roomy = replace(build, host_memory=64 * 2**30)
    roomy.check(FULL_SIZE, plan_precision(FULL_SIZE, "int4"), (32,), 8192)
    with pytest.raises(CloverError, match="--resident-experts"):
        replace(roomy, resident_experts=-1).check(FULL_SIZE, plan_precision(FULL_SIZE, "int4"), (32,), 8192)


def test_triton_that_is_missing_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(CloverError, match="pip install triton"):
        build_target(BuildRequest(NANO, tmp_path / "b", target="5070ti"))
    assert not list(tmp_path.iterdir())


def test_an_sm_the_backend_does_not_build_for_is_one_sentence(int4: Bundle, tmp_path: Path) -> None:
    request = replace(device_graph(int4, tmp_path), sm=90)
    with pytest.raises(CloverError, match="does not build for SM 90"):
        builder.build_engine(request)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_builder_that_is_killed_leaves_a_sentence_and_no_engine(int4: Bundle, tmp_path: Path) -> None:
    request = device_graph(int4, tmp_path)
    children: list[Any] = []

    class Watched(subprocess.Popen[Any]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            children.append(self)

    def kill(what: str, done: int, total: int) -> None:
        if what == "building the engine":
            os.kill(children[0].pid, signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Watched)
        with pytest.raises(CloverError, match="killed, most likely because memory ran out"):
            builder.build_engine(request, kill)
    assert not Path(request.engine).exists() and not list(tmp_path.glob("*.partial"))


def test_a_builder_that_aborts_leaves_a_sentence(int4: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = device_graph(int4, tmp_path)
    # without the prepared library path the ONNX parser takes the process down
    from contextlib import nullcontext

    monkeypatch.setattr(builder, "library_environment", lambda backend: nullcontext(dict(os.environ)))
    with pytest.raises(CloverError, match=r"builder ended with signal 6|libtensorrt_rtx"):
        builder.build_engine(request)


def test_a_builder_that_gets_no_memory_says_so() -> None:
    """TensorRT's own allocations fail as std::bad_alloc, which arrives as a MemoryError."""
    script = (
        "from clover.engines.tensorrt import child\n"
        "def full(request, report): raise MemoryError\n"
        "child.build = full\n"
        "child.EngineRequest.load = staticmethod(lambda text: None)\n"
        "child.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], input="", capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "ran out of memory; close other programs" in json.loads(done.stdout)["error"]


def test_weights_of_another_layout_are_not_taken_over(
    int4: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be converted again, and the option ignored."""
    monkeypatch.setattr("clover.engines.build.STORE_FORMAT", "0")
    with pytest.raises(BundleError, match="another version of clover converted; leave --reuse out"):
        build_target(BuildRequest(NANO, tmp_path / "b", precision="int4", reuse=int4.directory))


def test_a_function_body_instead_of_a_plugin_is_noticed(int4: Bundle, tmp_path: Path) -> None:
    request = device_graph(int4, tmp_path)
    more = {**request.plugins, "MoECoresetRouting": 99}
    with pytest.raises(CloverError, match=r"4 of 99 MoECoresetRouting nodes became PLUGIN_V3 layers"):
        builder.build_engine(replace(request, plugins=more))


@pytest.mark.parametrize("at", [0, 17, 26, 5000])
def test_a_flipped_byte_in_an_engine_is_found(int4: Bundle, tmp_path: Path, at: int) -> None:
    copy = reopened(int4, tmp_path / "bundle")
    path = copy.directory / copy.manifest.engines[0].file
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match="damaged"):
        Bundle.open(copy.directory)
    if at < 28:  # what the header says is checked even where hashes are not
        with pytest.raises(BundleError, match=r"not a TensorRT-RTX engine|header says|was built by TensorRT-RTX"):
            check_parts(copy)


def test_an_engine_cut_short_is_found(int4: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "cut.engine"
    path.write_bytes((int4.directory / int4.manifest.engines[0].file).read_bytes()[:-1])
    with pytest.raises(BundleError, match="header says"):
        read_header(path)


def test_kernels_for_another_card_are_found(int4: Bundle, tmp_path: Path) -> None:
    """Kernels of SM 8.9, named as if the manifest wanted them."""
    other = gpu_bundle("4090", "int4", reuse=int4.directory)
    copy = reopened(int4, tmp_path / "bundle")
    shutil.copytree(other.directory / "kernels", copy.directory / "kernels", dirs_exist_ok=True)
    swapped = copy.manifest.model_copy(update={"kernels": other.manifest.kernels})
    with pytest.raises(BundleError, match=r"compiled for sm_89, and the engine is for SM 120"):
        check_parts(Bundle(copy.directory, swapped))


def test_kernels_that_the_manifest_does_not_name_are_found(int4: Bundle, tmp_path: Path) -> None:
    copy = reopened(int4, tmp_path / "bundle")
    kernels = dict(copy.manifest.kernels)
    kernels["MoEExperts"] = kernels["MoEExperts"].model_copy(update={"sha256": "0" * 64})
    with pytest.raises(BundleError, match="other MoEExperts kernels than its manifest says"):
        check_parts(Bundle(copy.directory, copy.manifest.model_copy(update={"kernels": kernels})))


def test_two_plugins_of_one_name_are_refused(int4: Bundle) -> None:
    host = make_host(check_parts(int4))
    creators = register(trt, OPERATORS, host)
    try:
        with pytest.raises(CloverError, match="BidirectionalGatedDeltaNet is registered in this process already"):
            register(trt, OPERATORS, host)
    finally:
        unregister(trt, creators)
    unregister(trt, register(trt, OPERATORS, host))


def test_a_plugin_refuses_kernels_it_was_not_built_with(int4: Bundle) -> None:
    host = make_host(check_parts(int4))
    creators = register(trt, OPERATORS[1:2], host)
    try:
        fields = trt.PluginFieldCollection(
            [
                trt.PluginField("top_k", np.array([4], np.int32), trt.PluginFieldType.INT32),
                trt.PluginField("min_experts", np.array([8], np.int32), trt.PluginFieldType.INT32),
                trt.PluginField("kernels", np.frombuffer(b"0" * 64, np.int8), trt.PluginFieldType.CHAR),
            ]
        )
        assert creators[0].create_plugin("layer", fields, trt.TensorRTPhase.RUNTIME) is None
        assert isinstance(host.error, BundleError) and "other MoECoresetRouting kernels" in str(host.error)
    finally:
        unregister(trt, creators)


@pytest.mark.slow
def test_the_builder_uses_nothing_that_only_tensorrt_rtx_has(
    int4: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the name of the data-centre TensorRT, which has the same interface and can't be installed here."""
    import importlib.util

    site = tmp_path / "site"
    information = site / "tensorrt_cu13-99.0.dist-info"
    information.mkdir(parents=True)
    (site / "tensorrt.py").write_text("from tensorrt_rtx import *\nfrom tensorrt_rtx import __version__\n")
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt-cu13\nVersion: 99.0\n")
    (information / "RECORD").write_text("tensorrt.py,,\n")
    libraries = importlib.util.find_spec("tensorrt_rtx_libs")
    assert libraries is not None and libraries.submodule_search_locations
    (site / "tensorrt_libs").symlink_to(libraries.submodule_search_locations[0])
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    built = builder.build_engine(replace(device_graph(int4, tmp_path), backend="tensorrt", sm=90))
    assert built.version == "99.0" and built.path.is_file()
    assert sum("plugin" in layer for layer in built.layers) == sum(k.nodes for k in int4.manifest.kernels.values())


# -- another machine -------------------------------------------------------------------------------


def card(name: str, sm: int) -> DetectedGpu:
    return DetectedGpu(0, name, sm, 24 * 2**30, 1000.0)


def test_another_card_is_refused_with_the_command_that_rebuilds(int4: Bundle) -> None:
    with pytest.raises(BundleError) as caught:
        check_machine(int4, [card("NVIDIA GeForce RTX 4090", 89)], trt.__version__)
    text = str(caught.value)
    assert "built for rtx-5070-ti (SM 120) and this machine has NVIDIA GeForce RTX 4090 (SM 89)" in text
    command = build_command(int4, "rtx-4090")
    assert command in text and "--precision int4 --block-size 16 --block-size 32 --max-context 256" in command
    fitting = card("NVIDIA GeForce RTX 5090", 120)
    assert check_machine(int4, [card("NVIDIA GeForce RTX 4090", 89), fitting], trt.__version__) is fitting


def test_another_tensorrt_is_refused_with_both_versions(int4: Bundle) -> None:
    with pytest.raises(BundleError, match=r"tensorrt-rtx 1\.7\.1\.116 and 1\.8\.0 is installed here"):
        check_machine(int4, [card("NVIDIA GeForce RTX 5070 Ti", 120)], "1.8.0")


def test_no_card_says_how_to_run_without_one(int4: Bundle) -> None:
    with pytest.raises(BundleError, match="no NVIDIA GPU; add --provider cpu"):
        check_machine(int4, [], trt.__version__)


def test_a_card_that_is_not_in_the_table_has_a_target() -> None:
    assert GpuBuild(custom_gpu(120, "12GiB")).backend == "tensorrt-rtx"
