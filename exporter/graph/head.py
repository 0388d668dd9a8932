"""From hidden states to the K best tokens of the rows that ask: logits never leave the graph.

Penalties, logit biases and the length ramp touch few ids, so they arrive as a short list per sequence instead
of whole vocabularies; the mask token and vocabulary padding are excluded by a constant bias.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from onnx import TensorProto

from clover.exporter.config import ModelConfig
from clover.exporter.graph.builder import GraphBuilder
from clover.exporter.graph.dense import Dense
from clover.exporter.graph.rows import Rows

EXCLUDED = -1e30


def author_head(
    b: GraphBuilder, c: ModelConfig, dense: Dense, rows: Rows, hidden: str, excluded: Collection[int], with_logits: bool
) -> None:
    """Adds the head: hidden [S*T, H] -> outputs candidate_ids, candidate_logprobs, candidate_scores [S, R, K].

    Inputs: logit_rows [S, R] (row of each sequence), candidates [1] (K), and per sequence P adjusted ids:
    adjust_ids, adjust_scale (a positive logit is divided by it, a negative one multiplied), adjust_bias [S, P].
    logprobs are the raw log-softmax (before adjustment); scores are the adjusted logits the ids are ranked by.
    """
    b.scope("head")
    int64 = TensorProto.INT64
    logit_rows = b.input("logit_rows", ["S", "R"], int64)
    candidates = b.input("candidates", [1], int64)
    adjust_ids = b.input("adjust_ids", ["S", "P"], int64)
    adjust_scale = b.input("adjust_scale", ["S", "P"])
    adjust_bias = b.input("adjust_bias", ["S", "P"])

    first = b.op("Mul", b.op("Range", b.int_scalar(0), b.op("Squeeze", rows.sequences), b.int_scalar(1)), rows.length)
    picked = b.reshape(b.op("Add", logit_rows, b.unsqueeze(first, 1)), -1)  # [S*R]
    state = dense.rms_norm(b.op("Gather", hidden, picked), "final_norm", c.rms_norm_eps)
    bias = np.zeros(c.vocab_size, np.float32)
    bias[sorted(excluded)] = EXCLUDED
    per_row = b.op("Shape", logit_rows)  # [S, R]
    if with_logits:
        pure = dense.linear(state, "lm_head", "lm_head")
        shaped = b.op("Reshape", pure, b.op("Concat", per_row, b.ints(c.vocab_size), axis=0), allowzero=1)
        b.output(shaped, "logits", ["S", "R", c.vocab_size])
        flat = b.op("Add", pure, b.constant(bias))
    else:
        flat = dense.linear(state, "lm_head", "lm_head", bias=b.constant(bias))
    raw = b.op("Reshape", flat, b.op("Concat", per_row, b.ints(c.vocab_size), axis=0), allowzero=1)  # [S, R, V]
    author_candidates(b, raw, per_row, candidates, adjust_ids, adjust_scale, adjust_bias)


def author_candidates(
    b: GraphBuilder, raw: str, per_row: str, candidates: str, adjust_ids: str, adjust_scale: str, adjust_bias: str
) -> None:
    """Adds the three outputs from the logits `raw` [S, R, V]; `per_row` is the shape [S, R], the rest `author_head`'s inputs."""
    # log of the softmax's denominator; ReduceLogSumExp does the same 4 times slower here
    peak = b.op("ReduceMax", raw, b.ints(2), keepdims=1)
    total = b.op("Log", b.op("ReduceSum", b.op("Exp", b.op("Sub", raw, peak)), b.ints(2), keepdims=1))
    normaliser = b.op("Add", peak, total)  # [S, R, 1]

    count = b.op("Shape", adjust_ids, start=1)
    index = b.op("Expand", b.unsqueeze(adjust_ids, 1), b.op("Concat", per_row, count, axis=0))  # [S, R, P]
    before = b.op("GatherElements", raw, index, axis=2)
    scale = b.unsqueeze(adjust_scale, 1)
    positive = b.op("Greater", before, b.scalar(0.0))
    scaled = b.op("Where", positive, b.op("Div", before, scale), b.op("Mul", before, scale))
    after = b.op("Add", scaled, b.unsqueeze(adjust_bias, 1))
    adjusted = b.op("ScatterElements", raw, index, after, axis=2)
    scores, ids = b.ops("TopK", 2, adjusted, candidates, axis=2)  # ties: lower id first
    logprobs = b.op("Sub", b.op("GatherElements", raw, ids, axis=2), normaliser)
    b.output(ids, "candidate_ids", ["S", "R", "K"], TensorProto.INT64)
    b.output(logprobs, "candidate_logprobs", ["S", "R", "K"])
    b.output(scores, "candidate_scores", ["S", "R", "K"])
