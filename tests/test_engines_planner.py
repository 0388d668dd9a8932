"""The planner: exact parameter counts, what fits where, sums and monotonicity, and the estimates against themselves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from clover.engines.gpus import custom_gpu, find_gpu
from clover.engines.planner import (
    FULL_SIZE,
    Plan,
    RoutingAssumptions,
    count_parameters,
    parameter_class,
    plan,
    plan_command,
)
from clover.engines.planner import memory as memory_module
from clover.engines.planner.parameters import checkpoint_tensors
from clover.engines.planner.roofline import block_seconds, break_even
from clover.engines.planner.routing import coreset_distinct, expected_distinct, hit_rate, union_distinct
from clover.exporter.config import ModelConfig
from clover.exporter.precision import Precision, PrecisionPlan, TensorClass, plan_precision
from clover.exporter.store_plan import store_plan
from clover.runtime.errors import CloverError

GIB = 2**30
NANO = replace(
    FULL_SIZE, vocab_size=768, hidden_size=128, num_hidden_layers=4,
    layer_types=("linear_attention", "full_attention") * 2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32, num_experts=16,
    num_experts_per_tok=4, moe_intermediate_size=64, shared_expert_intermediate_size=64, max_position_embeddings=4096,
    coreset_min_experts=4, history_readout_scale=0.0,
)  # fmt: skip


def precision_of(base: Precision, config: ModelConfig = FULL_SIZE, **overrides: Precision) -> PrecisionPlan:
    return plan_precision(config, base, cast(dict[TensorClass, Precision], overrides))


def full(gpu: str, base: Precision = "int4", **options: Any) -> Plan:
    return plan(FULL_SIZE, find_gpu(gpu), precision_of(base), **options)


def component(result: Plan, name: str) -> int:
    return next(c.nbytes for c in (*result.placement.device, *result.placement.host) if c.name == name)


# -- parameters ------------------------------------------------------------------------------------


def test_full_size_counts_are_exact() -> None:
    """From the published table of shapes, multiplied out by hand."""
    counts = count_parameters(FULL_SIZE)
    gdn = 8192 * 2048 + 4096 * 2048 + 2048 * 4096
    gdn_small = 2 * 32 * 2048 + 8192 * 4 + 8192 * 3 + 128 + 5 * 32
    attention, attention_small = 8192 * 2048 + 2 * 512 * 2048 + 2048 * 4096, 2 * 256
    experts, shared = 256 * (1024 * 2048 + 2048 * 512), 3 * 512 * 2048
    assert counts.by_class == {
        "embed": 248320 * 2048,
        "lm_head": 248320 * 2048,
        "attention": 10 * attention,
        "gdn": 30 * gdn,
        "shared_expert": 40 * shared,
        "experts": 40 * experts,
        "router": 40 * 256 * 2048,
        "small": 30 * gdn_small + 10 * attention_small + 40 * (2048 + 2 * 2048) + 2048,
    }
    assert counts.total == 34_661_350_848
    assert (counts.experts, counts.per_expert) == (10_240, 3 * 512 * 2048)
    assert 2.9e9 < counts.active(FULL_SIZE) < 3.0e9


@pytest.mark.parametrize("config", [FULL_SIZE, NANO])
def test_counts_agree_with_the_weight_store(config: ModelConfig) -> None:
    """The exporter's list of tensors was written independently: same parameters, and same bytes on the CPU."""
    for base in ("fp32", "int8", "int4"):
        precision = precision_of(base, config)
        items = store_plan(config, precision)
        counts = count_parameters(config)
        for kind in ("embed", "lm_head", "attention", "gdn", "shared_expert", "experts"):
            assert sum(math.prod(i.shape) for i in items if i.tensor_class == kind) == counts.by_class[kind]
        assert sum(math.prod(i.shape) for i in items) == counts.total
        stored = sum(t.nbytes for i in items for t in i.tensors())
        assert memory_module.weights_of(config, precision, "onnxruntime").total == stored


def test_names_have_classes_in_both_layouts_and_vision_has_none() -> None:
    for tensor in checkpoint_tensors(FULL_SIZE):
        other = tensor.name.replace("model.", "model.language_model.", 1)
        assert parameter_class(tensor.name) == parameter_class(other) == tensor.parameter_class, tensor.name
    assert parameter_class("model.layers.3.mlp.experts.17.up_proj.weight") == "experts"
    for ignored in (
        "mtp.layers.0.self_attn.q_proj.weight",
        "visual.blocks.0.attn.qkv.weight",
        "model.visual.merger.weight",
    ):
        assert parameter_class(ignored) is None


def test_a_real_checkpoint_holds_what_is_counted() -> None:
    """The nano model of the examples: every tensor's class by name, and the sizes of the classes by shape."""
    directory = Path(__file__).parent.parent / "examples" / "nano"
    with (directory / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    counts: dict[str | None, int] = dict.fromkeys(count_parameters(NANO).by_class, 0)
    for name, tensor in header.items():
        if name != "__metadata__":
            counts[parameter_class(name)] += math.prod(tensor["shape"])
    config = ModelConfig.load(directory)
    assert counts == count_parameters(config).by_class
    data, _ = plan_command(directory, gpu="5070ti", precision="int4")
    assert data["fits"] and data["parameters"]["total"] == sum(counts.values())
    assert data["shape"]["max_context"] == min(8192, config.max_position_embeddings)


def test_tied_head_is_counted_once() -> None:
    tied = count_parameters(replace(FULL_SIZE, tie_word_embeddings=True))
    assert tied.total == count_parameters(FULL_SIZE).total - 248320 * 2048
    assert tied.active(FULL_SIZE) == count_parameters(FULL_SIZE).active(FULL_SIZE)


# -- what fits -------------------------------------------------------------------------------------


def test_states_have_the_published_sizes() -> None:
    assert memory_module.recurrent_bytes(FULL_SIZE) == 62_914_560
    assert memory_module.conv_ring_bytes(FULL_SIZE, "tensorrt") == 1_474_560
    assert memory_module.kv_bytes_per_token(FULL_SIZE, "tensorrt") == 20_480
    assert memory_module.kv_bytes_per_token(FULL_SIZE, "onnxruntime") == 40_960
    assert memory_module.bits_per_weight("int4", 128, "tensorrt-rtx") == 4.125
    assert memory_module.weights_of(FULL_SIZE, precision_of("int4"), "tensorrt-rtx").per_expert == 1_622_016


def test_bf16_does_not_fit_16_gb_and_says_what_would() -> None:
    result = full("5070ti", "bf16")
    assert not result.fits and not result.performance
    assert result.weights.total == pytest.approx(69.3e9, rel=2e-3)
    problem = result.problem or ""
    assert (
        "17.2 GB" in problem and "--precision int4" in problem and "GiB of RAM" in problem and "--gpu h100" in problem
    )
    with pytest.raises(CloverError, match="--precision int4"):
        result.require_fit()
    # The advice is right: each of the three does fit.
    assert full("5070ti", "int4").fits and full("h100", "bf16").placement.experts_host == 0
    assert full("5070ti", "bf16", host_memory=100 * GIB).fits


def test_int4_fits_a_5070_ti_with_some_experts_on_the_host() -> None:
    result = full("5070ti")
    assert result.weights.total == pytest.approx(17.95e9, rel=2e-3)  # 17.9 GB and the float32 routers
    placement = result.placement
    assert result.fits and 500 < placement.experts_host < 2500
    assert placement.experts_resident + placement.experts_host == 10_240
    assert result.largest_context == 131_072 and result.largest_context_on_card == 0
    denoise = result.performance[0].denoise
    share = placement.experts_host / 10_240
    expected = share * denoise.distinct * 40 * 1_622_016
    assert denoise.host_expert_bytes == pytest.approx(expected, rel=1e-6)
    assert denoise.link_seconds == pytest.approx(expected / 63e9, rel=1e-6)
    assert any(f"{placement.experts_host:,} experts" in n and "PCIe 5.0" in n and " ms" in n for n in result.notes)
    assert any("Zipf skew 0" in a and "worst case" in a for a in result.assumptions)


@pytest.mark.parametrize(
    ("gpu", "base"), [("h200", "bf16"), ("4090", "int4"), ("5090", "int4"), ("pro6000", "bf16"), ("h100", "bf16")]
)
def test_larger_cards_hold_every_expert(gpu: str, base: Precision) -> None:
    result = full(gpu, base)
    assert result.fits and result.placement.experts_host == 0 and result.placement.host == ()
    assert result.performance[0].denoise.host_expert_bytes == 0 and result.largest_context_on_card == 131_072


def test_resident_experts_is_a_limit_and_int8_on_16_gb_needs_host_memory() -> None:
    assert full("h200", resident_experts=1000).placement.experts_host == 9240
    assert not full("5070ti", "int8").fits  # 33 GB: half of it would have to be pinned
    assert full("5070ti", "int8", host_memory=64 * GIB).fits


def test_cpu_target_is_all_or_nothing() -> None:
    small, large = (plan(FULL_SIZE, find_gpu("cpu"), precision_of("int4"), host_memory=n * GIB) for n in (16, 32))
    assert large.fits and large.backend == "onnxruntime" and large.placement.host == ()
    assert not small.fits and "RAM" in (small.problem or "")
    assert component(large, "routed experts") == 10_240 * 3_145_728 * 4.25 / 8
    widened = memory_module.weights_of(FULL_SIZE, precision_of("bf16"), "onnxruntime").total
    assert widened == 4 * count_parameters(FULL_SIZE).total


def test_many_sequences_fail_with_the_number_that_fits() -> None:
    result = full("5070ti", sequences=64, max_context=131_072)
    assert not result.fits
    for advice in result.suggestions:
        option, value = advice.split()[:2]
        if option == "--sequences":
            assert full("5070ti", sequences=int(value), max_context=131_072).fits
            assert not full("5070ti", sequences=int(value) + 1, max_context=131_072).fits
        if option == "--max-context":
            assert full("5070ti", sequences=64, max_context=int(value)).fits
            assert not full("5070ti", sequences=64, max_context=int(value) + 1).fits
    assert {a.split()[0] for a in result.suggestions} >= {"--sequences", "--max-context"}


def test_options_that_cannot_be_honoured_are_named() -> None:
    for options, message in (
        ({"max_context": 200_000}, "131072"),
        ({"max_context": 0}, "--max-context 0"),
        ({"sequences": 0}, "--sequences"),
        ({"block_sizes": (7,)}, "block size 7"),
        ({"resident_experts": 20_000}, "10240"),
        ({"backend": "onnxruntime"}, "--gpu cpu"),
        ({"routing": RoutingAssumptions(distinct=4)}, "at least 8"),
    ):
        with pytest.raises(CloverError, match=message):
            full("5090", **options)
    with pytest.raises(CloverError, match="between 0 and 1"):
        RoutingAssumptions(hit_rate=1.5)


# -- properties ------------------------------------------------------------------------------------

CARDS = st.integers(8, 200).map(lambda n: custom_gpu(120, n * GIB))
BASES: st.SearchStrategy[Precision] = st.sampled_from(["bf16", "int8", "int4"])


@settings(max_examples=40, deadline=None)
@given(
    CARDS, BASES, st.integers(1, 131_072), st.integers(1, 131_072), st.integers(1, 8), st.sampled_from([8, 16, 32, 64])
)
def test_sums_and_monotonicity(gpu: Any, base: Precision, a: int, b: int, sequences: int, block: int) -> None:
    short, long = sorted((a, b))
    options: dict[str, Any] = {"sequences": sequences, "block_sizes": (block,), "host_memory": 256 * GIB}
    less, more = (plan(FULL_SIZE, gpu, precision_of(base), max_context=n, **options) for n in (short, long))
    for result in (less, more):
        p = result.placement
        assert p.device_total == sum(c.nbytes for c in p.device) and p.host_total == sum(c.nbytes for c in p.host)
        assert all(c.nbytes >= 0 for c in (*p.device, *p.host))
        assert result.fits == (p.device_total <= p.device_capacity and p.host_total <= p.host_capacity)
        assert p.experts_resident + p.experts_host == result.experts_total
        # Nothing is forgotten and nothing counted twice: both places together hold the weights once.
        weights = sum(c.nbytes for c in (*p.device, *p.host) if "weights" in c.name or "experts" in c.name)
        weights += component(result, "embedding") + component(result, "output head") + component(result, "routers")
        assert weights == result.weights.total
        assert result.fits == (result.problem is None)
        assert result.largest_context_on_card <= result.largest_context
        assert result.fits == (result.shape.max_context <= result.largest_context)
    assert more.placement.experts_resident <= less.placement.experts_resident
    assert component(more, "KV cache") - component(less, "KV cache") == sequences * (long - short) * 20_480
    assert less.fits or not more.fits
    if less.performance and more.performance:
        assert more.performance[0].denoise.seconds >= less.performance[0].denoise.seconds


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 256), st.floats(8, 256), st.floats(0, 2))
def test_hit_rate_is_a_rate_and_grows_with_residents_and_skew(resident: int, distinct: float, skew: float) -> None:
    rate = hit_rate(256, resident, distinct, skew)
    assert 0 <= rate <= 1 and rate <= hit_rate(256, min(256, resident + 7), distinct, skew) + 1e-9
    assert rate >= resident / 256 - 1e-9  # the most used ones are hit at least as often as any others
    assert hit_rate(256, resident, distinct, 0.0) == pytest.approx(resident / 256)


# -- estimates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_simulated_routing_agrees_with_balls_in_bins(rows: int) -> None:
    """Uniform routing without a coreset has an exact expectation."""
    assert coreset_distinct(256, 8, rows, 2.0, 256, 0.0) == pytest.approx(expected_distinct(256, 8, rows), rel=0.02)


def test_coreset_makes_the_set_smaller_the_more_skewed_routing_is() -> None:
    sizes = [coreset_distinct(256, 8, 32, 0.9, 8, skew) for skew in (0.0, 0.5, 1.0, 1.5, 2.0)]
    assert sizes == sorted(sizes, reverse=True) and 8 <= sizes[-1] < 12 and sizes[0] < expected_distinct(256, 8, 32)
    assert coreset_distinct(256, 8, 32, 0.5, 8, 1.0) < coreset_distinct(256, 8, 32, 0.9, 8, 1.0)
    assert coreset_distinct(256, 8, 32, 0.01, 8, 1.0) == 8
    assert union_distinct(256, 64.0) == pytest.approx(64) and union_distinct(256, 128.0, 128.0) == pytest.approx(192)


def test_coreset_simulation_follows_the_rule_row_by_row() -> None:
    """The vectorised simulation against the rule written out, on the same draws."""
    experts, top_k, rows, top_p, skew = 32, 4, 8, 0.8, 0.7
    from clover.engines.planner.routing import SIMULATED_ROWS

    rng = np.random.default_rng(20260530)
    logits = -skew * np.log(np.arange(1, experts + 1)) + rng.gumbel(size=(SIMULATED_ROWS // rows, rows, experts))
    counts = []
    for block in logits:
        p = np.exp(block) / np.exp(block).sum(-1, keepdims=True)
        votes = np.zeros(experts)
        for row in p:
            for e in sorted(range(experts), key=lambda e: -row[e])[:top_k]:
                votes[e] += row[e]
        chosen, share = list[int](), 0.0
        for e in sorted(range(experts), key=lambda e: -votes[e]):
            if share >= top_p and len(chosen) >= top_k:
                break
            chosen.append(e)
            share += votes[e] / votes.sum()
        counts.append(len({e for row in p for e in sorted(chosen, key=lambda e: -row[e])[:top_k]}))
    assert coreset_distinct(experts, top_k, rows, top_p, top_k, skew) == pytest.approx(np.mean(counts))


def test_break_even_is_where_both_take_as_long() -> None:
    n = break_even(32, 3.0, 7.0, 1.0)
    assert n is not None and block_seconds(32, n, 3.0, 7.0) == pytest.approx(32 * 1.0)
    assert break_even(32, 3.0, 7.0, 0.1) is None  # the one run of a block costs more than 32 plain steps
    assert break_even(32, 1.0, 1.0, 10.0) == 1.0


def test_a_step_reads_what_it_must_and_tables_follow() -> None:
    result = full("h200", "bf16", max_context=1024, block_sizes=(16, 32))
    assert [b.block_size for b in result.performance] == [16, 32]
    b = result.performance[1]
    # One row: all dense weights but the embedding, top-8 experts, state read and written, KV, logits.
    sizes = result.weights.by_class
    dense = sum(sizes[k] for k in ("attention", "gdn", "shared_expert", "router", "small", "lm_head")) + 2048 * 2
    dense += 2 * 62_914_560 + 1025 * 20_480 + 2 * 248_320 * 4
    assert b.autoregressive.dense_bytes == dense
    assert b.autoregressive.card_expert_bytes == 8 * 40 * 6_291_456
    # Two operations per active weight, more or less: states and attention add a little.
    active = result.counts.active(FULL_SIZE)
    assert 2 * active < b.autoregressive.dense_flops + b.autoregressive.expert_flops < 2.2 * active
    assert b.denoise.bound == "memory" and b.denoise.seconds < b.commit_and_preview.seconds
    assert b.denoise.seconds == pytest.approx((b.denoise.dense_bytes + b.denoise.card_expert_bytes) / 4.8e12)
    for row in b.throughput:
        assert list(row.tokens_per_second) == sorted(row.tokens_per_second)
    columns = list(zip(*(r.tokens_per_second for r in b.throughput), strict=True))
    assert all(list(c) == sorted(c, reverse=True) for c in columns)
    expected = next(r for r in b.throughput if r.expected)
    assert expected.tokens_per_second[-1] == pytest.approx(32 / b.commit_and_preview.seconds)
    assert b.break_even is not None and 1 < b.break_even < 8
    # Sequences share the weights: twice the sequences cost less than twice the time.
    two = full("h200", "bf16", max_context=1024, sequences=2).performance[0]
    assert b.denoise.seconds < two.denoise.seconds < 2 * b.denoise.seconds


def test_measured_routing_replaces_assumptions() -> None:
    given_ = RoutingAssumptions(distinct=20, hit_rate=0.95)
    result = full("5070ti", routing=given_)
    denoise = result.performance[0].denoise
    assert (denoise.distinct, denoise.hit_rate) == (20, 0.95)
    assert denoise.host_expert_bytes == pytest.approx(0.05 * 20 * 40 * 1_622_016)
    assert any("20 distinct" in a for a in result.assumptions) and any("95%" in a for a in result.assumptions)
    skewed = full("5070ti", routing=RoutingAssumptions(popularity_skew=1.0))
    assert skewed.performance[0].denoise.hit_rate > full("5070ti").performance[0].denoise.hit_rate


# -- command ---------------------------------------------------------------------------------------


def test_command_gives_json_and_a_table() -> None:
    data, renderable = plan_command(
        gpu="RTX 5070 Ti", precision="int4", overrides={"embed": "bf16"}, max_context=4096, block_sizes=(8, 32)
    )
    again = json.loads(json.dumps(data))
    assert again["fits"] and again["weight_bytes"]["by_class"]["embed"] == 248320 * 2048 * 2
    assert again["memory"]["device_total"] == sum(c["nbytes"] for c in again["memory"]["device"])
    out = StringIO()
    Console(file=out, width=160).print(renderable)
    text = out.getvalue()
    for words in (
        "experts on the host",
        "KV cache",
        "CUDA context",
        "headroom",
        "break",
        "tokens per step",
        "assumed:",
        "note:",
    ):
        assert words.replace("break", "Blocks are faster") in text
    with pytest.raises(CloverError, match="did you mean"):
        plan_command(gpu="5070tj")
    with pytest.raises(CloverError, match="--host-memory"):
        plan_command(gpu="5070ti", host_memory="lots")


def test_command_on_this_machine_uses_its_memory() -> None:
    data, _ = plan_command(gpu="cpu", precision="int4")
    assert any("GiB of RAM" in a for a in data["assumptions"])


def test_tiny_model_fits_everywhere() -> None:
    for gpu in ("5070", "cpu", "h200"):
        result = plan(NANO, find_gpu(gpu), precision_of("int4", NANO), max_context=4096)
        assert result.fits and result.placement.experts_host == 0 and result.largest_context == 4096
