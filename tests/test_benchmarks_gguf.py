"""The GGUF file that llama.cpp is fed holds a bundle's own numbers, in the places llama.cpp looks for them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clover.engines.build import BuildRequest, build_target
from clover.engines.bundle import Bundle
from clover.engines.validate.bundle_tensors import BundleTensors, WeightStore

gguf = pytest.importorskip("gguf")
REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", params=["int4", "fp32"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bundle, Any]]:
    spec = importlib.util.spec_from_file_location("gguf_bundle", REPOSITORY / "benchmarks" / "gguf_bundle.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gguf_bundle"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp(request.param)
    build_target(BuildRequest(REPOSITORY / "examples" / "nano", folder / "bundle", precision=request.param))
    bundle = Bundle.open(folder / "bundle")
    assert module.write_gguf(bundle, folder / "model.gguf") < 1e-3
    yield bundle, gguf.GGUFReader(folder / "model.gguf")


def heads_tiled(rows: np.ndarray, keys: int, values: int) -> np.ndarray:
    """Rows of value heads, grouped by key head, as ggml's cyclic broadcast pairs them: head v goes with key v mod keys."""
    grouped = rows.reshape(values, -1, *rows.shape[1:])
    return np.concatenate([grouped[(v % keys) * (values // keys) + v // keys] for v in range(values)])


def test_tensors_are_the_bundles(written: tuple[Bundle, Any]) -> None:
    bundle, reader = written
    c = bundle.manifest.config
    ours = BundleTensors(WeightStore(bundle))
    theirs = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    keys, values = c.linear_num_key_heads, c.linear_num_value_heads
    same: dict[str, np.ndarray] = {
        "token_embd.weight": ours["model.embed_tokens.weight"],
        "output.weight": ours["lm_head.weight"],
        "output_norm.weight": ours["model.norm.weight"] + 1,
    }
    for n, kind in enumerate(c.layer_types):
        p, g = f"model.layers.{n}.", f"blk.{n}."
        gate_up, half = ours[f"{p}mlp.experts.gate_up_proj"], c.moe_intermediate_size
        same[f"{g}ffn_gate_exps.weight"], same[f"{g}ffn_up_exps.weight"] = gate_up[:, :half], gate_up[:, half:]
        same[f"{g}ffn_down_exps.weight"] = ours[f"{p}mlp.experts.down_proj"]
        same[f"{g}ffn_gate_inp.weight"] = ours[f"{p}mlp.gate.weight"]
        same[f"{g}ffn_up_shexp.weight"] = ours[f"{p}mlp.shared_expert.up_proj.weight"]
        if kind == "full_attention":
            for name, source in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj")):
                same[f"{g}attn_{name}.weight"] = ours[f"{p}self_attn.{source}.weight"]
            continue
        s = f"{p}linear_attn."
        qkv = ours[f"{s}in_proj_qkv.weight"]
        first = 2 * c.key_width
        same[f"{g}attn_qkv.weight"] = np.concatenate([qkv[:first], heads_tiled(qkv[first:], keys, values)])
        for name, source in (("attn_gate", "z"), ("ssm_alpha", "a"), ("ssm_beta", "b")):
            same[f"{g}{name}.weight"] = heads_tiled(ours[f"{s}in_proj_{source}.weight"], keys, values)
        same[f"{g}ssm_out.weight"] = heads_tiled(ours[f"{s}out_proj.weight"].T, keys, values).T
        same[f"{g}ssm_a"] = heads_tiled(-np.exp(ours[f"{s}A_log"]), keys, values)
        same[f"{g}ssm_dt.bias"] = heads_tiled(ours[f"{s}dt_bias"], keys, values)
    for name, expected in same.items():
        np.testing.assert_allclose(theirs[name], expected, rtol=2e-3, atol=1e-7, err_msg=name)
