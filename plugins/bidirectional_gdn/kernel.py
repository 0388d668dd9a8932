"""Triton kernels of BidirectionalGatedDeltaNet: two launches per layer.

`convolve` does both convolutions, SiLU, the l2 normalisation of q and k, and the new ring. `mix` owns BLOCK_V value
columns of one head's state: it runs the delta rule over the commit rows in chunks, and then answers the preview rows
from the state just made. It walks the state in slabs of BLOCK_K key rows through the caches: held whole in registers,
as an operand of a split-precision tensor-core product, it spilled by the thousand bytes. Lengths are read on the
device, so that one captured CUDA graph serves every step of the same shape.

The delta rule over a chunk of C = BLOCK_ROWS rows, with G_t the decays' running sum of logarithms inside the chunk and S the state
before it (Gated DeltaNet, arXiv 2412.06464, written for the update vectors u instead of the WY pair):

    u_t = beta_t (v_t - exp(G_t) S^T k_t - sum_{i<t} exp(G_t - G_i) (k_t . k_i) u_i)
    o_t = exp(G_t) S^T q_t + sum_{i<=t} exp(G_t - G_i) (q_t . k_i) u_i
    S' = exp(G_C) S + sum_i exp(G_C - G_i) k_i u_i^T

Every exponent is <= 0, and the triangular system for u is solved by forward substitution: the product form of the
inverse loses all digits in float32 when neighbouring keys repeat.
"""

# mypy: ignore-errors
# (Triton compiles these bodies; their arguments are pointers and tiles, not Python values.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def convolve(
    qkv,  # [S, rows, CHANNELS]
    conv_state,  # [S, TAPS - 1, CHANNELS], oldest row first
    conv_weight,  # [CHANNELS, TAPS]
    conv_right,  # [CHANNELS, TAPS - 1]
    commit_length,  # [S]
    row_length,  # [S]
    new_conv_state,  # [S, TAPS - 1, CHANNELS]; may be `conv_state` itself
    mixed,  # [S, rows, CHANNELS] float32: q and k normalised per head
    rows,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    NORM_EPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program per (row tile, head, sequence); a head is one of KEY_HEADS q, KEY_HEADS k or VALUE_HEADS v heads."""
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    is_key = head < 2 * KEY_HEADS
    if is_key:
        first = head * KEY_DIM
        width = KEY_DIM
    else:
        first = 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM
        width = VALUE_DIM
    commit = tl.load(commit_length + sequence).to(tl.int32)
    length = tl.load(row_length + sequence).to(tl.int32)
    d = tl.arange(0, BLOCK_DIM)
    channel = first + d
    inside = d < width
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    x = qkv + sequence * rows * CHANNELS
    old = conv_state + sequence * (TAPS - 1) * CHANNELS

    total = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    for j in tl.static_range(TAPS):
        source = row - (TAPS - 1) + j
        tap = tl.load(conv_weight + channel * TAPS + j, mask=inside, other=0.0).to(tl.float32)
        from_block = tl.load(
            x + source[:, None] * CHANNELS + channel[None, :],
            mask=((source >= 0) & (row < length))[:, None] & inside[None, :],
            other=0.0,
        )
        from_ring = tl.load(
            old + (source + TAPS - 1)[:, None] * CHANNELS + channel[None, :],
            mask=((source < 0) & (row < length))[:, None] & inside[None, :],
            other=0.0,
        )
        total += tap[None, :] * (from_block.to(tl.float32) + from_ring.to(tl.float32))
    is_preview = (row >= commit) & (row < length)
    for distance in tl.static_range(1, TAPS):
        source = row + distance
        tap = tl.load(conv_right + channel * (TAPS - 1) + distance - 1, mask=inside, other=0.0).to(tl.float32)
        ahead = tl.load(
            x + source[:, None] * CHANNELS + channel[None, :],
            mask=(is_preview & (source < length))[:, None] & inside[None, :],
            other=0.0,
        )
        total += tap[None, :] * ahead.to(tl.float32)
    activated = total / (1.0 + tl.exp(-total))
    if is_key:
        activated = activated / tl.sqrt(tl.sum(activated * activated, 1) + NORM_EPS)[:, None]
    tl.store(
        mixed + (sequence * rows + row)[:, None] * CHANNELS + channel[None, :],
        activated,
        mask=(row < length)[:, None] & inside[None, :],
    )

    if tile == 0:
        # Only this program reads this head's ring, so the ring may be updated in place once every thread has read it.
        slot = tl.arange(0, triton.next_power_of_2(TAPS - 1))
        last = slot + commit - (TAPS - 1)
        kept = (slot < TAPS - 1)[:, None] & inside[None, :]
        new = tl.load(x + last[:, None] * CHANNELS + channel[None, :], mask=kept & (last >= 0)[:, None], other=0.0)
        kept_row = tl.load(
            old + (slot + commit)[:, None] * CHANNELS + channel[None, :], mask=kept & (last < 0)[:, None], other=0.0
        )
        value = new.to(tl.float32) + kept_row.to(tl.float32)
        tl.debug_barrier()
        tl.store(
            new_conv_state + (sequence * (TAPS - 1) + slot)[:, None] * CHANNELS + channel[None, :],
            value.to(new_conv_state.dtype.element_ty),
            mask=kept,
        )


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _tile_of(base, row, live, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows [BLOCK, WIDTH] starting at `base`, zeros where not live."""
    return tl.load(base + row[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :], mask=live[:, None], other=0.0)


@triton.jit
def mix(
    mixed,  # [S, rows, CHANNELS] float32, from `convolve`
    a,  # [S, rows, VALUE_HEADS]
    b,  # [S, rows, VALUE_HEADS]
    decay_scale,  # [VALUE_HEADS]: -exp(A_log)
    dt_bias,  # [VALUE_HEADS]
    logit_scale,  # [VALUE_HEADS]
    history_bias,  # [VALUE_HEADS]
    history_c,  # [VALUE_HEADS]
    recurrent_state,  # [S, VALUE_HEADS, KEY_DIM, VALUE_DIM] float32
    commit_length,  # [S]
    row_length,  # [S]
    new_recurrent_state,  # likewise; may be `recurrent_state` itself
    o,  # [S, rows, VALUE_HEADS * VALUE_DIM]
    rows,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    READOUT_SCALE: tl.constexpr,
    TRAINED_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (tile of value columns, value head, sequence)."""
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = VALUE_HEADS * VALUE_DIM
    column = tl.program_id(0) * BLOCK_V
    commit = tl.load(commit_length + sequence).to(tl.int32)
    length = tl.load(row_length + sequence).to(tl.int32)
    q_base = mixed + sequence * rows * CHANNELS + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    k_base = q_base + KEY_HEADS * KEY_DIM
    v_base = mixed + sequence * rows * CHANNELS + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
    o_base = o + sequence * rows * WIDTH + head * VALUE_DIM + column
    out_dtype = o.dtype.element_ty
    t = tl.arange(0, BLOCK_ROWS)
    v_index = tl.arange(0, BLOCK_V)
    slab = tl.arange(0, BLOCK_K)[:, None] * VALUE_DIM + v_index[None, :]  # [BLOCK_K, BLOCK_V] of the state
    state_offset = (sequence * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + column
    state = new_recurrent_state + state_offset

    # The state is worked on where it ends up. In place, a preview alone never writes it.
    if recurrent_state.to(tl.int64) != new_recurrent_state.to(tl.int64):
        for k0 in range(0, KEY_DIM, BLOCK_K):
            tl.store(state + k0 * VALUE_DIM + slab, tl.load(recurrent_state + state_offset + k0 * VALUE_DIM + slab))
        tl.debug_barrier()

    # Commit rows: the delta rule, one chunk at a time.
    rate = tl.load(decay_scale + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    for start in range(0, commit, BLOCK_ROWS):
        row = start + t
        live = row < commit
        gate = (sequence * rows + row) * VALUE_HEADS + head
        a_t = tl.load(a + gate, mask=live, other=0.0).to(tl.float32)
        b_t = tl.load(b + gate, mask=live, other=0.0).to(tl.float32)
        log_decay = tl.where(live, rate * _softplus(a_t + bias), 0.0)
        beta = tl.where(live, 1.0 / (1.0 + tl.exp(-b_t)), 0.0)
        running = tl.cumsum(log_decay, 0)  # G_t
        k_k = tl.zeros((BLOCK_ROWS, BLOCK_ROWS), tl.float32)  # [i, t]
        k_q = tl.zeros((BLOCK_ROWS, BLOCK_ROWS), tl.float32)  # [i, t]
        k_state = tl.zeros((BLOCK_ROWS, BLOCK_V), tl.float32)
        q_state = tl.zeros((BLOCK_ROWS, BLOCK_V), tl.float32)
        for k0 in range(0, KEY_DIM, BLOCK_K):
            q = _tile_of(q_base + k0, row, live, CHANNELS, BLOCK_K)
            k = _tile_of(k_base + k0, row, live, CHANNELS, BLOCK_K)
            s = tl.load(state + k0 * VALUE_DIM + slab)
            k_k += tl.dot(k, tl.trans(k), input_precision=PRECISION)
            k_q += tl.dot(k, tl.trans(q), input_precision=PRECISION)
            k_state += tl.dot(k, s, input_precision=PRECISION)
            q_state += tl.dot(q, s, input_precision=PRECISION)
        gap = running[None, :] - running[:, None]  # [i, t]: G_t - G_i
        between = tl.where(t[:, None] <= t[None, :], tl.exp(tl.minimum(gap, 0.0)), 0.0)  # [i, t], i <= t
        # pull[i, t]: how much u_i takes away from u_t. Held with i along rows, so that a column needs no transposition.
        pull = tl.where(t[:, None] < t[None, :], k_k * between, 0.0) * beta[None, :]
        v = _tile_of(v_base, row, live, CHANNELS, BLOCK_V)
        u = beta[:, None] * (v - tl.exp(running)[:, None] * k_state)
        for i in range(1, tl.minimum(BLOCK_ROWS, commit - start)):
            weights = tl.sum(tl.where(t[None, :] == i, pull, 0.0), 1)  # [BLOCK_ROWS], zero from row i on
            taken = tl.sum(weights[:, None] * u, 0)
            u = tl.where(t[:, None] == i, u - taken[None, :], u)
        read = tl.exp(running)[:, None] * q_state
        read += tl.dot(tl.trans(k_q * between), u, input_precision=PRECISION)
        read *= KEY_DIM**-0.5
        tl.store(o_base + row[:, None] * WIDTH + v_index[None, :], read.to(out_dtype), mask=live[:, None])
        whole = tl.sum(log_decay, 0)
        carried = tl.exp(whole - running)[:, None] * u
        tl.debug_barrier()  # every thread has read the old state
        for k0 in range(0, KEY_DIM, BLOCK_K):
            k = _tile_of(k_base + k0, row, live, CHANNELS, BLOCK_K)
            s = tl.exp(whole) * tl.load(state + k0 * VALUE_DIM + slab)
            s += tl.dot(tl.trans(k), carried, input_precision=PRECISION)
            tl.store(state + k0 * VALUE_DIM + slab, s)
        tl.debug_barrier()  # the new state is there for every thread

    # Preview rows: one softmax over the history slot and the block, accumulated tile by tile from the slot on.
    preview_rows = tl.maximum(length - commit, 1).to(tl.float32)
    slot = tl.load(history_bias + head).to(tl.float32)
    slot += tl.load(history_c + head).to(tl.float32) * tl.log(preview_rows / TRAINED_BLOCK)
    scale = tl.load(logit_scale + head).to(tl.float32)
    for start in range(commit, length, BLOCK_ROWS):
        row = start + t
        live = row < length
        mixture = tl.zeros((BLOCK_ROWS, BLOCK_V), tl.float32)
        for k0 in range(0, KEY_DIM, BLOCK_K):
            q = _tile_of(q_base + k0, row, live, CHANNELS, BLOCK_K)
            mixture += tl.dot(q, tl.load(state + k0 * VALUE_DIM + slab), input_precision=PRECISION)
        mixture *= READOUT_SCALE
        largest = tl.zeros((BLOCK_ROWS,), tl.float32) + slot
        mass = tl.zeros((BLOCK_ROWS,), tl.float32) + 1.0
        for other in range(commit, length, BLOCK_ROWS):
            source = other + t
            present = source < length
            logits = tl.zeros((BLOCK_ROWS, BLOCK_ROWS), tl.float32)
            for k0 in range(0, KEY_DIM, BLOCK_K):
                q = _tile_of(q_base + k0, row, live, CHANNELS, BLOCK_K)
                k = _tile_of(k_base + k0, source, present, CHANNELS, BLOCK_K)
                logits += tl.dot(q, tl.trans(k), input_precision=PRECISION)
            logits = tl.where(present[None, :], scale * logits, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(logits, 1))
            shrink = tl.exp(largest - new_largest)
            share = tl.exp(logits - new_largest[:, None])
            v = _tile_of(v_base, source, present, CHANNELS, BLOCK_V)
            mass = mass * shrink + tl.sum(share, 1)
            mixture = mixture * shrink[:, None] + tl.dot(share, v, input_precision=PRECISION)
            largest = new_largest
        mixture = mixture / mass[:, None]
        tl.store(o_base + row[:, None] * WIDTH + v_index[None, :], mixture.to(out_dtype), mask=live[:, None])

    # Padding rows are zeros, never what the memory held before.
    zeros = tl.zeros((BLOCK_ROWS, BLOCK_V), tl.float32).to(out_dtype)
    for start in range(length, rows, BLOCK_ROWS):
        row = start + t
        tl.store(o_base + row[:, None] * WIDTH + v_index[None, :], zeros, mask=(row < rows)[:, None])
