"""MoECoresetRouting as an ONNX function body."""

from __future__ import annotations

import onnx
from onnx import TensorProto

from clover.plugins.function_body import FunctionBody
from clover.plugins.moe_coreset_routing.spec import EXCLUDED_LOGIT, SPEC


def function_body() -> onnx.FunctionProto:
    """logits [S, T, E] -> routed_logits [S, T, E]: excluded outside the coreset in preview rows, and in padding rows."""
    b = FunctionBody(SPEC)
    logits, commit, rows = "logits", b.unsqueeze("commit_length", 1), b.unsqueeze("row_length", 1)
    experts, top_k = b.size(logits, 2), b.integer("top_k")
    index = b.unsqueeze(_range(b, b.size(logits, 1)), 0)  # [1, T]
    before_end = b.op("Less", index, rows)
    preview = b.op("And", b.op("GreaterOrEqual", index, commit), before_end)  # [S, T]

    best, chosen = b.ops("TopK", 2, b.op("Softmax", logits, axis=-1), top_k, axis=-1)
    best = b.op("Mul", best, b.unsqueeze(b.to_float(preview), 2))  # only preview rows vote
    zeros = b.op("Expand", b.scalar(0.0), b.op("Shape", logits))
    votes = b.op("ReduceSum", b.op("ScatterElements", zeros, chosen, best, axis=2), b.ints(1), keepdims=0)  # [S, E]
    total = b.op("Max", b.op("ReduceSum", votes, b.ints(1), keepdims=1), b.scalar(1e-30))
    share, order = b.ops("TopK", 2, b.op("Div", votes, total), experts, axis=1)  # ties: lower index first
    share_before = b.op("CumSum", share, b.int_scalar(1), exclusive=1)
    rank = b.unsqueeze(_range(b, experts), 0)  # [1, E]
    top_p = b.unsqueeze("top_p", 1)
    kept = b.op("Or", b.op("Less", share_before, top_p), b.op("Less", rank, b.integer("min_experts")))
    kept = b.op("ScatterElements", b.op("Mul", share, b.scalar(0.0)), order, b.to_float(kept), axis=1)
    coreset = b.op(
        "Or", b.op("Cast", kept, to=TensorProto.BOOL), b.op("GreaterOrEqual", top_p, b.scalar(1.0))
    )  # [S, E]

    allowed = b.op("Or", b.op("Not", b.unsqueeze(preview, 2)), b.unsqueeze(coreset, 1))
    allowed = b.op("And", allowed, b.unsqueeze(before_end, 2))
    return b.finish(b.op("Where", allowed, logits, b.scalar(EXCLUDED_LOGIT)))


def _range(b: FunctionBody, count: str) -> str:
    """0 … count - 1."""
    return b.op("Range", b.int_scalar(0), b.op("Squeeze", count), b.int_scalar(1))
