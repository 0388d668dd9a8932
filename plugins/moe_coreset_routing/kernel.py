"""Triton kernel of MoECoresetRouting: one launch per layer.

Every program of a sequence finds the block's coreset for itself (at most 64 rows of 256 logits, all in cache) and
writes its own rows, so no second launch has to wait for the first. Ties are decided by unique integer keys: the bits
of a non-negative float32 sort like its value, and the reversed expert index below them prefers the lower expert.
"""

# mypy: ignore-errors
# (Triton compiles these bodies; their arguments are pointers and tiles, not Python values.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rank_keys(values, expert, BLOCK_EXPERTS: tl.constexpr):
    """Unique int64 keys that sort like `values` (>= 0), equal values by ascending expert first."""
    bits = values.to(tl.int32, bitcast=True).to(tl.int64)
    return bits * BLOCK_EXPERTS + (BLOCK_EXPERTS - 1 - expert).to(tl.int64)


@triton.jit
def route_block(
    logits,  # [S, rows, EXPERTS] float32
    commit_length,  # [S]
    row_length,  # [S]
    top_p,  # [S] float32
    routed_logits,  # [S, rows, EXPERTS]; never `logits` itself, which other programs still read
    rows,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    MIN_EXPERTS: tl.constexpr,
    EXCLUDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """One program per (row tile, sequence)."""
    tile, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    commit = tl.load(commit_length + sequence).to(tl.int32)
    length = tl.load(row_length + sequence).to(tl.int32)
    share_wanted = tl.load(top_p + sequence)
    r = tl.arange(0, BLOCK_ROWS)
    expert = tl.arange(0, BLOCK_EXPERTS)
    real = expert < EXPERTS
    base = logits + sequence * rows * EXPERTS
    own = tile * BLOCK_ROWS + r
    has_preview = (tile * BLOCK_ROWS < length) & ((tile + 1) * BLOCK_ROWS > commit)

    # Votes: each preview row's TOP_K largest probabilities.
    votes = tl.zeros((BLOCK_EXPERTS,), tl.float32)
    for start in range(commit, tl.where(has_preview, length, commit), BLOCK_ROWS):
        row = start + r
        live = (row < length)[:, None]
        x = tl.load(base + row[:, None] * EXPERTS + expert[None, :], mask=live & real[None, :], other=0.0)
        x = tl.where(real[None, :], x, float("-inf"))
        e = tl.exp(x - tl.max(x, 1)[:, None])
        p = e / tl.sum(e, 1)[:, None]
        keys = _rank_keys(p, expert[None, :], BLOCK_EXPERTS)
        for _ in tl.static_range(TOP_K):
            keys = tl.where(keys == tl.max(keys, 1)[:, None], -1, keys)
        votes += tl.sum(tl.where((keys < 0) & live, p, 0.0), 0)

    # The coreset: descending share, up to and including the first expert whose running share reaches top_p.
    share = votes / tl.maximum(tl.sum(votes, 0), 1e-30)
    keys = _rank_keys(share, expert, BLOCK_EXPERTS)
    ranked = tl.sort(keys, descending=True)
    ranked_share = (ranked // BLOCK_EXPERTS).to(tl.int32).to(tl.float32, bitcast=True)
    running = tl.cumsum(ranked_share, 0)
    size = tl.sum((running < share_wanted).to(tl.int32), 0) + 1
    size = tl.minimum(tl.maximum(size, MIN_EXPERTS), EXPERTS)
    last = tl.sum(tl.where(expert == size - 1, ranked, 0), 0)  # `expert` here counts positions in the ranking
    allowed = keys >= tl.where(share_wanted >= 1.0, -1, last)

    x = tl.load(base + own[:, None] * EXPERTS + expert[None, :], mask=(own < rows)[:, None] & real[None, :], other=0.0)
    restricted = ((own >= commit) & (own < length))[:, None] & ~allowed[None, :]
    # Padding rows choose no expert at all: the expert kernels skip rows whose every logit is EXCLUDED.
    restricted = restricted | (own >= length)[:, None]
    tl.store(
        routed_logits + (sequence * rows + own)[:, None] * EXPERTS + expert[None, :],
        tl.where(restricted, EXCLUDED, x),
        mask=(own < rows)[:, None] & real[None, :],
    )
