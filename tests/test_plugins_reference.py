"""The NumPy references of the custom ops against the oracle, ONNX Runtime and the invariants of the mathematics."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracle_support import oracle_module

from clover.plugins.bidirectional_gdn import reference as gdn
from clover.plugins.bidirectional_gdn.spec import SPEC as GDN_SPEC
from clover.plugins.bidirectional_gdn.spec import GatedDeltaNetAttributes
from clover.plugins.moe_coreset_routing.reference import moe_coreset_routing
from clover.plugins.moe_coreset_routing.spec import EXCLUDED_LOGIT, CoresetAttributes
from clover.plugins.moe_coreset_routing.spec import SPEC as ROUTING_SPEC
from clover.plugins.moe_experts.reference import dequantize_int4, moe_experts, route
from clover.plugins.moe_experts.spec import SPEC as EXPERTS_SPEC
from clover.plugins.moe_experts.spec import ExpertsAttributes
from clover.plugins.op_spec import OpSpec

Array = np.ndarray[Any, np.dtype[Any]]


def lengths(*values: int) -> Array:
    return np.array(values, np.int64)


def close(actual: Array, expected: Array, tolerance: float = 1e-11) -> None:
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=tolerance * max(1.0, float(np.abs(expected).max(initial=0)))
    )


# -- BidirectionalGatedDeltaNet --------------------------------------------------------------------

ATTRIBUTES = GatedDeltaNetAttributes(2, 4, 8, 6, block_size=32, history_readout_scale=0.3)
CHANNELS, TAPS = 2 * 2 * 8 + 4 * 6, 4


def gdn_inputs(rng: np.random.Generator, sequences: int, rows: int) -> dict[str, Array]:
    heads = ATTRIBUTES.num_value_heads
    shapes = {
        "qkv": (sequences, rows, CHANNELS), "a": (sequences, rows, heads), "b": (sequences, rows, heads),
        "conv_state": (sequences, TAPS - 1, CHANNELS), "recurrent_state": (sequences, heads, 8, 6),
        "conv_weight": (CHANNELS, TAPS), "conv_right": (CHANNELS, TAPS - 1), "decay_scale": (heads,),
        "dt_bias": (heads,), "logit_scale": (heads,), "history_bias": (heads,), "history_c": (heads,),
    }  # fmt: skip
    inputs: dict[str, Array] = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return inputs | {"decay_scale": -np.exp(inputs["decay_scale"])}


def unit_queries(inputs: dict[str, Array], s: int, rows: int) -> Array:
    """q̂ [rows, Hv, Dk] of sequence s under the causal convolution alone, row by row."""
    x = np.concatenate([inputs["conv_state"][s], inputs["qkv"][s, :rows]])
    out = np.zeros((rows, 4, 8))
    for t in range(rows):
        u = (inputs["conv_weight"].T * x[t : t + TAPS]).sum(0)
        u = u / (1 + np.exp(-u))
        for head in range(4):
            q = u[head // 2 * 8 : head // 2 * 8 + 8]
            out[t, head] = q / np.sqrt(q @ q + 1e-6)
    return out


def test_an_infinite_history_bias_reads_the_clean_state_only() -> None:
    inputs = gdn_inputs(np.random.default_rng(0), 2, 8)
    inputs |= {"history_bias": np.full(4, 1e6), "conv_right": np.zeros((CHANNELS, TAPS - 1))}
    o, _, state = gdn.bidirectional_gated_delta_net(
        **inputs, commit_length=lengths(0, 3), row_length=lengths(8, 7), attributes=ATTRIBUTES
    )
    for s, (c, n) in enumerate([(0, 8), (3, 7)]):
        expected = 0.3 * np.einsum("hkv,nhk->nhv", state[s], unit_queries(inputs, s, n)[c:])
        close(o[s, c:n], expected.reshape(n - c, -1))


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_without_right_taps_the_preview_convolution_is_the_causal_one(count: int) -> None:
    rng = np.random.default_rng(1)
    rows, weight = rng.standard_normal((count, CHANNELS)), rng.standard_normal((CHANNELS, TAPS - 1))
    assert not gdn.right_convolution(rows, np.zeros_like(weight)).any()
    # The taps are time-reversed causal ones that start one row ahead.
    padded = np.concatenate([np.zeros((TAPS - 1, CHANNELS)), rows[::-1]])
    shifted = np.concatenate([weight[:, ::-1], np.zeros((CHANNELS, 1))], axis=1)
    close(gdn.right_convolution(rows, weight), gdn.causal_convolution(padded, shifted)[::-1])


@pytest.mark.parametrize("trained", [16, 32])
def test_calibrated_history_share_does_not_depend_on_the_block(trained: int) -> None:
    inputs = gdn_inputs(np.random.default_rng(2), 1, 64)
    # Equal rows under a one-tap convolution and no v: every logit is 0 and only the history slot speaks.
    inputs["qkv"][:] = inputs["qkv"][:, :1]
    inputs["conv_weight"][:, :-1] = 0
    inputs["conv_weight"][32:] = 0
    inputs |= {"conv_right": np.zeros((CHANNELS, 3)), "logit_scale": np.zeros(4), "history_c": np.ones(4)}
    expected = 1 / (1 + trained * np.exp(-inputs["history_bias"]))  # [Hv]
    readout = 0.3 * np.einsum("hkv,hk->hv", inputs["recurrent_state"][0], unit_queries(inputs, 0, 1)[0])
    for n in (1, 8, 16, 32, 64):
        o, *_ = gdn.bidirectional_gated_delta_net(
            **inputs,
            commit_length=lengths(0),
            row_length=lengths(n),
            attributes=replace(ATTRIBUTES, block_size=trained),
        )
        close(o[0, :n].reshape(n, 4, 6), np.broadcast_to(expected[:, None] * readout, (n, 4, 6)))


def test_padding_is_not_read_and_gives_zeros() -> None:
    inputs = gdn_inputs(np.random.default_rng(5), 3, 6)
    commit, rows = lengths(2, 0, 0), lengths(5, 3, 0)
    clean = gdn.bidirectional_gated_delta_net(**inputs, commit_length=commit, row_length=rows, attributes=ATTRIBUTES)
    for name in ("qkv", "a", "b"):
        for s, n in enumerate(rows):
            inputs[name][s, n:] = np.nan
    dirty = gdn.bidirectional_gated_delta_net(**inputs, commit_length=commit, row_length=rows, attributes=ATTRIBUTES)
    for before, after in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(before, after)
    assert not any(clean[0][s, n:].any() for s, n in enumerate(rows))


@pytest.mark.parametrize(("commit", "rows"), [(3, 2), (0, 7), (-1, 2)])
def test_impossible_lengths_are_refused(commit: int, rows: int) -> None:
    with pytest.raises(ValueError, match="sequence 0"):
        gdn.bidirectional_gated_delta_net(
            **gdn_inputs(np.random.default_rng(0), 1, 6),
            commit_length=lengths(commit), row_length=lengths(rows), attributes=ATTRIBUTES,
        )  # fmt: skip


# -- MoECoresetRouting -----------------------------------------------------------------------------

# A coarse grid makes equal scores common within a row, and equal shares common across rows.
LOGITS = st.tuples(st.integers(1, 6), st.integers(4, 12)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.sampled_from([-2.0, 0.0, 0.5, 1.0, 3.0]))
)


def router_oracle(experts: int, top_k: int, top_p: float) -> Any:
    """The oracle's routing alone: its router is the identity, so that hidden rows are the logits."""
    config = {
        "layer_types": [], "rms_norm_eps": 1e-6, "head_dim": 8, "linear_key_head_dim": 8,
        "num_experts_per_tok": top_k, "moe_block_coreset": {"top_p": top_p},
    }  # fmt: skip
    return oracle_module("oracle").Oracle(config, {"gate.weight": np.eye(experts)})


@settings(max_examples=300, deadline=None)
@given(LOGITS, st.integers(1, 4), st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 0.999, 1.0, 1.5]), st.integers(0, 2))
def test_routing_equals_the_oracles_with_ties(logits: Array, top_k: int, top_p: float, padding: int) -> None:
    ids, weights, allowed = router_oracle(logits.shape[1], top_k, top_p).route(logits, "", preview=True)
    padded = np.concatenate([logits[::-1], logits, np.full((padding, logits.shape[1]), 7.0)])[None]
    n = len(logits)
    routed = moe_coreset_routing(
        padded, lengths(n), lengths(2 * n), np.array([top_p]), attributes=CoresetAttributes(top_k, min_experts=top_k)
    )[0]
    np.testing.assert_array_equal(routed[:n], logits[::-1])
    assert not routed[2 * n :].any()
    kept = np.ones(logits.shape[1], bool) if allowed is None else allowed
    np.testing.assert_array_equal(routed[n : 2 * n], np.where(kept, logits, EXCLUDED_LOGIT))
    own_ids, own_weights = route(routed[n : 2 * n], top_k)
    np.testing.assert_array_equal(own_ids, ids)
    close(own_weights, weights, 1e-14)


def test_the_coreset_never_shrinks_below_its_floor() -> None:
    logits = np.zeros((1, 4, 6), np.float32)
    logits[..., 4] = 9.0  # nearly every vote
    for floor, expected in ((2, [0, 4]), (4, [0, 1, 2, 4]), (8, [0, 1, 2, 3, 4, 5])):
        routed = moe_coreset_routing(
            logits, lengths(0), lengths(4), np.float32(0.5), attributes=CoresetAttributes(2, floor)
        )
        assert routed.dtype == np.float32
        assert np.flatnonzero(routed[0, 0] != np.float32(EXCLUDED_LOGIT)).tolist() == expected


# -- MoEExperts ------------------------------------------------------------------------------------

EXPERTS, HIDDEN, INTERMEDIATE, GROUP = 6, 64, 32, 16


def int4_experts(rng: np.random.Generator) -> dict[str, Array]:
    def packed(*shape: int) -> Array:
        return rng.integers(0, 256, shape, dtype=np.uint8)

    def scales(*shape: int) -> Array:
        return rng.uniform(0.01, 0.05, shape).astype(np.float32)

    return {
        "gate_up": packed(EXPERTS, 2 * INTERMEDIATE, HIDDEN // 2),
        "gate_up_scales": scales(EXPERTS, 2 * INTERMEDIATE, HIDDEN // GROUP),
        "down": packed(EXPERTS, HIDDEN, INTERMEDIATE // 2),
        "down_scales": scales(EXPERTS, HIDDEN, INTERMEDIATE // GROUP),
    }


def test_int4_experts_equal_onnxruntimes_and_their_dequantised_weights() -> None:
    import onnxruntime as ort
    from onnx import TensorProto, helper

    rng = np.random.default_rng(0)
    weights = int4_experts(rng)
    hidden = rng.standard_normal((9, HIDDEN)).astype(np.float32)
    logits = rng.standard_normal((9, EXPERTS)).astype(np.float32)
    logits[5:, 1:4] = EXCLUDED_LOGIT
    attributes = ExpertsAttributes(3, INTERMEDIATE, GROUP)
    mixed = moe_experts(hidden, logits, **weights, attributes=attributes)

    node = helper.make_node(
        "QMoE", ["hidden", "logits", "gate_up", "gate_up_scales", "", "down", "down_scales"], ["mixed"],
        domain="com.microsoft", k=3, block_size=GROUP, expert_weight_bits=4, normalize_routing_weights=1,
        activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.0, activation_beta=0.0, accuracy_level=0,
    )  # fmt: skip
    feeds = {"hidden": hidden, "logits": logits, **weights}
    inputs = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in feeds.items()
    ]
    output = helper.make_tensor_value_info("mixed", TensorProto.FLOAT, hidden.shape)
    graph = helper.make_graph([node], "experts", inputs, [output])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    (expected,) = ort.InferenceSession(model.SerializeToString()).run(None, feeds)
    close(mixed, expected, 1e-5)

    def dense(name: str) -> Array:
        pairs = zip(weights[name], weights[name + "_scales"], strict=True)
        return np.stack([dequantize_int4(packed, scales, GROUP, np.float32) for packed, scales in pairs])

    floats = replace(attributes, group_size=0)
    same = moe_experts(hidden, logits, dense("gate_up"), None, dense("down"), None, attributes=floats)
    np.testing.assert_array_equal(same, mixed)
    with pytest.raises(ValueError, match="scales"):
        moe_experts(hidden, logits, weights["gate_up"], None, weights["down"], None, attributes=attributes)


def test_zero_weight_experts_add_nothing() -> None:
    """Fewer experts left than top_k: the rest of a row's experts weigh exactly 0."""
    rng = np.random.default_rng(1)
    weights = int4_experts(rng)
    hidden, logits = rng.standard_normal((4, HIDDEN)), np.full((4, EXPERTS), EXCLUDED_LOGIT)
    logits[:, 2] = 1.0
    attributes = ExpertsAttributes(3, INTERMEDIATE, GROUP)
    mixed = moe_experts(hidden, logits, **weights, attributes=attributes)
    only = moe_experts(hidden, logits, **weights, attributes=replace(attributes, top_k=1))
    np.testing.assert_array_equal(mixed, only)


# -- descriptions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "function"),
    [
        (GDN_SPEC, gdn.bidirectional_gated_delta_net),
        (ROUTING_SPEC, moe_coreset_routing),
        (EXPERTS_SPEC, moe_experts),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_reference_takes_its_descriptions_inputs_in_order(spec: OpSpec, function: Callable[..., Any]) -> None:
    positional = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert tuple(positional) == spec.input_names
    assert [spec.input_index(name) for name in positional] == list(range(len(positional)))


def test_gdn_tensors_have_the_described_shapes() -> None:
    sizes = {"S": 2, "T": 5, "C": CHANNELS, "K": TAPS, "K-1": 3, "Hv": 4, "Dk": 8, "Dv": 6, "Hv*Dv": 24}
    inputs = gdn_inputs(np.random.default_rng(0), 2, 5) | {"commit_length": lengths(1, 0), "row_length": lengths(5, 2)}
    outputs = gdn.bidirectional_gated_delta_net(**inputs, attributes=ATTRIBUTES)
    tensors = {**inputs, **dict(zip(GDN_SPEC.output_names, outputs, strict=True))}
    for tensor in (*GDN_SPEC.inputs, *GDN_SPEC.outputs):
        assert tensors[tensor.name].shape == tuple(sizes[symbol] for symbol in tensor.shape), tensor.name
