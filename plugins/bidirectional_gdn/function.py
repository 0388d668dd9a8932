"""BidirectionalGatedDeltaNet as an ONNX function body: a Scan over the rows for the delta rule, products for the rest."""

from __future__ import annotations

import onnx
from onnx import helper

from clover.plugins.bidirectional_gdn.spec import L2_EPSILON, SPEC
from clover.plugins.function_body import FunctionBody, subgraph


def function_body() -> onnx.FunctionProto:
    """The operator of spec.py. Shapes: S sequences, T rows, Hk and Hv heads of Dk and Dv, K taps, C channels."""
    b = FunctionBody(SPEC)
    index = b.unsqueeze(_range(b, b.size("qkv", 1)), 0)  # [1, T]
    commit, rows = b.unsqueeze("commit_length", 1), b.unsqueeze("row_length", 1)
    is_commit = b.op("Less", index, commit)  # [S, T]
    is_preview = b.op("And", b.op("Not", is_commit), b.op("Less", index, rows))

    mixed, ring = _convolution(b, is_preview)
    key, value = b.integer("key_head_dim"), b.integer("value_head_dim")
    key_heads, heads = b.integer("num_key_heads"), b.integer("num_value_heads")
    key_width = b.op("Mul", key_heads, key)
    widths = b.shape(key_width, key_width, b.op("Mul", heads, value))
    q, k, v = b.ops("Split", 3, mixed, widths, axis=2)
    q, k = _key_heads(b, q), _key_heads(b, k)  # [S, T, Hv, Dk]
    v = b.op("Reshape", v, b.shape(b.ints(0, 0), heads, value))

    committed, state = _delta_rule(b, q, k, v, is_commit)
    previewed = _block_softmax(b, q, k, v, state, is_preview)
    wide = b.unsqueeze(b.op("Or", is_commit, is_preview), 2, 3)
    out = b.op("Where", b.unsqueeze(is_commit, 2, 3), committed, previewed)
    out = b.op("Where", wide, out, b.scalar(0.0))  # [S, T, Hv, Dv]
    out = b.op("Reshape", out, b.ints(0, 0, -1))
    return b.finish(b.like(out, "qkv"), b.like(ring, "conv_state"), state)


def _range(b: FunctionBody, count: str) -> str:
    """0 … count - 1."""
    return b.op("Range", b.int_scalar(0), b.op("Squeeze", count), b.int_scalar(1))


def _convolution(b: FunctionBody, is_preview: str) -> tuple[str, str]:
    """SiLU of both convolutions [S, T, C], and the ring after the commit rows [S, K-1, C]."""
    x, old = b.to_float("qkv"), b.to_float("conv_state")
    taps = b.size("conv_weight", 1)
    history = b.op("Sub", taps, b.ints(1))
    row = b.unsqueeze(_range(b, b.size("qkv", 1)), 1)  # [T, 1]
    padded = b.op("Concat", old, x, axis=1)  # row t of tap j is padded[t + j]
    windows = b.op("Gather", padded, b.op("Add", row, b.unsqueeze(_range(b, taps), 0)), axis=1)  # [S, T, K, C]
    weight = b.op("Transpose", b.to_float("conv_weight"), perm=[1, 0])
    causal = b.op("ReduceSum", b.op("Mul", windows, weight), b.ints(2), keepdims=0)

    preview = b.unsqueeze(b.to_float(is_preview), 2)
    # rows that are not previewed, and those past the last, contribute nothing to the rows before them
    ahead = b.op("Mul", b.op("Where", b.unsqueeze(is_preview, 2), x, b.scalar(0.0)), preview)
    ahead = b.op("Pad", ahead, b.op("Concat", b.ints(0, 0, 0, 0), history, b.ints(0), axis=0), "")
    distance = b.op("Add", b.unsqueeze(_range(b, history), 0), b.int_scalar(1))
    windows = b.op("Gather", ahead, b.op("Add", row, distance), axis=1)  # [S, T, K-1, C]
    weight = b.op("Transpose", b.to_float("conv_right"), perm=[1, 0])
    right = b.op("ReduceSum", b.op("Mul", windows, weight), b.ints(2), keepdims=0)
    total = b.op("Add", causal, b.op("Mul", right, preview))

    # the ring keeps the K-1 rows before the first that is not committed
    slots = b.op("Add", b.unsqueeze("commit_length", 1), b.unsqueeze(_range(b, history), 0))  # [S, K-1]
    ring = b.op("GatherND", padded, b.unsqueeze(slots, 2), batch_dims=1)
    return b.op("Mul", total, b.op("Sigmoid", total)), ring


def _key_heads(b: FunctionBody, x: str) -> str:
    """[S, T, Hk * Dk] -> l2-normalised and repeated to the value heads [S, T, Hv, Dk]."""
    key_heads, heads, key = b.integer("num_key_heads"), b.integer("num_value_heads"), b.integer("key_head_dim")
    x = b.op("Reshape", x, b.shape(b.ints(0, 0), key_heads, key))
    square = b.op("ReduceSumSquare", x, b.ints(3), keepdims=1)
    x = b.op("Div", x, b.op("Sqrt", b.op("Add", square, b.scalar(L2_EPSILON))))
    repeats = b.op("Concat", b.ints(1, 1, 1), b.op("Div", heads, key_heads), b.ints(1), axis=0)
    return b.op("Reshape", b.op("Expand", b.unsqueeze(x, 3), repeats), b.shape(b.ints(0, 0), heads, key))


def _delta_rule(b: FunctionBody, q: str, k: str, v: str, is_commit: str) -> tuple[str, str]:
    """Row after row: S ← γS, S ← S + k β(v - Sᵀk)ᵀ, o = Dk^-½ Sᵀq. Other rows have γ = 1 and β = 0.

    Returns o [S, T, Hv, Dv] and the state after the last row.
    """
    committed = b.unsqueeze(b.to_float(is_commit), 2)  # [S, T, 1]
    step = b.op("Softplus", b.op("Add", b.to_float("a"), "dt_bias"))
    decay = b.op("Exp", b.op("Mul", b.op("Mul", "decay_scale", step), committed))  # [S, T, Hv]
    beta = b.op("Mul", b.op("Sigmoid", b.to_float("b")), committed)
    scaled = b.op("Div", q, b.op("Sqrt", b.to_float(b.integer("key_head_dim"))))

    def node(kind: str, inputs: list[str], output: str) -> onnx.NodeProto:
        return helper.make_node(kind, inputs, [output])

    at = helper.make_tensor("at", onnx.TensorProto.INT64, [1], [-1])  # column vectors
    above = helper.make_tensor("above", onnx.TensorProto.INT64, [1], [-2])  # row vectors
    both = helper.make_tensor("both", onnx.TensorProto.INT64, [2], [-1, -2])
    body = subgraph(
        [
            helper.make_node("Constant", [], ["at"], value=at),
            helper.make_node("Constant", [], ["above"], value=above),
            helper.make_node("Constant", [], ["both"], value=both),
            node("Unsqueeze", ["decay_t", "both"], "decay_w"),
            node("Unsqueeze", ["beta_t", "at"], "beta_w"),
            node("Unsqueeze", ["k_t", "above"], "k_row"),
            node("Unsqueeze", ["k_t", "at"], "k_column"),
            node("Unsqueeze", ["q_t", "above"], "q_row"),
            node("Mul", ["state_in", "decay_w"], "decayed"),  # [S, Hv, Dk, Dv]
            node("MatMul", ["k_row", "decayed"], "read_row"),
            node("Squeeze", ["read_row", "above"], "read"),  # [S, Hv, Dv]
            node("Sub", ["v_t", "read"], "error"),
            node("Mul", ["beta_w", "error"], "update"),
            node("Unsqueeze", ["update", "above"], "update_row"),
            node("Mul", ["k_column", "update_row"], "outer"),
            node("Add", ["decayed", "outer"], "state_out"),
            node("MatMul", ["q_row", "state_out"], "out_row"),
            node("Squeeze", ["out_row", "above"], "out_t"),
        ],
        ["state_in", "q_t", "k_t", "v_t", "decay_t", "beta_t"],
        ["state_out", "out_t"],
        "delta_rule",
    )
    state, out = b.ops(
        "Scan", 2, "recurrent_state", scaled, k, v, decay, beta, body=body, num_scan_inputs=5,
        scan_input_axes=[1] * 5, scan_output_axes=[1],
    )  # fmt: skip
    return out, state


def _block_softmax(b: FunctionBody, q: str, k: str, v: str, state: str, is_preview: str) -> str:
    """One softmax over the history slot and the preview rows, for every row [S, T, Hv, Dv]."""
    q, k, v = (b.op("Transpose", x, perm=[0, 2, 1, 3]) for x in (q, k, v))  # [S, Hv, T, D]
    logits = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2]))
    logits = b.op("Mul", logits, b.unsqueeze("logit_scale", 1, 2))
    logits = b.op("Where", b.unsqueeze(is_preview, 1, 2), logits, b.scalar(-1e30))  # [S, Hv, T, T]
    count = b.to_float(b.op("Max", b.op("Sub", "row_length", "commit_length"), b.int_scalar(1)))
    ratio = b.op("Log", b.op("Div", count, b.to_float(b.integer("block_size"))))  # [S]
    slot = b.op("Add", "history_bias", b.op("Mul", "history_c", b.unsqueeze(ratio, 1)))  # [S, Hv]
    zeros = b.op("Mul", b.op("ReduceMax", logits, b.ints(3), keepdims=1), b.scalar(0.0))
    slot = b.op("Add", b.unsqueeze(slot, 2, 3), zeros)  # [S, Hv, T, 1]
    shares = b.op("Softmax", b.op("Concat", slot, logits, axis=3), axis=3)
    history = b.slice(shares, b.ints(0), b.ints(1), 3)
    block = b.slice(shares, b.ints(1), b.ints(2**62), 3)
    readout = b.op("Mul", b.op("MatMul", q, state), b.number("history_readout_scale"))
    mixture = b.op("Add", b.op("Mul", history, readout), b.op("MatMul", block, v))
    return b.op("Transpose", mixture, perm=[0, 2, 1, 3])
