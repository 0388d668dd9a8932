"""BidirectionalGatedDeltaNet lowered to ONNX Runtime's own operators.

Commit rows run the delta rule (com.microsoft LinearAttention), preview rows the block softmax with a history
slot; each part reads only the stretch of rows that can hold such rows, so that a pure denoise step pays nothing
for the delta rule and a pure commit nothing for the block softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clover.exporter.config import ModelConfig
from clover.exporter.graph.builder import CONTRIB, GraphBuilder
from clover.exporter.graph.rows import Rows

L2_EPSILON = 1e-6


@dataclass(frozen=True)
class GatedDeltaNetOutputs:
    """o [S, T, value_heads * value_dim] before the gated norm, and the state after the commit rows."""

    output: str
    conv: str
    recurrent: str


def lower_bidirectional_gdn(
    b: GraphBuilder,
    c: ModelConfig,
    rows: Rows,
    history: str,
    layer: int,
    qkv: str,
    a: str,
    beta: str,
    conv: str,
    recurrent: str,
) -> GatedDeltaNetOutputs:
    """qkv [S, T, channels] before the convolution; a, beta [S, T, value_heads] before their gates;
    conv [S, kernel - 1, channels]; recurrent [S, value_heads, key_dim, value_dim]; history [S, 1]: ln(n / block)."""
    g = f"layers.{layer}.gdn."
    mixed, new_conv = _convolution(b, c, rows, g, qkv, conv)
    q, k, v = b.ops("Split", 3, mixed, b.ints(c.key_width, c.key_width, c.value_width), axis=2)
    q, k = _l2norm(b, c, q), _l2norm(b, c, k)  # [S, T, key_heads, key_dim]
    committed, new_recurrent = _delta_rule(b, c, rows, g, q, k, v, a, beta, recurrent)
    previewed = _block_softmax(b, c, rows, g, history, q, k, v, new_recurrent)
    output = b.op("Where", b.unsqueeze(rows.is_commit, 2), committed, previewed)
    return GatedDeltaNetOutputs(output, new_conv, new_recurrent)


def history_log_ratio(b: GraphBuilder, c: ModelConfig, rows: Rows) -> str:
    """ln(n / block_size) [S, 1] with n the preview rows of each sequence (1 where there are none)."""
    n = b.to_float(b.op("Max", rows.preview_count, b.int_scalar(1)))
    return b.unsqueeze(b.op("Log", b.op("Div", n, b.scalar(c.block_size))), 1)


def _convolution(b: GraphBuilder, c: ModelConfig, rows: Rows, g: str, x: str, conv: str) -> tuple[str, str]:
    """SiLU of the causal taps, plus the right taps among preview rows; and the ring after the commit rows.

    Shifted multiply-adds: at the 1…64 rows of decoding they are 2…18 times faster here than Conv.
    """
    taps, history = c.linear_conv_kernel_dim, c.conv_history
    padded = b.op("Concat", conv, x, axis=1)  # [S, history + T, C]
    causal = b.op("Transpose", b.weight(f"{g}conv.weight"), perm=[1, 0])  # [taps, C], folded on load
    total = ""
    for j in range(taps):
        # row t of tap j is padded[t + j]
        stop = b.op("Add", rows.length, b.ints(j))
        term = b.op("Mul", b.slice(padded, b.ints(j), stop, 1), b.op("Gather", causal, b.int_scalar(j)))
        total = b.op("Add", total, term) if total else term
    if history:
        right = _right_taps(b, c, rows, g, x)
        total = b.op("Add", total, right)
    mixed = b.silu(total)
    # the ring keeps the `history` rows before the first row that is not committed
    ring = b.op("Add", b.unsqueeze(rows.commit_length, 1), b.constant(np.arange(history, dtype=np.int64)[None]))
    index = b.op(
        "Expand", b.unsqueeze(ring, 2), b.op("Concat", rows.sequences, b.ints(history, c.conv_channels), axis=0)
    )
    return mixed, b.op("GatherElements", padded, index, axis=1)


def _right_taps(b: GraphBuilder, c: ModelConfig, rows: Rows, g: str, x: str) -> str:
    """Σ_d r_d x_(t+d) for preview rows [S, T, C]; taps beyond the block's last row and other rows contribute 0."""
    history = c.conv_history
    start = rows.preview_start
    preview = b.slice(rows.is_preview_float, start, rows.length, 1)  # [S, P, 1]
    ahead = b.op("Mul", b.slice(x, start, rows.length, 1), preview)  # [S, P, C]
    count = b.op("Sub", rows.length, start)
    ahead = b.op("Pad", ahead, b.ints(0, 0, 0, 0, history, 0), "")  # rows beyond the step are 0
    weights = b.op("Transpose", b.weight(f"{g}conv_right.weight"), perm=[1, 0])  # [history, C]
    total = ""
    for d in range(1, history + 1):
        shifted = b.slice(ahead, b.ints(d), b.op("Add", count, b.ints(d)), 1)
        term = b.op("Mul", shifted, b.op("Gather", weights, b.int_scalar(d - 1)))
        total = b.op("Add", total, term) if total else term
    return _pad_front(b, b.op("Mul", total, preview), start)


def _pad_front(b: GraphBuilder, x: str, count: str) -> str:
    """x [S, P, C] with `count` rows of zeros before it."""
    zeros = b.ints(0)
    return b.op("Pad", x, b.op("Concat", zeros, count, b.ints(0, 0, 0, 0), axis=0), "")


def _l2norm(b: GraphBuilder, c: ModelConfig, x: str) -> str:
    d = c.linear_key_head_dim
    heads = b.reshape(x, 0, 0, c.linear_num_key_heads, d)
    # x / sqrt(sum x² + eps) = RMSNorm(x) * d^-1/2 with eps / d
    weight = b.constant(np.full(d, d**-0.5, np.float32))
    return b.op("SimplifiedLayerNormalization", heads, weight, epsilon=L2_EPSILON / d, axis=-1)


def _delta_rule(
    b: GraphBuilder, c: ModelConfig, rows: Rows, g: str, q: str, k: str, v: str, a: str, beta: str, recurrent: str
) -> tuple[str, str]:
    """Gated delta rule over rows [0, commit_stop): (output [S, T, value_width], state after the commit rows)."""
    zero = b.ints(0)

    def head(x: str) -> str:
        return b.slice(x, zero, rows.commit_stop, 1)

    decay, rate = b.ops(
        "LinearAttentionGate",
        2,
        head(a),
        b.weight(f"{g}dt_bias.weight"),
        b.weight(f"{g}decay_rate.weight"),
        head(beta),
        domain=CONTRIB,
    )
    # sequences with fewer commit rows: no decay and no update leaves their state as it is
    active = b.unsqueeze(b.to_float(head(rows.is_commit)), 2)
    output, state = b.ops(
        "LinearAttention", 2,
        b.reshape(head(q), 0, 0, c.key_width), b.reshape(head(k), 0, 0, c.key_width), head(v), recurrent,
        b.op("Mul", decay, active), b.op("Mul", rate, active),
        domain=CONTRIB, q_num_heads=c.linear_num_key_heads, kv_num_heads=c.linear_num_value_heads,
        update_rule="gated_delta", scale=c.linear_key_head_dim**-0.5,
    )  # fmt: skip
    rest = b.op("Sub", rows.length, rows.commit_stop)
    pads = b.op("Concat", b.ints(0, 0, 0, 0), rest, b.ints(0), axis=0)
    return b.op("Pad", output, pads, ""), state


def _block_softmax(
    b: GraphBuilder, c: ModelConfig, rows: Rows, g: str, history: str, q: str, k: str, v: str, state: str
) -> str:
    """Softmax over the history slot and the block's rows, for rows [preview_start, T) -> [S, T, value_width]."""
    hv, dk, dv = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    group = hv // c.linear_num_key_heads
    start = rows.preview_start

    def tail(x: str) -> str:
        return b.slice(x, start, rows.length, 1)

    def per_value_head(x: str) -> str:  # [S, P, Hk, Dk] -> [S, Hv, P, Dk]; value head h uses key head h // group
        x = b.op("Transpose", tail(x), perm=[0, 2, 1, 3])
        if group == 1:
            return x
        wide = b.op("Expand", b.unsqueeze(x, 2), b.constant(np.array([1, 1, group, 1, 1], np.int64)))
        return b.op("Reshape", wide, b.op("Concat", rows.sequences, b.ints(hv, -1, dk), axis=0))

    count = b.op("Sub", rows.length, start)
    q, k = per_value_head(q), per_value_head(k)
    values = b.op("Reshape", tail(v), b.op("Concat", rows.sequences, count, b.ints(hv, dv), axis=0))
    values = b.op("Transpose", values, perm=[0, 2, 1, 3])  # [S, Hv, P, Dv]
    scale = b.weight(f"{g}logit_scale.weight", (hv, 1, 1))
    logits = b.op("MatMul", b.op("Mul", q, scale), b.op("Transpose", k, perm=[0, 1, 3, 2]))
    preview = tail(rows.is_preview)  # [S, P]
    logits = b.op("Where", b.unsqueeze(preview, 1, 2), logits, b.scalar(-1e30))  # [S, Hv, P, P]
    # history slot: bias + c · ln(n / block), the block-size calibration
    slot = b.op("Add", b.weight(f"{g}history_bias.weight"), b.op("Mul", b.weight(f"{g}history_c.weight"), history))
    shape = b.op("Concat", rows.sequences, b.ints(hv), count, b.ints(1), axis=0)
    slot = b.op("Expand", b.unsqueeze(slot, 2, 3), shape)
    shares = b.op("Softmax", b.op("Concat", slot, logits, axis=3), axis=3)  # [S, Hv, P, 1 + P]
    history_share = b.slice(shares, b.ints(0), b.ints(1), 3)
    block_share = b.slice(shares, b.ints(1), b.ints(np.iinfo(np.int64).max), 3)
    # history readout s · Sᵀq; the share and the scale go onto q, the smaller operand
    readout = b.op("MatMul", b.op("Mul", q, b.op("Mul", history_share, b.scalar(c.history_readout_scale))), state)
    mixed = b.op("Add", readout, b.op("MatMul", block_share, values))  # [S, Hv, P, Dv]
    mixed = b.op("Transpose", mixed, perm=[0, 2, 1, 3])
    mixed = b.op("Reshape", mixed, b.op("Concat", rows.sequences, count, b.ints(c.value_width), axis=0))
    return _pad_front(b, mixed, start)
