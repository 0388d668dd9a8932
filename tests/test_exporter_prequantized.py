"""Checkpoints in INT4: known integers packed here, nibble by nibble, must come back as those integers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_support import logits_of, rows
from oracle_support import tiny_checkpoint
from safetensors.numpy import load_file, save_file

from clover.engines.build import BuildRequest, build_target
from clover.engines.inspect import inspect_path
from clover.engines.open import open_session
from clover.engines.validate.bundle_tensors import BundleTensors, WeightStore
from clover.exporter.checkpoint import Checkpoint
from clover.exporter.weights import plan_for
from clover.runtime.errors import CheckpointError, CloverError

Array = npt.NDArray[Any]
FORMATS = (
    "compressed-tensors",
    "compressed-tensors_asymmetric",
    "gptq",
    "gptq_v2",
    "gptq_asymmetric",
    "awq",
    "awq_symmetric",
)
GROUP = 32
QUANTISED = (  # the rest stays as it is, as `ignore` and `modules_to_not_convert` say
    *(f".{part}_proj.weight" for part in ("gate", "up", "down", "out")), ".in_proj_qkv.weight", ".in_proj_z.weight",
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}}},
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False,
             "dynamic": {"-:.*attn.*": {}}},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True,
            "modules_to_not_convert": ["mlp.gate"]},
}  # fmt: skip


def config_of(form: str) -> dict[str, Any]:
    base = CONFIGS[form.split("_")[0]]
    if form == "compressed-tensors_asymmetric":
        base = json.loads(json.dumps(base))
        base["config_groups"]["group_0"]["weights"]["symmetric"] = False
    return base | ({"checkpoint_format": "gptq_v2"} if form == "gptq_v2" else {})


def into_words(nibbles: Array, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Array:
    """[A, 8 B] of 0…15 -> int32 [A, B]: column order[i] of every eight in bits 4i…4i+3."""
    words = np.zeros((nibbles.shape[0], nibbles.shape[1] // 8), np.int64)
    for i, column in enumerate(order):
        words += nibbles[:, column::8].astype(np.int64) * 16**i
    return np.where(words >= 2**31, words - 2**32, words).astype(np.int32)


def pack(form: str, name: str, nibbles: Array, zeros: Array, scales: Array) -> dict[str, Array]:
    """One matrix: nibbles [N, K], zero points and scales [N, K / GROUP], as `form` stores them."""
    if form.startswith("compressed-tensors"):
        shape = np.array(nibbles.shape, np.int64)
        parts = {"weight_packed": into_words(nibbles), "weight_scale": scales, "weight_shape": shape}
        if form.endswith("asymmetric"):
            padded = np.pad(zeros, ((0, -len(zeros) % 8), (0, 0)))
            parts["weight_zero_point"] = into_words(padded.T.copy()).T.copy()
        return parts
    if form.startswith("gptq"):
        stored = zeros if form == "gptq_v2" else (zeros - 1) % 16
        order = np.arange(nibbles.shape[1], dtype=np.int32) // GROUP
        return {
            "qweight": into_words(nibbles).T.copy(), "qzeros": into_words(stored.T.copy()),
            "scales": scales.T.copy(), "g_idx": order,
        }  # fmt: skip
    columns = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": into_words(nibbles.T.copy(), columns), "qzeros": into_words(zeros.T.copy(), columns),
        "scales": scales.T.copy(),
    }  # fmt: skip


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Array]]]:
    """A tiny checkpoint in a format, and its matrices by canonical part name as float32 of the same values."""
    made: dict[str, tuple[Path, dict[str, Array]]] = {}

    def build(form: str) -> tuple[Path, dict[str, Array]]:
        if form in made:
            return made[form]
        source, target = tiny_checkpoint(layout="per_expert"), tmp_path_factory.mktemp("int4") / form
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("model*"))
        tensors: dict[str, Array] = {}
        for shard in sorted(source.glob("*.safetensors")):
            tensors |= load_file(shard)
        rng, truth = np.random.default_rng(5), {}
        symmetric = form in ("compressed-tensors", "gptq", "awq_symmetric")
        for name in [n for n in tensors if n.endswith(QUANTISED)]:
            n, k = tensors.pop(name).shape
            nibbles, zeros = rng.integers(0, 16, (n, k)), rng.integers(0, 16, (n, k // GROUP))
            zeros = np.full_like(zeros, 8) if symmetric else zeros
            scales = rng.uniform(0.5, 2, (n, k // GROUP)).astype(np.float16) / np.float16(50)
            parts = pack(form, name, nibbles, zeros, scales)
            tensors |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
            groups = nibbles.reshape(n, -1, GROUP).astype(np.float32) - zeros[:, :, None].astype(np.float32)
            truth[name] = (groups * scales.astype(np.float32)[:, :, None]).reshape(n, k)
        save_file(tensors, target / "model.safetensors")
        (target / "config.json").write_text(
            json.dumps(json.loads((source / "config.json").read_text()) | {"quantization_config": config_of(form)})
        )
        made[form] = target, truth
        return made[form]

    return build


Make = Callable[[str], tuple[Path, dict[str, Array]]]


@pytest.mark.parametrize("form", FORMATS)
def test_integers_arrive_unchanged(form: str, make: Make, tmp_path: Path) -> None:
    """Through the checkpoint's reader and through the whole build, in the plan's groups and in smaller ones."""
    directory, truth = make(form)
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.dtype("model.layers.0.mlp.experts.down_proj") == "INT4"
    assert checkpoint.dtype("model.layers.0.mlp.gate.weight") == "F32"
    for name, values in truth.items():
        if ".experts." not in name:
            np.testing.assert_array_equal(checkpoint.read(name), values)
            np.testing.assert_array_equal(checkpoint.read_rows(name, 5, 21), values[5:21])

    bundle = build_target(BuildRequest(directory, tmp_path / "bundle"))
    plan = bundle.manifest.precision_plan
    assert plan.group_size == GROUP
    asymmetric = form in ("compressed-tensors_asymmetric", "gptq_v2", "gptq_asymmetric", "awq")
    assert plan.zero_points == (("experts", "gdn", "shared_expert") if asymmetric else ())
    held = BundleTensors(WeightStore(bundle))
    for name in ("model.layers.0.mlp.shared_expert.up_proj.weight", "model.layers.0.linear_attn.in_proj_z.weight"):
        np.testing.assert_array_equal(held[name], truth[name])
    experts = "model.layers.1.mlp.experts."
    for expert in (0, 11):
        parts = [truth[f"{experts}{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")]
        np.testing.assert_array_equal(held[experts + "gate_up_proj"][expert], np.concatenate(parts[:2]))
        np.testing.assert_array_equal(held[experts + "down_proj"][expert], parts[2])


@pytest.mark.parametrize("form", ["compressed-tensors", "compressed-tensors_asymmetric", "gptq_asymmetric", "awq"])
def test_a_decode_is_that_of_the_same_weights_in_float(form: str, make: Make, tmp_path: Path) -> None:
    """The INT4 operators, with zero points or without, against a float32 bundle of the dequantised weights."""
    directory, truth = make(form)
    floats = tmp_path / "floats"
    shutil.copytree(directory, floats)
    kept = load_file(directory / "model.safetensors")
    parts = (
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
    )
    save_file({n: t for n, t in kept.items() if not n.endswith(parts)} | truth, floats / "model.safetensors")
    config = json.loads((floats / "config.json").read_text())
    del config["quantization_config"]
    (floats / "config.json").write_text(json.dumps(config))
    as_it_is = {"embed": "fp32", "lm_head": "fp32", "attention": "fp32"}
    logits = []
    for source, options in (
        (directory, {"precision": "int4", "overrides": as_it_is, "exact_activations": True}),
        (floats, {"precision": "fp32"}),
    ):
        bundle = build_target(BuildRequest(source, tmp_path / f"{source.name}.bundle", with_logits=True, **options))
        session = open_session(bundle, sequences=1, max_context=64, threads=1, cache=False)
        logits.append([logits_of(session.step([rows(tokens, 4)])[0]) for tokens in ([3, 4, 5, 6], [7, 8, 9, 10])])
    np.testing.assert_allclose(logits[0], logits[1], atol=2e-4 * np.abs(logits[1]).max())


def test_other_precisions_and_smaller_groups(make: Make, tmp_path: Path) -> None:
    directory, truth = make("awq")
    checkpoint = Checkpoint.open(directory)
    with pytest.raises(CloverError, match="--group-size 64 "):
        plan_for(checkpoint, "int4", group_size=64)
    assert plan_for(checkpoint, "int8").zero_points == ()
    floats = BundleTensors(WeightStore(build_target(BuildRequest(directory, tmp_path / "fp32", precision="fp32"))))
    name = "model.layers.0.mlp.shared_expert.down_proj.weight"
    np.testing.assert_array_equal(floats[name], truth[name])
    described = inspect_path(directory)
    assert described["classes"]["experts"]["precision"] == "INT4"
    assert 4.5 < described["classes"]["experts"]["bits_per_weight"] < 5.5
    with pytest.raises(CloverError, match="zero points, which GPU engines do not take"):
        build_target(BuildRequest(directory, tmp_path / "gpu", target="rtx4090"))
    assert not (tmp_path / "gpu").exists()


def spoil(directory: Path, change: Callable[[dict[str, Array], dict[str, Any]], object], target: Path) -> Path:
    """A copy whose tensors and config have been changed."""
    shutil.copytree(directory, target)
    tensors, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    change(tensors, config)
    save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    return target


DOWN = "model.layers.0.mlp.shared_expert.down_proj."
UP = "model.layers.0.mlp.shared_expert.up_proj."


@pytest.mark.parametrize(
    ("form", "change", "says"),
    [
        ("gptq", lambda t, c: t.update({UP + "g_idx": t[UP + "g_idx"][::-1]}), "g_idx .* is not in ascending order"),
        ("gptq", lambda t, c: t.pop(DOWN + "qzeros"), "down_proj has g_idx, qweight, scales but no qzeros"),
        ("gptq", lambda t, c: t.update({DOWN + "scales": t[DOWN + "scales"][:, 8:]}), r"scales is F16 .*, not BF16 \["),
        ("awq", lambda t, c: t.update({DOWN + "scales": t[DOWN + "scales"] * np.float16(np.inf)}), "infinite scales"),
        ("awq", lambda t, c: t.update({DOWN + "qweight": t[DOWN + "qweight"][:, 1:]}), r"qzeros is I32 \[1, 8\], not I32 \[1, 7\] as awq"),
        ("awq", lambda t, c: t.update({DOWN + "weight": np.zeros((64, 32), np.float32)}), "both in INT4 and as it is"),
        ("compressed-tensors", lambda t, c: t.update({DOWN + "weight_shape": np.array([1, 2])}), r"says \[1, 2\]"),
        ("gptq", lambda t, c: c["quantization_config"].update(bits=3), "bits is 3, and only 4 is implemented"),
        ("gptq", lambda t, c: c["quantization_config"].update(group_size=-1), "group_size is -1, and only 128 or 64 or 32"),
        ("gptq", lambda t, c: c["quantization_config"].update(dynamic={"x": {"bits": 8}}), "dynamic gives some modules settings of their own"),
        ("awq", lambda t, c: c["quantization_config"].update(version="gemv"), "version is 'gemv', and only 'gemm'"),
        ("compressed-tensors", lambda t, c: c["quantization_config"].update(format="float-quantized"), "format is 'float"),
        (
            "compressed-tensors",
            lambda t, c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(symmetric=False),
            r"has weight_packed, weight_scale, weight_shape but no weight_zero_point",
        ),
        ("compressed-tensors_asymmetric", lambda t, c: t.update({DOWN + "weight_zero_point": t[DOWN + "weight_zero_point"][1:]}), r"weight_zero_point is I32 \[7, 1\], not I32 \[8, 1\]"),
        (
            "compressed-tensors",
            lambda t, c: c["quantization_config"]["config_groups"].update(other={"weights": {"num_bits": 4, "symmetric": False, "group_size": GROUP}}),
            "has symmetric and asymmetric groups",
        ),
        ("awq", lambda t, c: c["quantization_config"].update(quant_method="bitsandbytes"), "quant_method is 'bitsandbytes'"),
        ("awq", lambda t, c: c.pop("quantization_config"), r"holds INT4 weights \(\S*weight\), but"),
    ],
)  # fmt: skip
def test_what_can_not_be_read_is_named(
    form: str, change: Callable[[Any, Any], object], says: str, make: Make, tmp_path: Path
) -> None:
    directory = spoil(make(form)[0], change, tmp_path / "spoilt")
    with pytest.raises(CheckpointError, match=says) as error:
        build_target(BuildRequest(directory, tmp_path / "out" / "bundle"))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
