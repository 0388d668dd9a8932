"""Executes a store plan: reads each checkpoint tensor once, quantises it, writes it, forgets it."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from clover.exporter.checkpoint import Checkpoint, Rows, to_float
from clover.exporter.prequantized import PackedRows
from clover.exporter.quantize import quantize_int4, quantize_int8
from clover.exporter.store_plan import StoreItem
from clover.exporter.store_writer import StoreEntry, StoreWriter

Floats = npt.NDArray[np.float32]
Progress = Callable[[str, int], None]
WORKERS = os.cpu_count() or 1
WEIGHTS_AT_ONCE = 2**21  # of a piece of a dense matrix
STORE_FORMAT = "1"  # layouts of store_plan.py; an unfinished store of another format starts over


def write_weights(
    checkpoint: Checkpoint,
    items: tuple[StoreItem, ...],
    directory: Path,
    progress: Progress = lambda name, weights: None,
) -> dict[str, str]:
    """Writes every store file of `items` into `directory` and returns file -> sha256.

    Resumes at the first tensor that an interrupted run did not finish. `progress(name, weights)` is called after
    every piece with the number of weights done. Raises CheckpointError for NaN or infinity, CloverError when the disk
    is full.
    """
    hashes: dict[str, str] = {}
    for file in dict.fromkeys(item.file for item in items):
        mine = [item for item in items if item.file == file]
        entries = [StoreEntry(t.name, t.dtype, t.shape) for item in mine for t in item.tensors()]
        metadata = {
            "format": STORE_FORMAT,
            "checkpoint": checkpoint.fingerprint(),
            "precision": json.dumps(sorted({f"{i.tensor_class}={i.precision}/{i.group_size}" for i in mine})),
        }
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with StoreWriter(path, entries, metadata) as writer:
            _write_file(checkpoint, mine, writer, progress)
            hashes[file] = writer.finish()
    return hashes


def _write_file(checkpoint: Checkpoint, items: list[StoreItem], writer: StoreWriter, progress: Progress) -> None:
    """Every item that is not written yet, a few pieces ahead of the slowest: that bounds what is in memory."""
    waiting: deque[tuple[str, Future[int]]] = deque()

    def settle(most: int) -> None:
        while len(waiting) > most:
            name, future = waiting.popleft()
            progress(name, future.result())

    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            for item in items:
                if all(writer.done(t.name) for t in item.tensors()):
                    settle(0)
                    progress(item.name, int(np.prod(item.shape)))
                    continue
                for first_row, read in _pieces(checkpoint, item):
                    waiting.append((item.name, pool.submit(_write_block, item, writer, first_row, read)))
                    settle(2 * WORKERS)
            settle(0)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # what failed is reported now, not after the pieces behind it
            raise


def _write_block(item: StoreItem, writer: StoreWriter, first_row: int, read: Callable[[], Rows]) -> int:
    """Reads, quantises and writes some rows; all three let other threads run. Returns the number of weights."""
    start, rows = first_row * item.shape[-1], read()
    if item.precision == "fp32":
        writer.write_part(f"{item.name}.weight", start, to_float(rows))
    elif item.precision == "bf16":
        writer.write_part(f"{item.name}.weight", start, to_float(rows).astype(ml_dtypes.bfloat16))
    elif item.precision == "int8":
        packed, scales = quantize_int8(to_float(rows), item.group_size, name=item.name)
        writer.write_part(f"{item.name}.qweight", start, packed)
        writer.write_part(f"{item.name}.scales", start // item.group_size, scales)
    else:
        if not isinstance(rows, PackedRows):
            rows = PackedRows(*quantize_int4(rows, item.group_size, name=item.name))
        rows = rows.regroup(item.group_size)
        writer.write_part(f"{item.name}.qweight", start // 2, rows.values)
        writer.write_part(f"{item.name}.scales", start // item.group_size, rows.scales)
        if item.zero_points:
            zeros = rows.packed_zeros()
            writer.write_part(f"{item.name}.zero_points", first_row * zeros.shape[1], zeros)
    return len(rows) * item.shape[-1]


def row_blocks(checkpoint: Checkpoint, item: StoreItem) -> Iterator[tuple[int, Floats]]:
    """The item's float32 rows in order, in pieces small enough to forget: (first row, [rows, columns])."""
    for first, read in _pieces(checkpoint, item):
        yield first, to_float(read())


def _pieces(checkpoint: Checkpoint, item: StoreItem) -> Iterator[tuple[int, Callable[[], Rows]]]:
    """(first row, what reads the rows from there) for pieces small enough to forget, in order; nothing is read here."""
    c = checkpoint.config
    match item.transform:
        case "copy" | "rows":
            first = 0
            for source in item.sources:
                shape = checkpoint.shape(source)
                if len(shape) == 1:
                    yield 0, lambda source=source: checkpoint.read(source)[None]  # type: ignore[misc]
                    continue
                at_once = max(1, WEIGHTS_AT_ONCE // shape[1])
                for start in range(0, shape[0], at_once):
                    yield first + start, partial(checkpoint.rows, source, start, min(start + at_once, shape[0]))
                first += shape[0]
        case "attention_qkv":
            q, k, v = item.sources
            heads, half = (c.num_attention_heads, 2), checkpoint.shape(q)[0] // 2

            def of_heads(which: int) -> Rows:
                """All heads' query rows (0) or output gate rows (1)."""

                def pick(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
                    return x.reshape(*heads, c.head_dim, -1)[:, which].reshape(half, -1)

                return move_rows(checkpoint.rows(q, 0, 2 * half), pick)

            yield 0, partial(of_heads, 0)
            yield half, partial(of_heads, 1)
            first = 2 * half
            for source in (k, v):
                rows = checkpoint.shape(source)[0]
                yield first, partial(checkpoint.rows, source, 0, rows)
                first += rows
        case "one_plus":
            yield 0, lambda: (1.0 + checkpoint.read(item.sources[0]))[None]
        case "decay_rate":
            yield 0, lambda: -np.exp(checkpoint.read(item.sources[0]))[None]
        case "flat_conv":
            yield 0, lambda: checkpoint.read(item.sources[0]).reshape(item.shape)
        case "expert_gate_up" | "expert_down":
            layer, rows = item.layer, item.shape[1]
            assert layer is not None
            for expert in range(c.num_experts):
                if item.transform == "expert_down":
                    yield expert * rows, partial(checkpoint.expert_down, layer, expert)
                else:
                    yield (
                        expert * rows,
                        lambda e=expert: move_rows(checkpoint.expert_gate_up(layer, e), interleave),  # type: ignore[misc]
                    )


def move_rows(rows: Rows, move: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Rows:
    """The rows in another order, however they are stored."""
    return rows.map(move) if isinstance(rows, PackedRows) else np.ascontiguousarray(move(rows))


def interleave(gate_up: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[2I, ...] with the gate's rows first -> rows gate0, up0, gate1, up1, …, as the fused SwiGLU reads them."""
    return gate_up.reshape(2, len(gate_up) // 2, -1).swapaxes(0, 1).reshape(gate_up.shape)
