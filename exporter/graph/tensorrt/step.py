"""Authors the step graph of a GPU engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from clover.exporter.config import ModelConfig
from clover.exporter.graph.head import EXCLUDED, author_candidates
from clover.exporter.graph.tensorrt.builder import ActivationType, ConvertedWeights, TypedBuilder
from clover.exporter.graph.tensorrt.layers import DeviceLayers, rope_tables
from clover.exporter.graph.tensorrt.rows import DeviceRows, author_device_rows
from clover.exporter.precision import PrecisionPlan
from clover.exporter.weight_index import StoredTensor
from clover.plugins.bidirectional_gdn.function import function_body as gdn_body
from clover.plugins.moe_coreset_routing.function import function_body as routing_body
from clover.runtime.errors import CloverError

CONVERTED_FILE = "step.converted"
EXPERT_ROWS = "expert_rows"


@dataclass(frozen=True)
class DeviceGraphOptions:
    """capacity: tokens of the KV cache, the rows of a step included; it is fixed in the engine."""

    capacity: int
    excluded_ids: Collection[int] = ()
    with_logits: bool = False
    activation: ActivationType = "bfloat16"


def build_device_graph(
    config: ModelConfig,
    precision: PrecisionPlan,
    weights: Mapping[str, StoredTensor],
    directory: Path,
    options: DeviceGraphOptions,
) -> onnx.ModelProto:
    """The step graph of GPU engines; external data lies in `directory`: the weight store, and one file made here.

    Inputs: token_ids [S, T]; commit_length, row_length, position [S]; coreset_top_p [S]; per layer the state
    (`conv.N`, `recurrent.N`, or `keys.N`, `values.N`) and `expert_table.N` [4, E] int64, the device addresses of each
    expert's gate_up, its scales, down and its scales; and the head's (see exporter/graph/head.py). Outputs: the state
    as `next.*`, expert_rows [layers, E] int32 (how many rows chose each expert), candidate_ids, candidate_logprobs, candidate_scores [S, R, K], and with_logits: logits [S, R, V].

    Raises CloverError for a precision GPU engines don't have.
    """
    if options.activation == "bfloat16":
        check_precision(precision)
    converted = ConvertedWeights(directory, directory / CONVERTED_FILE)
    try:
        b = TypedBuilder(weights, options.activation, converted)
        rows = author_device_rows(b, options.capacity)
        layers = DeviceLayers(b, config, precision, rows, options.capacity)
        top_p = b.input("coreset_top_p", ["S"])
        rope = rope_tables(b, config, options.capacity)
        b.scope("embed")
        hidden, counts = layers.embed(), []
        for layer, kind in enumerate(config.layer_types):
            b.scope(f"layers.{layer}.{'gdn' if kind == 'linear_attention' else 'attention'}")
            normed = layers.norm(hidden, f"layers.{layer}.input_norm")
            mixed = layers.gdn(layer, normed) if kind == "linear_attention" else layers.attention(layer, normed, rope)
            hidden = b.op("Add", hidden, mixed)
            b.scope(f"layers.{layer}.moe")
            normed = layers.norm(hidden, f"layers.{layer}.post_attention_norm")
            routed, count = layers.moe(layer, normed, top_p)
            hidden = b.rename(b.op("Add", hidden, routed), f"layers.{layer}.hidden")
            counts.append(b.unsqueeze(count, 0))
        b.scope("experts")
        every = [config.num_hidden_layers, config.num_experts]
        b.output(b.op("Concat", *counts, axis=0), EXPERT_ROWS, every, TensorProto.INT32)
        _author_head(b, config, layers, rows, hidden, options)
    finally:
        converted.close()
    b.function(gdn_body())
    b.function(routing_body())
    return b.model("clover_step", {"model_type": config.model_type, "precision": precision.name})


def check_precision(precision: PrecisionPlan) -> None:
    """Raises CloverError naming a tensor class whose precision GPU engines don't have."""
    for kind, value in precision.classes.items():
        if value not in ("bf16", "int4"):
            raise CloverError(
                f"--precision {kind}={value} is not available on GPUs, only int4 and bf16; choose one of them for it."
            )


def _author_head(
    b: TypedBuilder, c: ModelConfig, layers: DeviceLayers, rows: DeviceRows, hidden: str, options: DeviceGraphOptions
) -> None:
    """hidden [N, H] -> the K best tokens of the rows that ask; as exporter/graph/head.py, which explains the inputs."""
    b.scope("head")
    int64 = TensorProto.INT64
    logit_rows = b.input("logit_rows", ["S", "R"], int64)
    candidates = b.input("candidates", [1], int64)
    adjust_ids = b.input("adjust_ids", ["S", "P"], int64)
    adjust_scale, adjust_bias = b.input("adjust_scale", ["S", "P"]), b.input("adjust_bias", ["S", "P"])

    first = b.op("Mul", b.op("Range", b.int_scalar(0), b.op("Squeeze", rows.sequences), b.int_scalar(1)), rows.length)
    picked = b.reshape(b.op("Add", logit_rows, b.unsqueeze(first, 1)), -1)  # [S*R]
    state = layers.norm(b.op("Gather", hidden, picked, axis=0), "final_norm")
    pure = layers.logits(state)
    per_row = b.op("Shape", logit_rows)  # [S, R]
    shape = b.op("Concat", per_row, b.ints(c.vocab_size), axis=0)
    if options.with_logits:
        b.output(b.op("Reshape", pure, shape), "logits", ["S", "R", c.vocab_size])
    bias = np.zeros(c.vocab_size, np.float32)
    bias[sorted(options.excluded_ids)] = EXCLUDED
    raw = b.op("Reshape", b.op("Add", pure, b.constant(bias)), shape)  # [S, R, V]
    author_candidates(b, raw, per_row, candidates, adjust_ids, adjust_scale, adjust_bias)
