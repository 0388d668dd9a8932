"""MoECoresetRouting lowered to standard ONNX operators.

Out come router logits that are -1e30 for every expert a row does not use, exactly top_k others per row: ties are
settled here (lower index), so that the experts' own top-k has nothing left to choose.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from clover.exporter.config import ModelConfig
from clover.exporter.graph.builder import GraphBuilder
from clover.exporter.graph.rows import Rows
from clover.plugins.moe_coreset_routing.spec import EXCLUDED_LOGIT


def lower_coreset_routing(b: GraphBuilder, c: ModelConfig, rows: Rows, top_p: str, logits: str) -> str:
    """logits [S, T, E] float32, top_p [S, 1] float32 (1 and above: no restriction) -> [S, T, E]."""
    allowed = logits
    if c.coreset_enabled:
        coreset = _coreset(b, c, rows, top_p, logits)  # [S, E] bool
        free = b.op("Not", b.unsqueeze(rows.is_preview, 2))
        keep = b.op("Or", free, b.unsqueeze(coreset, 1))
        allowed = b.op("Where", keep, logits, b.scalar(EXCLUDED_LOGIT))
    best, index = b.ops("TopK", 2, allowed, b.ints(c.num_experts_per_tok), axis=-1)
    nothing = b.op("Expand", b.scalar(EXCLUDED_LOGIT), b.op("Shape", logits))
    return b.op("ScatterElements", nothing, index, best, axis=2)


def _coreset(b: GraphBuilder, c: ModelConfig, rows: Rows, top_p: str, logits: str) -> str:
    """The experts a block may use [S, E]: votes of its preview rows, in descending share up to top_p."""
    experts, k = c.num_experts, c.num_experts_per_tok
    floor = min(max(c.coreset_min_experts, k), experts)
    probabilities = b.op("Softmax", logits, axis=-1)
    best, index = b.ops("TopK", 2, probabilities, b.ints(k), axis=-1)
    best = b.op("Mul", best, rows.is_preview_float)  # only preview rows vote
    zeros = b.op("Expand", b.scalar(0.0), b.op("Shape", logits))
    votes = b.op("ReduceSum", b.op("ScatterElements", zeros, index, best, axis=2), b.ints(1), keepdims=0)  # [S, E]
    total = b.op("Max", b.op("ReduceSum", votes, b.ints(1), keepdims=1), b.scalar(1e-30))
    share, order = b.ops("TopK", 2, b.op("Div", votes, total), b.ints(experts), axis=1)  # ties: lower index first
    before = b.op("CumSum", share, b.int_scalar(1), exclusive=1)
    rank = b.constant((np.arange(experts) < floor)[None])
    keep = b.op("Or", b.op("Less", before, top_p), rank)
    scattered = b.op("ScatterElements", b.op("Mul", share, b.scalar(0.0)), order, b.to_float(keep), axis=1)
    unrestricted = b.op("GreaterOrEqual", top_p, b.scalar(1.0))
    return b.op("Or", b.op("Cast", scattered, to=TensorProto.BOOL), unrestricted)
