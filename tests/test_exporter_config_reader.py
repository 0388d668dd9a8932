from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle_support import load_oracle, tiny_checkpoint

from clover.exporter.config import ModelConfig
from clover.exporter.config_reader import read_config, require_mask_token
from clover.runtime.errors import CheckpointError

FULL: dict[str, Any] = {
    "model_type": "clover_moe", "architectures": ["CloverMoeModelLM"], "transformers_version": "5.24.0",
    "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "attention_bias": False,
    "attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32", "full_attention_interval": 4,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                        "mrope_section": [11, 11, 10], "mrope_interleaved": True},
    "block_size": 32, "mask_token_id": 248319, "eos_token_id": 248044,
    "moe_block_coreset": {"enabled": True, "top_p": 0.9},
}  # fmt: skip
CLOVER_FIELDS = ("model_type", "block_size", "mask_token_id", "eos_token_id", "moe_block_coreset")


def write(directory: Path, config: Any, **others: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, value in others.items():
        (directory / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return directory


def without(*names: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in FULL.items() if k not in names} | changes


def test_full_size_model(tmp_path: Path) -> None:
    c = read_config(write(tmp_path, FULL))
    assert (len(c.gdn_layers), c.attention_layers) == (30, tuple(range(3, 40, 4)))
    assert (c.rotary_dim, c.conv_channels, c.rope_theta) == (64, 8192, 1e7)
    assert (c.coreset_top_p, c.coreset_min_experts, c.history_readout_scale) == (0.9, 8, 128**-0.5)
    assert (c.block_size, c.mask_token_id, c.eos_token_ids, c.align_blocks) == (32, 248319, (248044,), False)
    assert ModelConfig.from_json(json.loads(json.dumps(c.to_json()))) == c


def test_fields_may_stand_under_text_config(tmp_path: Path) -> None:
    text = {k: v for k, v in FULL.items() if k not in CLOVER_FIELDS} | {"model_type": "qwen3_5_moe_text"}
    clover = {k: FULL[k] for k in CLOVER_FIELDS}
    nested = clover | {"text_config": text, "vision_config": {"depth": 27}, "image_token_id": 5}
    inner = {"model_type": "clover_moe", "text_config": text | {k: clover[k] for k in CLOVER_FIELDS[1:]}}
    expected = read_config(write(tmp_path, FULL))
    assert read_config(write(tmp_path, nested)) == expected
    assert read_config(write(tmp_path, inner)) == expected


def test_tiny_checkpoint_agrees_with_the_oracle() -> None:
    directory = tiny_checkpoint(config={"history_readout_scale": 0.5, "moe_block_coreset": {"enabled": False}})
    c, oracle = ModelConfig.load(directory), load_oracle(directory)
    assert list(c.layer_types) == oracle.layer_types
    assert (c.rope_theta, c.rotary_dim, c.rms_norm_eps) == (oracle.rope_theta, oracle.rotary_dim, oracle.eps)
    assert (c.history_readout_scale, c.coreset_enabled) == (oracle.history_scale, oracle.coreset_enabled)


def test_rope_in_the_old_places_and_its_defaults(tmp_path: Path) -> None:
    old = without("rope_parameters", rope_theta=5e6, partial_rotary_factor=0.5, rope_scaling=None)
    c = read_config(write(tmp_path, old))
    assert (c.rope_theta, c.partial_rotary_factor) == (5e6, 0.5)
    c = read_config(write(tmp_path, without("rope_parameters")))
    assert (c.rope_theta, c.partial_rotary_factor) == (10_000.0, 0.25)


def test_generation_config_adds_ends_and_fills_gaps(tmp_path: Path) -> None:
    generation = {"eos_token_id": [248046, 248044], "mask_token_id": 7, "block_size": 16, "threshold": 0.9}
    c = read_config(write(tmp_path, without("mask_token_id", "block_size"), generation_config=generation))
    assert (c.eos_token_ids, c.mask_token_id, c.block_size) == ((248046, 248044), 7, 16)
    c = read_config(write(tmp_path, FULL, generation_config=generation))
    assert (c.eos_token_ids, c.mask_token_id, c.block_size) == ((248046, 248044), 248319, 32)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer": {"added_tokens": [{"id": 4, "content": "<x>"}, {"id": 9, "content": "<|mask|>"}]}}, 9),
        (
            {
                "tokenizer_config": {"mask_token": {"content": "<M>"}},
                "tokenizer": {"added_tokens": [{"id": 9, "content": "<|mask|>"}, {"id": 5, "content": "<M>"}]},
            },
            5,
        ),
        ({"tokenizer_config": {"mask_token": "<M>", "added_tokens_decoder": {"6": {"content": "<M>"}}}}, 6),
        ({"tokenizer": {"added_tokens": [{"id": 4, "content": "<mask>"}]}}, None),
        ({}, None),
    ],
)
def test_mask_token_of_the_tokenizer(tmp_path: Path, files: dict[str, Any], expected: int | None) -> None:
    c = read_config(write(tmp_path, without("mask_token_id"), **files))
    assert c.mask_token_id == expected
    if expected is None:
        with pytest.raises(CheckpointError, match=r"mask_token_id is in none of config\.json"):
            require_mask_token(c)
    else:
        assert require_mask_token(c) == expected


def test_unknown_fields_are_refused_until_ignored(tmp_path: Path) -> None:
    write(tmp_path, FULL | {"history_decay": 0.5, "text_config": {"router_bias": True}})
    with pytest.raises(CheckpointError, match=r"unknown fields history_decay, router_bias.*--ignore-config-field"):
        read_config(tmp_path)
    c = read_config(tmp_path, ignore=["router_bias", "history_decay"])
    assert c.unknown_fields == ("history_decay", "router_bias")
    with pytest.raises(CheckpointError, match="--ignore-config-field rope names no unknown field"):
        read_config(tmp_path, ignore=["router_bias", "history_decay", "rope"])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", r"is not valid JSON"),
        ("[1]", r"holds a list, not a JSON object"),
        (without("model_type"), "model_type is missing"),
        (without(model_type="qwen3_5_moe"), "model_type is 'qwen3_5_moe', not 'clover_moe'"),
        (without(text_config={"model_type": "llama"}), "text_config.model_type is 'llama'"),
        (without(text_config=3), "text_config is 3, not an object"),
        (without("head_dim"), "head_dim is missing"),
        (without("eos_token_id"), "eos_token_id is missing"),
        (without(hidden_size="2048"), "hidden_size is '2048', not an integer"),
        (without(hidden_size=True), "hidden_size is True, not an integer"),
        (without(hidden_size=2048.0), "hidden_size is 2048.0, not an integer"),
        (without(num_experts=0), "num_experts is 0, not an integer of at least 1"),
        (without(num_hidden_layers=10**9), "num_hidden_layers is 1000000000, more than 4096"),
        (without(rms_norm_eps=-1e-6), "rms_norm_eps is -1e-06, not a number above 0"),
        (without(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
        (without(hidden_act="gelu"), "hidden_act is 'gelu', and only 'silu' or 'swish' is implemented"),
        (without(attention_bias=True), "attention_bias is True, and only False"),
        (without(attention_bias=0), "attention_bias is 0, and only False"),
        (without(history_readout_scale=float("inf")), "history_readout_scale is inf, not a positive number"),
        (without(attn_output_gate=False), "attn_output_gate is False, and only True"),
        (without(output_gate_type="sigmoid"), "output_gate_type is 'sigmoid'"),
        (without(quantization_config={"quant_method": "fp8"}), r"quantization_config\.quant_method is 'fp8'"),
        (without(num_key_value_heads=3), "num_attention_heads 16 is not a multiple of num_key_value_heads 3"),
        (without(linear_num_value_heads=33), "linear_num_value_heads 33 is not a multiple of linear_num_key_heads 16"),
        (without(layer_types=["full_attention"]), "layer_types has 1 entries for num_hidden_layers 40"),
        (without(layer_types=["mamba"] * 40), "layer_types holds 'mamba'"),
        (without(layer_types="full_attention"), "layer_types is 'full_attention', not a list"),
        (without(head_dim=6), "head_dim 6 with partial_rotary_factor 0.25 rotates 1 dimensions"),
        (without(linear_conv_kernel_dim=1), "linear_conv_kernel_dim is 1, too short"),
        (without(num_experts_per_tok=300), "num_experts_per_tok 300 is more than num_experts 256"),
        (without(mask_token_id=248320), "mask_token_id 248320 is not below vocab_size 248320"),
        (without(mask_token_id=248044), "mask_token_id 248044 is also an eos_token_id"),
        (without(mask_token_id=-1), "mask_token_id is -1, not an integer of at least 0"),
        (without(eos_token_id=["</s>"]), r"eos_token_id is \['</s>'\], not a token id"),
        (without(rope_parameters={"rope_type": "yarn"}), "rope_parameters.rope_type is 'yarn', and only 'default'"),
        (without(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling.factor is not a known field"),
        (without(rope_theta=1e6), "rope_parameters.rope_theta is 10000000.0 but rope_theta is 1000000.0"),
        (without(text_config={"hidden_size": 64}), "hidden_size is 2048 at the root but 64 under text_config"),
        (
            without(moe_block_coreset={"top_p": 1.5}),
            "moe_block_coreset.top_p is 1.5, not a number above 0 and at most 1",
        ),
        (without(moe_block_coreset={"top_k": 4}), "moe_block_coreset.top_k is not a known field"),
        (without(moe_block_coreset={"min_experts": 4}), "min_experts 4 is not between num_experts_per_tok 8"),
        (without(history_readout_scale=0), "history_readout_scale is 0, not a positive number"),
        (without(align_blocks="yes"), "align_blocks is 'yes', not true or false"),
    ],
)
def test_bad_configs_are_named(tmp_path: Path, config: Any, says: str) -> None:
    write(tmp_path, config)
    with pytest.raises(CheckpointError, match=says) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_every_problem_is_in_one_error(tmp_path: Path) -> None:
    write(tmp_path, without("head_dim", "vocab_size", hidden_act="relu", num_experts=None, new_gate=1))
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    for part in ("head_dim", "vocab_size", "hidden_act", "num_experts is missing", "new_gate"):
        assert str(caught.value).count(part) >= 1
    assert str(caught.value).count("vocab_size") == 1  # and no follow-on complaints


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is this a checkpoint directory"):
        read_config(tmp_path / "nowhere")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*FULL, "text_config", "layer_types", "rope_scaling"]), JSON, max_size=3), JSON)
def test_nonsense_is_an_error_or_a_config_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], generation: Any
) -> None:
    directory = write(tmp_path_factory.getbasetemp() / "nonsense", FULL | changes, generation_config=generation)
    try:
        config = read_config(directory)
    except CheckpointError:
        return
    assert len(config.layer_types) == config.num_hidden_layers
