"""The graph GPU engines are built from, run by ONNX Runtime in its float32 form, against the oracle and the CPU's graph."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from engine_support import bundle, relative_error, rows
from oracle_support import load_oracle, tiny_checkpoint

from clover.engines.build import BuildRequest, build_target
from clover.engines.bundle import Bundle
from clover.engines.open import open_session
from clover.engines.tensorrt.kernels import OPERATORS
from clover.exporter.config_reader import read_config
from clover.exporter.graph.tensorrt.lower import build_portable_graph
from clover.exporter.graph.tensorrt.step import CONVERTED_FILE, DeviceGraphOptions, build_device_graph
from clover.exporter.precision import parse_precision
from clover.exporter.weight_index import read_weight_index
from clover.plugins.op_spec import DOMAIN
from clover.runtime.errors import CloverError

TOLERANCE = 5e-5
CAPACITY = 160
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "equal heads": {"linear_num_key_heads": 4, "linear_num_value_heads": 4},
    "group of four": {"linear_num_key_heads": 1, "linear_num_value_heads": 4, "num_key_value_heads": 1},
    "kernel 3": {"linear_conv_kernel_dim": 3},
    "8 experts": {"num_experts": 8},
    "head_dim 64": {"head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 64},
    "no coreset": {"config": {"moe_block_coreset": {"enabled": False}}},
}
Array = npt.NDArray[Any]


class PortableSession:
    """The portable graph with its state, for S sequences."""

    def __init__(self, built: Bundle, sequences: int = 1) -> None:
        self.sequences = sequences
        self.session = portable(built)
        self.positions = np.zeros(sequences, np.int64)
        self.state = {
            given.name: np.zeros([sequences if d == "S" else d for d in given.shape], np.float32)
            for given in self.session.get_inputs()
            if given.name.split(".")[0] in ("conv", "recurrent", "keys", "values")
        }

    def step(
        self,
        plans: dict[int, tuple[Array, int]],
        *,
        padded: int = 0,
        top_p: float = 0.9,
        candidates: int = 1,
        **adjust: Any,
    ) -> dict[str, Array]:
        """plans: sequence -> (tokens, how many of them to commit); padded: rows to pad the step to."""
        s, t = self.sequences, max(padded, *(len(tokens) for tokens, _ in plans.values()))
        token_ids, commit, length = np.zeros((s, t), np.int64), np.zeros(s, np.int64), np.zeros(s, np.int64)
        for slot, (tokens, committed) in plans.items():
            token_ids[slot, : len(tokens)] = tokens
            commit[slot], length[slot] = committed, len(tokens)
        feeds = {
            "token_ids": token_ids, "commit_length": commit, "row_length": length, "position": self.positions,
            "coreset_top_p": np.full(s, top_p, np.float32), "logit_rows": np.tile(np.arange(t), (s, 1)),
            "candidates": np.array([candidates]), "adjust_ids": np.zeros((s, 1), np.int64),
            "adjust_scale": np.ones((s, 1), np.float32), "adjust_bias": np.zeros((s, 1), np.float32),
            **self.state, **adjust,
        }  # fmt: skip
        names = [o.name for o in self.session.get_outputs()]
        wanted = {i.name for i in self.session.get_inputs()}  # a model without coresets takes no top_p
        results = dict(zip(names, self.session.run(None, {n: v for n, v in feeds.items() if n in wanted}), strict=True))
        self.state = {name: results.pop(f"next.{name}") for name in self.state}
        self.positions = self.positions + commit
        return results

    def logits(self, tokens: Array, commit: int, **options: Any) -> Array:
        """Logits of one sequence's rows."""
        out: Array = self.step({0: (tokens, commit)}, **options)["logits"][0, : len(tokens)]
        return out


@lru_cache(maxsize=32)
def _opened(directory: Path) -> Any:
    built = Bundle.open(directory, verify=False)
    manifest = built.manifest
    index = read_weight_index(directory, [n for n in manifest.files if n.endswith(".safetensors")])
    options = DeviceGraphOptions(CAPACITY, manifest.excluded_token_ids, with_logits=True)
    model = build_portable_graph(manifest.config, manifest.precision_plan, index, directory, options)
    path = directory / "portable.onnx"
    path.write_bytes(model.SerializeToString())
    settings = ort.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = 1, 3
    session = ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    path.unlink()
    (directory / CONVERTED_FILE).unlink()
    return session


def portable(built: Bundle) -> Any:
    """The portable graph of a bundle's weights."""
    return _opened(built.directory)


def exact(checkpoint: Path) -> Bundle:
    return bundle(checkpoint, precision="fp32")


def tokens(seed: int, count: int, vocab: int = 318) -> Array:
    return np.random.default_rng(seed).integers(0, vocab, count)


@pytest.mark.parametrize("name", SHAPES)
def test_the_gpu_graph_equals_the_oracle(name: str) -> None:
    """Prefill, preview, commit with preview in one run, with padding rows; then one more row."""
    checkpoint = tiny_checkpoint(3, **SHAPES[name])
    oracle, session = load_oracle(checkpoint), PortableSession(exact(checkpoint))
    prompt, block = tokens(0, 45), np.where(np.arange(32) % 2, 319, tokens(1, 32))
    want, state = oracle.commit(prompt, oracle.initial_state())
    assert relative_error(session.logits(prompt, 45), want) <= TOLERANCE
    before = session.state
    assert relative_error(session.logits(block, 0, padded=40), oracle.preview(block, state)) <= TOLERANCE
    for kind, kept in before.items():
        if kind.startswith(("conv", "recurrent")):
            np.testing.assert_array_equal(session.state[kind], kept)
    both = session.logits(np.concatenate([tokens(2, 32), block]), 32)
    want, state = oracle.commit(tokens(2, 32), state)
    assert relative_error(both[:32], want) <= TOLERANCE
    assert relative_error(both[32:], oracle.preview(block, state)) <= TOLERANCE
    want, state = oracle.commit(tokens(3, 1), state)
    assert relative_error(session.logits(tokens(3, 1), 1), want) <= TOLERANCE


def test_sequences_side_by_side_equal_the_oracle() -> None:
    checkpoint = tiny_checkpoint(1)
    oracle, session = load_oracle(checkpoint), PortableSession(exact(checkpoint), sequences=3)
    prompts = [tokens(s, n) for s, n in enumerate((40, 7, 19))]
    states = [oracle.commit(p, oracle.initial_state())[1] for p in prompts]
    session.step({s: (p, len(p)) for s, p in enumerate(prompts)})
    block = np.full(16, 319)
    out = session.step({0: (block, 0), 1: (np.concatenate([tokens(5, 8), block]), 8), 2: (tokens(6, 3), 3)})["logits"]
    assert relative_error(out[0, :16], oracle.preview(block, states[0])) <= TOLERANCE
    want, state = oracle.commit(tokens(5, 8), states[1])
    assert relative_error(out[1, :8], want) <= TOLERANCE
    assert relative_error(out[1, 8:24], oracle.preview(block, state)) <= TOLERANCE
    assert relative_error(out[2, :3], oracle.commit(tokens(6, 3), states[2])[0]) <= TOLERANCE


@pytest.mark.parametrize("precision", ["bf16", "int4", "int4,embed=bf16,experts=bf16"])
def test_quantised_weights_mean_the_same_as_on_the_cpu(precision: str, tmp_path: Path) -> None:
    """The store's bytes, read as ONNX INT4 and bfloat16, against the CPU graph's own operators on them."""
    base, overrides = parse_precision(precision)
    checkpoint = tiny_checkpoint(2)
    request = BuildRequest(
        checkpoint, tmp_path / "bundle", precision=base, overrides=overrides, with_logits=True, exact_activations=True
    )
    built = build_target(request)
    cpu = open_session(built, max_context=128, threads=1, cache=False)
    gpu = PortableSession(built)
    prompt, block = tokens(0, 30), np.full(32, 319)
    got = gpu.logits(prompt, 30)
    want = cpu.step([rows(prompt, 30)])[0].logits
    assert want is not None and relative_error(got, want) <= 1e-4
    got = gpu.logits(block, 0)
    want = cpu.step([rows(block, 0)])[0].logits
    assert want is not None and relative_error(got, want) <= 1e-4


def test_a_top_p_of_its_own_for_every_call() -> None:
    checkpoint = tiny_checkpoint(6, num_experts=64, num_experts_per_tok=4)
    oracle = load_oracle(checkpoint)
    for top_p in (0.3, 0.9, 1.0):
        oracle.coreset_top_p = top_p
        session = PortableSession(exact(checkpoint))
        _, state = oracle.commit(tokens(0, 20), oracle.initial_state())
        session.logits(tokens(0, 20), 20)
        block = tokens(1, 32)
        assert relative_error(session.logits(block, 0, top_p=top_p), oracle.preview(block, state)) <= TOLERANCE


def test_the_head_gives_adjusted_candidates_and_raw_probabilities() -> None:
    checkpoint = tiny_checkpoint(1)
    session = PortableSession(exact(checkpoint))
    adjust: dict[str, Any] = {
        "adjust_ids": np.array([[5, 6]]), "adjust_scale": np.array([[2.0, 1.0]], np.float32), "adjust_bias": np.array([[0.0, 9.0]], np.float32),
    }  # fmt: skip
    out = session.step({0: (tokens(0, 9), 9)}, candidates=320, **adjust)
    raw = out["logits"][0].astype(np.float64)
    raw[:, 319] = -1e30  # the mask token is never chosen
    adjusted = raw.copy()
    adjusted[:, 5] = np.where(raw[:, 5] > 0, raw[:, 5] / 2, raw[:, 5] * 2)
    adjusted[:, 6] += 9.0
    order = np.argsort(-adjusted, axis=-1, kind="stable")
    np.testing.assert_array_equal(out["candidate_ids"][0], order)
    logprobs = raw - np.log(np.exp(raw).sum(-1, keepdims=True))
    np.testing.assert_allclose(
        out["candidate_logprobs"][0][:, :300], np.take_along_axis(logprobs, order, -1)[:, :300], rtol=1e-4, atol=1e-4
    )
    assert 319 not in out["candidate_ids"][0][:, :-1]


def test_an_engine_graph_keeps_the_types_tensorrt_needs() -> None:
    """What goes to the builder: bfloat16 activations, custom operators, no ONNX Runtime operators, function bodies."""
    built = bundle(tiny_checkpoint(2), precision="int4")
    manifest = built.manifest
    index = read_weight_index(built.directory, [n for n in manifest.files if n.endswith(".safetensors")])
    options = DeviceGraphOptions(CAPACITY, manifest.excluded_token_ids)
    model = build_device_graph(manifest.config, manifest.precision_plan, index, built.directory, options)
    path = built.directory / "checked.onnx"
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(path)
    for leftover in (path, built.directory / CONVERTED_FILE):
        leftover.unlink()
    kinds = Counter((n.domain, n.op_type) for n in model.graph.node)
    assert {domain for domain, _ in kinds} == {"", DOMAIN}
    assert {name for domain, name in kinds if domain == DOMAIN} == {op.name for op in OPERATORS}
    types = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    assert types["conv.0"] == types["keys.3"] == onnx.TensorProto.BFLOAT16
    assert types["recurrent.0"] == onnx.TensorProto.FLOAT
    assert types["expert_table.0"] == onnx.TensorProto.INT64
    assert {f.name for f in model.functions} == {"BidirectionalGatedDeltaNet", "MoECoresetRouting"}
    widest = max(len(t.raw_data) for t in model.graph.initializer)
    assert widest <= 4096, "weights stand in files, not in the graph"


@pytest.mark.parametrize(("limit", "dtype"), [(65504.0, "FLOAT16"), (10.0, "BFLOAT16")])
def test_an_int4_head_is_float16_only_where_nothing_overflows(
    limit: float, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clover.exporter.graph.tensorrt.layers.FLOAT16_MAX", limit)
    built = bundle(tiny_checkpoint(2), precision="int4")
    manifest = built.manifest
    (tmp_path / "weights").symlink_to(built.directory / "weights")
    index = read_weight_index(tmp_path, [n for n in manifest.files if n.endswith(".safetensors")])
    model = build_device_graph(manifest.config, manifest.precision_plan, index, tmp_path, DeviceGraphOptions(CAPACITY))
    (scales,) = (t for t in model.graph.initializer if t.name.startswith("lm_head.scales"))
    assert scales.data_type == onnx.TensorProto.DataType.Value(dtype)
    onnx.external_data_helper.load_external_data_for_tensor(scales, str(tmp_path))
    stored = index["lm_head.scales"]
    want = np.fromfile(built.directory / stored.file, np.float32, stored.nbytes // 4, offset=stored.offset)
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(scales).astype(np.float32).ravel(), want)


def test_a_negative_scale_is_refused_by_name(tmp_path: Path) -> None:
    built = bundle(tiny_checkpoint(2), precision="int4")
    manifest = built.manifest
    shutil.copytree(built.directory / "weights", tmp_path / "weights")
    index = read_weight_index(tmp_path, [n for n in manifest.files if n.endswith(".safetensors")])
    stored = index["layers.1.gdn.out_proj.scales"]
    with (tmp_path / stored.file).open("r+b") as file:
        file.seek(stored.offset)
        file.write(np.float32(-0.5).tobytes())
    with pytest.raises(CloverError, match=r"layers\.1\.gdn\.out_proj has negative scales"):
        build_device_graph(manifest.config, manifest.precision_plan, index, tmp_path, DeviceGraphOptions(64))


def test_a_precision_gpus_do_not_have_is_refused() -> None:
    built = bundle(tiny_checkpoint(2), precision="fp32")
    manifest = built.manifest
    with pytest.raises(CloverError, match="embed=fp32 is not available on GPUs"):
        build_device_graph(
            read_config(tiny_checkpoint(2), ()), manifest.precision_plan, {}, built.directory, DeviceGraphOptions(64)
        )
