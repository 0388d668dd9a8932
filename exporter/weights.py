"""Executes a store plan: reads each checkpoint tensor once, quantises it, writes it, forgets it."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from clover.exporter.checkpoint import Checkpoint
from clover.exporter.quantize import quantize_int4, quantize_int8
from clover.exporter.store_plan import StoreItem
from clover.exporter.store_writer import StoreEntry, StoreWriter

Floats = npt.NDArray[np.float32]
Progress = Callable[[str, int], None]
WORKERS = os.cpu_count() or 1
ROWS_AT_ONCE = 4096
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
        with StoreWriter(path, entries, metadata) as writer, ThreadPoolExecutor(WORKERS) as pool:
            for item in mine:
                if all(writer.done(t.name) for t in item.tensors()):
                    progress(item.name, int(np.prod(item.shape)))
                else:
                    _write_item(checkpoint, item, writer, pool, progress)
            hashes[file] = writer.finish()
    return hashes


def _write_item(
    checkpoint: Checkpoint, item: StoreItem, writer: StoreWriter, pool: ThreadPoolExecutor, progress: Progress
) -> None:
    """Reads here, quantises and writes in the pool: NumPy and file writes let other threads run."""
    waiting: deque[Future[int]] = deque()
    for first_row, block in row_blocks(checkpoint, item):
        waiting.append(pool.submit(_write_block, item, writer, first_row, block))
        if len(waiting) > 2 * WORKERS:  # bounds what is in memory
            progress(item.name, waiting.popleft().result())
    for future in waiting:
        progress(item.name, future.result())


def _write_block(item: StoreItem, writer: StoreWriter, first_row: int, block: Floats) -> int:
    start = first_row * item.shape[-1]
    if item.precision == "fp32":
        writer.write_part(f"{item.name}.weight", start, block)
    elif item.precision == "bf16":
        writer.write_part(f"{item.name}.weight", start, block.astype(ml_dtypes.bfloat16))
    else:
        quantize, per_byte = (quantize_int4, 2) if item.precision == "int4" else (quantize_int8, 1)
        packed, scales = quantize(block, item.group_size, name=item.name)
        writer.write_part(f"{item.name}.qweight", start // per_byte, packed)
        writer.write_part(f"{item.name}.scales", start // item.group_size, scales)
    return int(block.size)


def row_blocks(checkpoint: Checkpoint, item: StoreItem) -> Iterator[tuple[int, Floats]]:
    """The item's float32 rows in order, in pieces small enough to forget: (first row, [rows, columns])."""
    c = checkpoint.config
    match item.transform:
        case "copy" | "rows":
            first = 0
            for source in item.sources:
                shape = checkpoint.shape(source)
                if len(shape) == 1:
                    yield 0, checkpoint.read(source)[None]
                    continue
                for start in range(0, shape[0], ROWS_AT_ONCE):
                    stop = min(start + ROWS_AT_ONCE, shape[0])
                    yield first + start, checkpoint.read_rows(source, start, stop)
                first += shape[0]
        case "attention_qkv":
            q, k, v = item.sources
            per_head = checkpoint.read(q).reshape(c.num_attention_heads, 2, c.head_dim, c.hidden_size)
            query, gate = (np.ascontiguousarray(per_head[:, i]).reshape(-1, c.hidden_size) for i in (0, 1))
            first = 0
            for block in (query, gate, checkpoint.read(k), checkpoint.read(v)):
                yield first, block
                first += len(block)
        case "one_plus":
            yield 0, (1.0 + checkpoint.read(item.sources[0]))[None]
        case "decay_rate":
            yield 0, -np.exp(checkpoint.read(item.sources[0]))[None]
        case "flat_conv":
            yield 0, checkpoint.read(item.sources[0]).reshape(item.shape)
        case "expert_gate_up" | "expert_down":
            assert item.layer is not None
            for expert in range(c.num_experts):
                if item.transform == "expert_gate_up":
                    block = interleave_gate_up(checkpoint.read_expert_gate_up(item.layer, expert))
                else:
                    block = checkpoint.read_expert_down(item.layer, expert)
                yield expert * len(block), block


def interleave_gate_up(gate_up: Floats) -> Floats:
    """[2I, H] with the gate's rows first -> rows gate0, up0, gate1, up1, …, as the fused SwiGLU reads them."""
    half = len(gate_up) // 2
    return np.ascontiguousarray(np.stack([gate_up[:half], gate_up[half:]], axis=1).reshape(gate_up.shape))
