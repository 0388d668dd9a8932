"""What each row of a step is: committed, previewed or padding. Computed once, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from clover.exporter.graph.builder import GraphBuilder


@dataclass(frozen=True)
class Rows:
    """Names of the tensors that tell rows apart. S sequences of T rows: commit rows, preview rows, padding."""

    token_ids: str  # [S, T] int64
    commit_length: str  # [S] int64
    row_length: str  # [S] int64
    position: str  # [S] int64: tokens committed before this step
    live_length: str  # [1] int64: longest position + T of the batch, what attention reads of the KV cache
    sequences: str  # [1] int64: S
    length: str  # [1] int64: T
    index: str  # [1, T] int64: 0 … T-1
    is_commit: str  # [S, T] bool
    is_preview: str  # [S, T] bool
    is_preview_float: str  # [S, T, 1] float32
    commit_stop: str  # [1] int64: longest commit_length; no commit row stands at or after it
    preview_start: str  # [1] int64: no preview row stands before it (T when there is none)
    preview_count: str  # [S] int64
    absolute: str  # [S, T] int64: position of each row in its text
    visible: str  # [S, 1, T, live_length] bool: which keys a row attends to


def author_rows(b: GraphBuilder) -> Rows:
    """Declares the row inputs and derives everything about rows that layers share."""
    b.scope("rows")
    int64 = TensorProto.INT64
    token_ids = b.input("token_ids", ["S", "T"], int64)
    commit_length = b.input("commit_length", ["S"], int64)
    row_length = b.input("row_length", ["S"], int64)
    position = b.input("position", ["S"], int64)
    live_length = b.input("live_length", [1], int64)

    shape = b.op("Shape", token_ids)
    sequences, length = b.op("Gather", shape, b.ints(0)), b.op("Gather", shape, b.ints(1))
    zero, one = b.int_scalar(0), b.int_scalar(1)
    index = b.unsqueeze(b.op("Range", zero, b.op("Squeeze", length), one), 0)  # [1, T]
    commit, rows = b.unsqueeze(commit_length, 1), b.unsqueeze(row_length, 1)  # [S, 1]
    is_commit = b.op("Less", index, commit)  # [S, T]
    is_preview = b.op("And", b.op("GreaterOrEqual", index, commit), b.op("Less", index, rows))
    preview_count = b.op("Sub", row_length, commit_length)
    has_preview = b.op("Greater", preview_count, zero)
    # rows outside [0, commit_stop) and [preview_start, T) need no delta rule and no block softmax
    commit_stop = b.op("ReduceMax", commit_length, b.ints(0), keepdims=1)
    preview_start = b.op("ReduceMin", b.op("Where", has_preview, commit_length, length), b.ints(0), keepdims=1)
    absolute = b.op("Add", b.unsqueeze(position, 1), index)
    return Rows(
        token_ids, commit_length, row_length, position, live_length, sequences, length, index, is_commit, is_preview,
        b.to_float(b.unsqueeze(is_preview, 2)), commit_stop, preview_start, preview_count, absolute,
        _visible(b, position, commit, rows, index, is_commit, live_length),
    )  # fmt: skip


def _visible(
    b: GraphBuilder, position: str, commit: str, rows: str, index: str, is_commit: str, live_length: str
) -> str:
    """Commit rows see the past and earlier commit rows; preview rows the past and every row of their step."""
    column = b.op("Range", b.int_scalar(0), b.op("Squeeze", live_length), b.int_scalar(1))
    key = b.op("Sub", b.unsqueeze(column, 0, 1), b.unsqueeze(position, 1, 2))  # [S, 1, L]: key row within the step
    row = b.unsqueeze(index, 2)  # [1, T, 1]
    commit_row = b.unsqueeze(is_commit, 2)
    causal = b.op("And", b.op("LessOrEqual", key, row), b.op("Less", key, b.unsqueeze(commit, 2)))
    # a padding row sees itself at least: a softmax over nothing would spread NaN
    both = b.op("Less", key, b.op("Max", b.unsqueeze(rows, 2), b.op("Add", row, b.int_scalar(1))))
    # Where has no bool kernel on the CPU
    seen = b.op("Or", b.op("And", commit_row, causal), b.op("And", b.op("Not", commit_row), both))  # [S, T, L]
    return b.unsqueeze(seen, 1)


def rotary_tables(b: GraphBuilder, rows: Rows, rotary_dim: int, theta: float) -> tuple[str, str, str]:
    """cos, sin [S*T, rotary_dim/2] at each row's absolute position, and the row ids [S, T] that index them.

    Angles are computed in float64: at position 131,071 a float32 angle is off by 0.008 rad.
    """
    b.scope("rope")
    inverse = 1.0 / theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    flat = b.reshape(b.op("Cast", rows.absolute, to=TensorProto.DOUBLE), -1, 1)
    angle = b.op("Mul", flat, b.constant(inverse[None]))  # [S*T, rotary_dim/2]
    cos, sin = b.to_float(b.op("Cos", angle)), b.to_float(b.op("Sin", angle))
    count = b.op("Squeeze", b.op("Shape", b.reshape(rows.token_ids, -1)))
    ids = b.op("Reshape", b.op("Range", b.int_scalar(0), count, b.int_scalar(1)), b.op("Shape", rows.token_ids))
    return cos, sin, ids
