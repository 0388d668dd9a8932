"""BidirectionalGatedDeltaNet in NumPy, sequence by sequence: the numbers every kernel has to reproduce.

float32 or float64 throughout, as the inputs are. Per sequence: c commit rows, then p preview rows.
"""

from __future__ import annotations

import math

import numpy as np

from clover.plugins.bidirectional_gdn.spec import L2_EPSILON, GatedDeltaNetAttributes
from clover.plugins.numerics import FloatArray, IntArray, l2_normalize, row_ranges, sigmoid, silu, softmax, softplus


def bidirectional_gated_delta_net(
    qkv: FloatArray,  # [S, T, C]
    a: FloatArray,  # [S, T, Hv]
    b: FloatArray,  # [S, T, Hv]
    conv_state: FloatArray,  # [S, K-1, C]
    recurrent_state: FloatArray,  # [S, Hv, Dk, Dv]
    conv_weight: FloatArray,  # [C, K]
    conv_right: FloatArray,  # [C, K-1]
    decay_scale: FloatArray,  # [Hv]
    dt_bias: FloatArray,  # [Hv]
    logit_scale: FloatArray,  # [Hv]
    history_bias: FloatArray,  # [Hv]
    history_c: FloatArray,  # [Hv]
    commit_length: IntArray,  # [S]
    row_length: IntArray,  # [S]
    *,
    attributes: GatedDeltaNetAttributes,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns (o [S, T, Hv*Dv], new_conv_state [S, K-1, C], new_recurrent_state [S, Hv, Dk, Dv]).

    Preview rows see the state as the step's own commit rows leave it. Padding rows are not read and give
    zeros; a sequence without commit rows gets its states back bit for bit. Raises ValueError when the
    lengths are not 0 ≤ commit_length ≤ row_length ≤ T.
    """
    sequences, rows, _ = qkv.shape
    history_rows = conv_state.shape[1]
    o = np.zeros((sequences, rows, attributes.value_width), qkv.dtype)
    new_conv, new_recurrent = conv_state.copy(), recurrent_state.copy()
    for s, (c, n) in enumerate(row_ranges(commit_length, row_length, rows)):
        x = np.concatenate([conv_state[s], qkv[s, :n]])  # [K-1+n, C]
        u = causal_convolution(x, conv_weight)  # [n, C]
        u[c:] += right_convolution(qkv[s, c:n], conv_right)
        q, k, v = split_heads(silu(u), attributes)  # [n, Hv, Dk] ×2, [n, Hv, Dv]
        new_conv[s] = x[c : c + history_rows]
        if c:
            decay = np.exp(decay_scale * softplus(a[s, :c] + dt_bias))  # [c, Hv]
            out, new_recurrent[s] = delta_rule(q[:c], k[:c], v[:c], decay, sigmoid(b[s, :c]), recurrent_state[s])
            o[s, :c] = out.reshape(c, -1)
        if n > c:
            history = history_bias + history_c * math.log((n - c) / attributes.block_size)  # [Hv]
            readout = attributes.history_readout_scale * read_state(new_recurrent[s], q[c:])  # [p, Hv, Dv]
            o[s, c:n] = block_softmax(q[c:], k[c:], v[c:], logit_scale, history, readout).reshape(n - c, -1)
    return o, new_conv, new_recurrent


def causal_convolution(x: FloatArray, weight: FloatArray) -> FloatArray:
    """Depthwise causal convolution. x [K-1+n, C] starts with the rows before the first; weight [C, K] -> [n, C]."""
    taps = weight.shape[1]
    rows = len(x) - (taps - 1)
    out = np.zeros((rows, x.shape[1]), x.dtype)
    for j in range(taps):
        out += weight[:, j] * x[j : j + rows]
    return out


def right_convolution(x: FloatArray, weight: FloatArray) -> FloatArray:
    """What the rows ahead add to each row of a block: Σ_d weight[:, d-1] · x_(t+d), 0 past the block's end.

    x [p, C], weight [C, K-1] -> [p, C].
    """
    out = np.zeros_like(x)
    for d in range(1, min(weight.shape[1], len(x) - 1) + 1):
        out[:-d] += weight[:, d - 1] * x[d:]
    return out


def split_heads(u: FloatArray, attributes: GatedDeltaNetAttributes) -> tuple[FloatArray, FloatArray, FloatArray]:
    """u [n, C] -> q̂, k̂ [n, Hv, Dk], l2-normalised and repeated to the value heads, and v [n, Hv, Dv]."""
    width, n = attributes.key_width, len(u)
    keys = (n, attributes.num_key_heads, attributes.key_head_dim)
    repeat = attributes.num_value_heads // attributes.num_key_heads
    q, k = (
        np.repeat(l2_normalize(part.reshape(keys), L2_EPSILON), repeat, axis=1)
        for part in (u[:, :width], u[:, width : 2 * width])
    )
    return q, k, u[:, 2 * width :].reshape(n, attributes.num_value_heads, attributes.value_head_dim)


def read_state(state: FloatArray, q: FloatArray) -> FloatArray:
    """Sᵀq per head: state [Hv, Dk, Dv], q [..., Hv, Dk] -> [..., Hv, Dv]."""
    out: FloatArray = (q[..., None, :] @ state)[..., 0, :]
    return out


def delta_rule(
    q: FloatArray,  # [c, Hv, Dk]
    k: FloatArray,  # [c, Hv, Dk]
    v: FloatArray,  # [c, Hv, Dv]
    decay: FloatArray,  # [c, Hv], factors in (0, 1]
    beta: FloatArray,  # [c, Hv], in (0, 1)
    state: FloatArray,  # [Hv, Dk, Dv]
) -> tuple[FloatArray, FloatArray]:
    """The gated delta rule, row after row: S ← γS, then S ← S + k̂ β(v - Sᵀk̂)ᵀ, o = Dk^-½ Sᵀq̂.

    Returns (o [c, Hv, Dv], the state after the last row).
    """
    out = np.empty_like(v)
    scale = q.shape[-1] ** -0.5
    for t in range(len(q)):
        state = state * decay[t, :, None, None]
        delta = beta[t, :, None] * (v[t] - read_state(state, k[t]))  # [Hv, Dv]
        state = state + k[t, :, :, None] * delta[:, None, :]
        out[t] = read_state(state, scale * q[t])
    return out, state


def block_softmax(
    q: FloatArray,  # [p, Hv, Dk]
    k: FloatArray,  # [p, Hv, Dk]
    v: FloatArray,  # [p, Hv, Dv]
    logit_scale: FloatArray,  # [Hv]
    history: FloatArray,  # [Hv], the history slot's logit
    readout: FloatArray,  # [p, Hv, Dv], the history slot's value
) -> FloatArray:
    """One softmax over the history slot and all rows of the block; returns [p, Hv, Dv]."""
    q, k, v = (part.swapaxes(0, 1) for part in (q, k, v))  # [Hv, p, D]
    logits = logit_scale[:, None, None] * (q @ k.swapaxes(1, 2))  # [Hv, p, p]
    slot = np.broadcast_to(history[:, None, None], (*logits.shape[:2], 1)).astype(logits.dtype)
    weights = softmax(np.concatenate([slot, logits], axis=-1))  # [Hv, p, 1+p]
    mixed = weights[..., :1] * readout.swapaxes(0, 1) + weights[..., 1:] @ v  # [Hv, p, Dv]
    return mixed.swapaxes(0, 1)
