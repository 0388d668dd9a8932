"""Triton kernels of MoEExperts: five launches per layer.

`choose_experts` (each row's top_k) and `list_rows` (each expert's rows) decide on the device who computes what;
`gate_up_product` and `down_product` run one program per (tile of weight rows, expert) and leave at once when no row
chose the expert; `combine` adds a row's experts up in a fixed order, so that results repeat bit for bit.

Weights are reached through a table of addresses, so that an expert may lie in device memory or in mapped host memory.
A program reads its weights once for up to BLOCK_ROWS rows of the expert, once more for each further BLOCK_ROWS.
INT4 values stay integers inside the tensor-core product (they are exact in every float type) and the group's scale
multiplies its float32 partial sum, so that dequantising rounds nothing.
"""

# mypy: ignore-errors
# (Triton compiles these bodies; their arguments are pointers and tiles, not Python values.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def choose_experts(
    router_logits,  # [N, EXPERTS] float32
    ids,  # [N, TOP_K] int32: a row's experts, best first; -1 where its weight is 0
    weights,  # [N, TOP_K] float32, each row's sum 1 (or 0: a padding row)
    rows,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    EXCLUDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per row tile."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    expert = tl.arange(0, BLOCK_EXPERTS)
    real = (row < rows)[:, None] & (expert < EXPERTS)[None, :]
    x = tl.load(router_logits + row[:, None].to(tl.int64) * EXPERTS + expert[None, :], mask=real, other=float("-inf"))
    x = tl.where(x == 0.0, 0.0, x)  # -0 and 0 are equal, so their keys must be
    # Unique integer keys that sort like the logits, equal logits by ascending expert first.
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    keys = ordered * BLOCK_EXPERTS + (BLOCK_EXPERTS - 1 - expert)[None, :].to(tl.int64)
    lowest = -0x7FFFFFFFFFFFFFFF
    slot = tl.arange(0, BLOCK_K)
    chosen = tl.full((BLOCK_ROWS, BLOCK_K), -1, tl.int32)
    logit = tl.full((BLOCK_ROWS, BLOCK_K), float("-inf"), tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(keys, 1)
        hit = keys == best[:, None]
        chosen = tl.where(slot[None, :] == k, tl.sum(tl.where(hit, expert[None, :], 0), 1)[:, None], chosen)
        logit = tl.where(slot[None, :] == k, tl.max(tl.where(hit, x, float("-inf")), 1)[:, None], logit)
        keys = tl.where(hit, lowest, keys)
    largest = tl.max(logit, 1)[:, None]
    present = largest > EXCLUDED  # a row that may use no expert is padding
    e = tl.where(present, tl.exp(logit - tl.where(present, largest, 0.0)), 0.0)
    weight = e / tl.maximum(tl.sum(e, 1)[:, None], 1e-30)
    kept = (row < rows)[:, None] & (slot < TOP_K)[None, :]
    where = row[:, None].to(tl.int64) * TOP_K + slot[None, :]
    tl.store(ids + where, tl.where(weight > 0.0, chosen, -1), mask=kept)
    tl.store(weights + where, weight, mask=kept)


@triton.jit
def list_rows(
    ids,  # [N, TOP_K]
    counts,  # [EXPERTS] int32: how many rows chose the expert
    lists,  # [EXPERTS, N] int32: those rows' places in `ids`, ascending
    rows,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per expert."""
    expert = tl.program_id(0)
    found = 0
    for start in range(0, rows * TOP_K, BLOCK):
        place = start + tl.arange(0, BLOCK)
        match = tl.load(ids + place, mask=place < rows * TOP_K, other=-1) == expert
        ones = match.to(tl.int32)
        tl.store(lists + expert.to(tl.int64) * rows + found + tl.cumsum(ones, 0) - 1, place, mask=match)
        found += tl.sum(ones, 0)
    tl.store(counts + expert, found)


@triton.jit
def _integers(nibbles, DOT: tl.constexpr):
    """uint8 nibbles -> value - 8 in type DOT. 2^23 + n has n in its last bits: cheaper than a conversion instruction."""
    return ((nibbles.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0).to(DOT)


@triton.jit
def _add_product(
    total,  # [BLOCK_ROWS, BLOCK_N] float32
    x,  # [BLOCK_ROWS, BLOCK_K] values, type DOT
    weight,  # address of the expert's weight [N, K]: INT4 pairs or floats
    scales,  # address of its scales [N, K / BLOCK_K], INT4 only
    n,  # [BLOCK_N] rows of the weight
    inside,  # [BLOCK_N]
    k0,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INT4: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """total + x · weight[n, k0 : k0 + BLOCK_K]ᵀ."""
    if INT4:
        byte = k0 // 2 + tl.arange(0, BLOCK_K // 2)
        packed = tl.load(weight + n[:, None] * (K // 2) + byte[None, :], mask=inside[:, None], other=0)
        scale = tl.load(scales + n * (K // BLOCK_K) + k0 // BLOCK_K, mask=inside, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(x, (x.shape[0], BLOCK_K // 2, 2)))
        part = tl.dot(even, tl.trans(_integers(packed & 0xF, DOT)), input_precision=PRECISION)
        part = tl.dot(odd, tl.trans(_integers(packed >> 4, DOT)), part, input_precision=PRECISION)
        total += part * scale[None, :]
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        w = tl.load(weight + n[:, None] * K + k[None, :], mask=inside[:, None], other=0.0)
        if w.dtype != DOT:
            w = w.to(tl.float32).to(DOT)
        total = tl.dot(x, tl.trans(w), total, input_precision=PRECISION)
    return total


@triton.jit
def _address(table, matrix, expert, EXPERTS: tl.constexpr, ELEMENT: tl.constexpr):
    """Pointer to one of an expert's four matrices. The weight store aligns every expert to 16 bytes."""
    address = tl.load(table + matrix * EXPERTS + expert)
    return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), 16)  # unknown to the compiler, loads would go by bytes


@triton.jit
def _rows_at(base, row, live, k0, STRIDE: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr):
    k = k0 + tl.arange(0, BLOCK_K)
    x = tl.load(base + row[:, None].to(tl.int64) * STRIDE + k[None, :], mask=live[:, None], other=0.0)
    if x.dtype != DOT:
        x = x.to(tl.float32).to(DOT)
    return x


@triton.jit
def _gate_up_tile(
    hidden, table, lists, inner, rows, expert, first, count,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    WEIGHT: tl.constexpr, SCALE: tl.constexpr, INT4: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    index = first + tl.arange(0, BLOCK_ROWS)
    live = index < count
    place = tl.load(lists + expert.to(tl.int64) * rows + index, mask=live, other=0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < INTERMEDIATE
    weight = _address(table, 0, expert, EXPERTS, WEIGHT)
    scales = _address(table, 1, expert, EXPERTS, SCALE)
    gate = tl.zeros((BLOCK_ROWS, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_ROWS, BLOCK_N), tl.float32)
    for k0 in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        x = _rows_at(hidden, place // TOP_K, live, k0, HIDDEN, BLOCK_K, DOT)
        gate = _add_product(gate, x, weight, scales, 2 * n, inside, k0, HIDDEN, BLOCK_K, INT4, DOT, PRECISION)
        up = _add_product(up, x, weight, scales, 2 * n + 1, inside, k0, HIDDEN, BLOCK_K, INT4, DOT, PRECISION)
    value = gate / (1.0 + tl.exp(-gate)) * up
    pointers = inner + place[:, None].to(tl.int64) * INTERMEDIATE + n[None, :]
    tl.store(pointers, value.to(inner.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def gate_up_product(
    hidden,  # [N, HIDDEN]
    expert_table,  # [4, EXPERTS] int64 addresses: gate_up, its scales, down, its scales
    counts,
    lists,
    inner,  # [N * TOP_K, INTERMEDIATE]: SiLU(gate x) · up x
    rows,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHT: tl.constexpr,
    SCALE: tl.constexpr,
    INT4: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (tile of intermediate units, expert). Weight rows are interleaved gate0, up0, gate1, …"""
    expert = tl.program_id(1)
    count = tl.load(counts + expert)
    if count > 0:
        if count <= FEW_ROWS:
            _gate_up_tile(
                hidden, expert_table, lists, inner, rows, expert, 0, count, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K,
                WEIGHT, SCALE, INT4, DOT, PRECISION, FEW_ROWS, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        else:
            for first in range(0, count, BLOCK_ROWS):
                _gate_up_tile(
                    hidden, expert_table, lists, inner, rows, expert, first, count, HIDDEN, INTERMEDIATE, EXPERTS,
                    TOP_K, WEIGHT, SCALE, INT4, DOT, PRECISION, BLOCK_ROWS, BLOCK_N, BLOCK_K, STAGES,
                )  # fmt: skip


@triton.jit
def _down_tile(
    inner, table, lists, outer, rows, expert, first, count,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, EXPERTS: tl.constexpr,
    WEIGHT: tl.constexpr, SCALE: tl.constexpr, INT4: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    index = first + tl.arange(0, BLOCK_ROWS)
    live = index < count
    place = tl.load(lists + expert.to(tl.int64) * rows + index, mask=live, other=0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < HIDDEN
    weight = _address(table, 2, expert, EXPERTS, WEIGHT)
    scales = _address(table, 3, expert, EXPERTS, SCALE)
    total = tl.zeros((BLOCK_ROWS, BLOCK_N), tl.float32)
    for k0 in tl.range(0, INTERMEDIATE, BLOCK_K, num_stages=STAGES):
        x = _rows_at(inner, place, live, k0, INTERMEDIATE, BLOCK_K, DOT)
        total = _add_product(total, x, weight, scales, n, inside, k0, INTERMEDIATE, BLOCK_K, INT4, DOT, PRECISION)
    pointers = outer + place[:, None].to(tl.int64) * HIDDEN + n[None, :]
    tl.store(pointers, total, mask=live[:, None] & inside[None, :])


@triton.jit
def down_product(
    inner,  # [N * TOP_K, INTERMEDIATE]
    expert_table,  # [4, EXPERTS]
    counts,
    lists,
    outer,  # [N * TOP_K, HIDDEN] float32, not yet weighted
    rows,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    EXPERTS: tl.constexpr,
    WEIGHT: tl.constexpr,
    SCALE: tl.constexpr,
    INT4: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (tile of hidden units, expert)."""
    expert = tl.program_id(1)
    count = tl.load(counts + expert)
    if count > 0:
        if count <= FEW_ROWS:
            _down_tile(
                inner, expert_table, lists, outer, rows, expert, 0, count, HIDDEN, INTERMEDIATE, EXPERTS,
                WEIGHT, SCALE, INT4, DOT, PRECISION, FEW_ROWS, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        else:
            for first in range(0, count, BLOCK_ROWS):
                _down_tile(
                    inner, expert_table, lists, outer, rows, expert, first, count, HIDDEN, INTERMEDIATE, EXPERTS,
                    WEIGHT, SCALE, INT4, DOT, PRECISION, BLOCK_ROWS, BLOCK_N, BLOCK_K, STAGES,
                )  # fmt: skip


@triton.jit
def combine(
    outer,  # [N * TOP_K, HIDDEN] float32
    weights,  # [N, TOP_K] float32
    mixed,  # [N, HIDDEN]
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per (row, tile of hidden units): only a grid's first axis may pass 65,535.

    A slot of weight 0 was never computed and is not read.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(weights + row * TOP_K + k)
        width = tl.where(weight > 0.0, HIDDEN, 0)
        y = tl.load(outer + (row * TOP_K + k) * HIDDEN + n, mask=n < width, other=0.0)
        total += weight * y
    tl.store(mixed + row * HIDDEN + n, total.to(mixed.dtype.element_ty), mask=n < HIDDEN)
