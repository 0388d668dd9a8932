"""Authors the whole step graph of a model for ONNX Runtime."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx

from clover.exporter.config import ModelConfig
from clover.exporter.graph.attention import author_attention
from clover.exporter.graph.builder import GraphBuilder
from clover.exporter.graph.dense import FAST_ACCURACY, Dense
from clover.exporter.graph.head import author_head
from clover.exporter.graph.rows import Rows, author_rows, rotary_tables
from clover.exporter.precision import PrecisionPlan
from clover.exporter.weight_index import StoredTensor
from clover.plugins.bidirectional_gdn.lowering import history_log_ratio, lower_bidirectional_gdn
from clover.plugins.moe_coreset_routing.lowering import lower_coreset_routing
from clover.plugins.moe_experts.lowering import lower_experts


def build_step_graph(
    config: ModelConfig,
    precision: PrecisionPlan,
    weights: Mapping[str, StoredTensor],
    *,
    excluded_ids: Collection[int] = (),
    with_logits: bool = False,
    accuracy_level: int = FAST_ACCURACY,
) -> onnx.ModelProto:
    """One graph for every run: T rows for each of S sequences, commit rows first, then preview rows.

    Inputs and outputs are described in docs/step-graph.md. State tensors are inputs `recurrent.N`, `conv.N`,
    `keys.N`, `values.N` and outputs `next.` + the same name; bound to the same memory they are updated in place.
    excluded_ids: token ids that may never be chosen (the mask token, vocabulary padding).
    """
    b = GraphBuilder(weights)
    dense = Dense(b, precision, accuracy_level)
    rows = author_rows(b)
    top_p = b.unsqueeze(b.input("coreset_top_p", ["S"]), 1)
    history = history_log_ratio(b, config, rows)
    rope = rotary_tables(b, rows, config.rotary_dim, config.rope_theta)
    b.scope("embed")
    hidden = b.reshape(dense.embed(rows.token_ids), -1, config.hidden_size)  # [S*T, H]
    for layer, kind in enumerate(config.layer_types):
        b.scope(f"layers.{layer}.{'gdn' if kind == 'linear_attention' else 'attention'}")
        normed = dense.rms_norm(hidden, f"layers.{layer}.input_norm", config.rms_norm_eps)
        if kind == "linear_attention":
            mixed = _gdn_layer(b, config, dense, rows, history, layer, normed)
        else:
            mixed = _attention_layer(b, config, dense, rows, rope, layer, normed)
        hidden = b.op("Add", hidden, mixed)
        b.scope(f"layers.{layer}.moe")
        normed = dense.rms_norm(hidden, f"layers.{layer}.post_attention_norm", config.rms_norm_eps)
        hidden = b.rename(
            b.op("Add", hidden, _moe(b, config, dense, rows, top_p, layer, normed)), f"layers.{layer}.hidden"
        )
    author_head(b, config, dense, rows, hidden, excluded_ids, with_logits)
    metadata = {"model_type": config.model_type, "precision": precision.name}
    return b.model("clover_step", metadata)


def _gdn_layer(b: GraphBuilder, c: ModelConfig, dense: Dense, rows: Rows, history: str, layer: int, hidden: str) -> str:
    """hidden [S*T, H] -> [S*T, H]; declares the layer's recurrent state and conv ring."""
    g, heads = f"layers.{layer}.gdn.", c.linear_num_value_heads
    recurrent_shape: list[int | str] = ["S", heads, c.linear_key_head_dim, c.linear_value_head_dim]
    conv_shape: list[int | str] = ["S", c.conv_history, c.conv_channels]
    recurrent, conv = b.input(f"recurrent.{layer}", recurrent_shape), b.input(f"conv.{layer}", conv_shape)

    def per_sequence(x: str) -> str:
        return b.op("Reshape", x, b.op("Concat", rows.sequences, rows.length, b.ints(-1), axis=0))

    projected = per_sequence(dense.linear(hidden, f"{g}in_proj", "gdn"))
    qkv, z = b.ops("Split", 2, projected, b.ints(c.conv_channels, c.value_width), axis=2)
    gates = per_sequence(dense.linear(hidden, f"{g}ab_proj", None))
    a, beta = b.ops("Split", 2, gates, b.ints(heads, heads), axis=2)
    out = lower_bidirectional_gdn(b, c, rows, history, layer, qkv, a, beta, conv, recurrent)
    b.output(out.conv, f"next.conv.{layer}", conv_shape)
    b.output(out.recurrent, f"next.recurrent.{layer}", recurrent_shape)
    # com.microsoft GatedRMSNorm does the same, but its scalar SiLU costs 3 ms a layer at 32 rows of full width
    heads_apart = b.reshape(out.output, 0, 0, heads, c.linear_value_head_dim)
    normed = b.reshape(dense.rms_norm(heads_apart, f"{g}norm", c.rms_norm_eps), 0, 0, c.value_width)
    normed = b.op("Mul", normed, b.silu(z))
    mixed = b.rename(normed, f"layers.{layer}.mixer")
    # the gated rows have outliers: 8-bit activations here alone cost more than everywhere else together
    return dense.linear(b.reshape(mixed, -1, c.value_width), f"{g}out_proj", "gdn", exact=True)


def _attention_layer(
    b: GraphBuilder, c: ModelConfig, dense: Dense, rows: Rows, rope: tuple[str, str, str], layer: int, hidden: str
) -> str:
    """hidden [S*T, H] -> [S*T, H]; declares the layer's KV cache."""
    shape: list[int | str] = ["S", c.num_key_value_heads, "capacity", c.head_dim]
    keys, values = b.input(f"keys.{layer}", shape), b.input(f"values.{layer}", shape)
    mixed, new_keys, new_values = author_attention(b, c, dense, rows, rope, layer, hidden, keys, values)
    b.output(new_keys, f"next.keys.{layer}", shape)
    b.output(new_values, f"next.values.{layer}", shape)
    return mixed


def _moe(b: GraphBuilder, c: ModelConfig, dense: Dense, rows: Rows, top_p: str, layer: int, hidden: str) -> str:
    """hidden [S*T, H] -> routed experts plus the gated shared expert [S*T, H]."""
    g, shared = f"layers.{layer}.moe.", c.shared_expert_intermediate_size
    router = dense.linear(hidden, f"{g}router", None)  # [S*T, E + 1]: experts, then the shared expert's gate
    logits, gate = b.ops("Split", 2, router, b.ints(c.num_experts, 1), axis=1)
    shape = b.op("Concat", rows.sequences, rows.length, b.ints(-1), axis=0)
    logits = b.rename(b.op("Reshape", logits, shape), f"layers.{layer}.router_logits")
    routing = b.rename(lower_coreset_routing(b, c, rows, top_p, logits), f"layers.{layer}.routing")
    routed = lower_experts(
        b, c, dense.precision, layer, hidden, b.reshape(routing, -1, c.num_experts), dense.accuracy_level
    )
    both = dense.linear(hidden, f"{g}shared_gate_up", "shared_expert")
    left, right = b.ops("Split", 2, both, b.ints(shared, shared), axis=1)
    always = dense.linear(b.op("Mul", b.silu(left), right), f"{g}shared_down", "shared_expert")
    return b.op("Add", routed, b.op("Mul", always, b.op("Sigmoid", gate)))
