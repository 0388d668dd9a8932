"""Executes a store plan: reads each checkpoint tensor once, quantises it, writes it, forgets it."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from clover.exporter.calibration import Calibration
from clover.exporter.checkpoint import Checkpoint, Rows, to_float
from clover.exporter.disk import check_room
from clover.exporter.precision import Precision, PrecisionPlan, TensorClass, largest_group_size, plan_precision
from clover.exporter.prequantized import PACKED, PackedRows
from clover.exporter.quantize import quantize_int4, quantize_int8
from clover.exporter.store_layout import StoreEntry, file_size
from clover.exporter.store_plan import StoreItem, store_plan
from clover.exporter.store_writer import StoreWriter
from clover.exporter.weighted_quantize import quantize_int4_weighted
from clover.runtime.errors import CloverError

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Progress = Callable[[str, int], None]
WORKERS = (os.cpu_count() or 1) + 2  # two more than cores, so that some read and write while the others quantise
WEIGHTS_AT_ONCE = 2**21  # of a piece of a dense matrix
STORE_FORMAT = "2"  # store_plan.py's layouts, quantize.py's choices; an unfinished store of another starts over


def plan_for(
    checkpoint: Checkpoint,
    base: Precision,
    overrides: Mapping[TensorClass, Precision] | None = None,
    group_size: int | None = None,
) -> PrecisionPlan:
    """`plan_precision` for a checkpoint: INT4 matrices that it holds already keep their groups and zero points.

    Raises CloverError when `group_size` can't keep them.
    """
    config, form = checkpoint.config, checkpoint.form
    if form is None:
        return plan_precision(config, base, overrides, group_size)
    largest = largest_group_size(config)
    plan = plan_precision(config, base, overrides, group_size or min(form.group_size, largest or form.group_size))
    if "int4" not in plan.classes.values():
        return plan
    if form.group_size % plan.group_size:
        raise CloverError(
            f"--group-size {plan.group_size} can't keep the scales of the checkpoint's INT4 weights, which are in groups of "
            f"{form.group_size}; leave it out or give a divisor."
        )
    shifted: set[TensorClass] = set()
    for item in store_plan(config, plan):
        kind = item.tensor_class
        if (
            kind
            and item.precision == "int4"
            and kind not in shifted
            and any(map(checkpoint.has_zero_points, item.sources))
        ):
            shifted.add(kind)
    return replace(plan, zero_points=tuple(sorted(shifted)))


def write_weights(
    checkpoint: Checkpoint,
    items: tuple[StoreItem, ...],
    directory: Path,
    progress: Progress = lambda name, weights: None,
    beside: int = 0,
    calibration: Calibration | None = None,
) -> dict[str, str]:
    """Writes every store file of `items` into `directory` and returns file -> sha256.

    Resumes at the first tensor that an interrupted run did not finish. `progress(name, weights)` is called after
    every piece with the number of weights done. `beside`: bytes that will be written to the same disk afterwards.
    `calibration` weights the errors of INT4 matrices whose inputs it knows (weighted_quantize.py).

    Raises CheckpointError for NaN, infinity or a file that changes meanwhile, CloverError when the disk is full: before
    the first byte when that can be foreseen.
    """
    fingerprint = checkpoint.fingerprint()
    parts = {file: [item for item in items if item.file == file] for file in dict.fromkeys(i.file for i in items)}
    files = {file: (_entries(mine), _metadata(mine, fingerprint, calibration)) for file, mine in parts.items()}
    check_room({directory / file: file_size(*contents) for file, contents in files.items()}, beside)
    hashes: dict[str, str] = {}
    for file, contents in files.items():
        with StoreWriter(directory / file, *contents) as writer:
            _write_file(checkpoint, parts[file], writer, progress, calibration)
            hashes[file] = writer.finish()
    return hashes


def _entries(items: list[StoreItem]) -> list[StoreEntry]:
    return [StoreEntry(t.name, t.dtype, t.shape) for item in items for t in item.tensors()]


def _metadata(items: list[StoreItem], fingerprint: str, calibration: Calibration | None) -> dict[str, str]:
    """What the file is made from: an unfinished one goes on only when nothing of it has changed."""
    precisions = sorted({f"{i.tensor_class}={i.precision}/{i.group_size}" for i in items})
    made = {"format": STORE_FORMAT, "checkpoint": fingerprint, "precision": json.dumps(precisions)}
    return {**made, "calibration": calibration.sha256} if calibration else made


def _write_file(
    checkpoint: Checkpoint,
    items: list[StoreItem],
    writer: StoreWriter,
    progress: Progress,
    calibration: Calibration | None,
) -> None:
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
                for piece in _pieces(checkpoint, item):
                    waiting.append((item.name, pool.submit(_write_piece, item, writer, piece, calibration)))
                    settle(2 * WORKERS)
            settle(0)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # what failed is reported now, not after the pieces behind it
            raise


@dataclass(frozen=True)
class _Piece:
    """Some rows of an item: `read` gets them from the checkpoint, `move` puts them into the store's order."""

    first_row: int
    read: Callable[[], Rows]
    move: Callable[[Array], Array] = np.asarray
    expert: int | None = None


def _write_piece(item: StoreItem, writer: StoreWriter, piece: _Piece, calibration: Calibration | None) -> int:
    """Reads, quantises and writes some rows; all three let other threads run. Returns the number of weights."""
    start, rows, move = piece.first_row * item.shape[-1], piece.read(), piece.move
    if item.precision == "fp32":
        writer.write_part(f"{item.name}.weight", start, move(to_float(rows)))
    elif item.precision == "bf16":
        writer.write_part(f"{item.name}.weight", start, move(to_float(rows)).astype(ml_dtypes.bfloat16))
    elif item.precision == "int8":
        values, scales = quantize_int8(to_float(rows), item.group_size, name=item.name)
        writer.write_part(f"{item.name}.qweight", start, move(values))
        writer.write_part(f"{item.name}.scales", start // item.group_size, move(scales))
    else:
        if not isinstance(rows, PackedRows):
            signed = item.tensor_class == "experts"  # whose kernels take negative scales on every target
            options: dict[str, Any] = {"name": item.name, "signed_scales": signed}
            importance = calibration.importance(item, piece.expert) if calibration else None
            if importance is None:
                rows = PackedRows(*quantize_int4(rows, item.group_size, **options))
            else:
                rows = PackedRows(*quantize_int4_weighted(rows, importance, item.group_size, **options))
        rows = rows.map(move).regroup(item.group_size)  # INT4 is less to move than what it is made from
        writer.write_part(f"{item.name}.qweight", start // 2, rows.values)
        writer.write_part(f"{item.name}.scales", start // item.group_size, rows.scales)
        if item.zero_points:
            zeros = rows.packed_zeros()
            writer.write_part(f"{item.name}.zero_points", piece.first_row * zeros.shape[1], zeros)
    return rows.size


def weighted_items(checkpoint: Checkpoint, items: tuple[StoreItem, ...], calibration: Calibration) -> list[StoreItem]:
    """The matrices that `calibration` acts on: stored in INT4, not in INT4 already in the checkpoint, with inputs."""
    return [
        item
        for item in items
        if item.precision == "int4"
        and item.name in calibration.statistics
        and not all(checkpoint.dtype(source) == PACKED for source in item.sources)
    ]


def row_blocks(checkpoint: Checkpoint, item: StoreItem) -> Iterator[tuple[int, Floats]]:
    """The item's float32 rows in order, in pieces small enough to forget: (first row, [rows, columns])."""
    for piece in _pieces(checkpoint, item):
        yield piece.first_row, piece.move(to_float(piece.read()))


def _pieces(checkpoint: Checkpoint, item: StoreItem) -> Iterator[_Piece]:
    """The item in order, in pieces small enough to forget; nothing is read here."""
    c, sources = checkpoint.config, item.sources
    read = partial(checkpoint.read, sources[0])
    match item.transform:
        case "copy" | "rows":
            first = 0
            for source in sources:
                shape = checkpoint.shape(source)
                if len(shape) == 1:
                    yield _Piece(0, read, lambda x: x[None])
                    continue
                at_once = max(1, WEIGHTS_AT_ONCE // shape[1])
                for start in range(0, shape[0], at_once):
                    stop = min(start + at_once, shape[0])
                    yield _Piece(first + start, partial(checkpoint.rows, source, start, stop))
                first += shape[0]
        case "attention_qkv":
            q, k, v = sources
            half = checkpoint.shape(q)[0] // 2
            for which in (0, 1):  # all heads' query rows, all heads' output gate rows
                yield _Piece(which * half, partial(_rows_of_heads, checkpoint, q, which))
            first = 2 * half
            for source in (k, v):
                rows = checkpoint.shape(source)[0]
                yield _Piece(first, partial(checkpoint.rows, source, 0, rows))
                first += rows
        case "one_plus":
            yield _Piece(0, read, lambda x: (1.0 + x)[None])
        case "decay_rate":
            yield _Piece(0, read, lambda x: -np.exp(x)[None])
        case "flat_conv":
            yield _Piece(0, read, lambda x: x.reshape(item.shape))
        case "expert_gate_up" | "expert_down":
            assert item.layer is not None
            for expert in range(c.num_experts):
                first = expert * item.shape[1]
                if item.transform == "expert_down":
                    yield _Piece(first, partial(checkpoint.expert_down, item.layer, expert), expert=expert)
                else:
                    yield _Piece(first, partial(checkpoint.expert_gate_up, item.layer, expert), interleave, expert)


def _rows_of_heads(checkpoint: Checkpoint, name: str, which: int) -> Rows:
    """Of rows [heads, 2, width] every head's first or second half."""
    heads, rows = checkpoint.config.num_attention_heads, checkpoint.shape(name)[0]

    def pick(x: Array) -> Array:
        return np.ascontiguousarray(x.reshape(heads, 2, rows // (2 * heads), -1)[:, which]).reshape(rows // 2, -1)

    both = checkpoint.rows(name, 0, rows)
    return both.map(pick) if isinstance(both, PackedRows) else pick(both)


def interleave(gate_up: Array) -> Array:
    """[2I, K] with the gate's rows first -> rows gate0, up0, gate1, up1, …, as the fused SwiGLU reads them."""
    halves = gate_up.reshape(2, len(gate_up) // 2, -1).swapaxes(0, 1)
    return np.ascontiguousarray(halves).reshape(gate_up.shape)
