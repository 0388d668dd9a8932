"""What each row of a step is, as GPU engines need it: every length stays a tensor on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from clover.exporter.graph.tensorrt.builder import TypedBuilder

KV_LENGTH = "kv_length"


@dataclass(frozen=True)
class DeviceRows:
    """Names of the tensors that tell rows apart. S sequences of T rows: commit rows, preview rows, padding."""

    token_ids: str  # [S, T] int64
    commit_length: str  # [S] int64
    row_length: str  # [S] int64
    position: str  # [S] int64: tokens committed before this step
    sequences: str  # [1] int64: S
    length: str  # [1] int64: T
    absolute: str  # [S, T] int64: position of each row in its text
    kv_length: str  # [S] int64: keys that attention has to read
    visible: str  # [S, 1, T, capacity] bool: which keys a row attends to


def author_device_rows(b: TypedBuilder, capacity: int) -> DeviceRows:
    """Declares the row inputs and derives what layers share; `capacity` is the KV cache's, in tokens."""
    b.scope("rows")
    int64 = TensorProto.INT64
    token_ids = b.input("token_ids", ["S", "T"], int64)
    commit_length, row_length = b.input("commit_length", ["S"], int64), b.input("row_length", ["S"], int64)
    position = b.input("position", ["S"], int64)

    shape = b.op("Shape", token_ids)
    sequences, length = b.op("Gather", shape, b.ints(0)), b.op("Gather", shape, b.ints(1))
    index = b.unsqueeze(b.op("Range", b.int_scalar(0), b.op("Squeeze", length), b.int_scalar(1)), 0)  # [1, T]
    start, commit, rows = (b.unsqueeze(x, 1) for x in (position, commit_length, row_length))  # [S, 1]
    absolute = b.op("Add", start, index)
    # Every row's key is written, so a sequence's keys reach to position + T; the mask hides those that don't count.
    kv_length = b.rename(b.op("Add", position, length), KV_LENGTH)

    key = b.op(
        "Sub", b.constant(np.arange(capacity, dtype=np.int64)[None]), start
    )  # [S, capacity]: the key's row within this step
    # A row sees the keys before its limit: commit rows up to their own, preview rows all of the step's, and padding
    # rows at least their own, since a softmax over nothing would spread NaN.
    own = b.op("Add", index, b.int_scalar(1))  # [1, T]
    limit = b.op("Where", b.op("Less", index, commit), own, b.op("Max", rows, own))  # [S, T]
    visible = b.op("Less", b.unsqueeze(key, 1), b.unsqueeze(limit, 2))  # [S, T, capacity]
    return DeviceRows(
        token_ids, commit_length, row_length, position, sequences, length, absolute, kv_length,
        b.unsqueeze(visible, 1),
    )  # fmt: skip
