"""Running sums over the rows that matrices are fed with, of routed experts each one's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.exporter.calibration import InputStatistics, calibrated_items, statistics_shape
from clover.exporter.config import ModelConfig
from clover.plugins.numerics import silu

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
BUFFER_BYTES = 2**30  # of experts' inputs that wait, all layers together
MOST_ROWS = 8192
PARTS = ("square", "abs", "count")


@dataclass
class Sums:
    """Σx² and Σ|x| float64 [K] and the number of rows, int64 []; [E, K] and [E] of routed experts."""

    square: Array
    abs: Array
    count: Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Sums:
        return cls(np.zeros(shape), np.zeros(shape), np.zeros(shape[:-1], np.int64))

    def add(self, square: Array, magnitude: Array, rows: int, index: int | tuple[()] = ()) -> None:
        self.square[index] += square
        self.abs[index] += magnitude
        self.count[index] += rows

    def add_rows(self, x: Floats, index: int | tuple[()] = ()) -> None:
        """x [rows, K]."""
        self.add(np.square(x).sum(0, dtype=np.float64), np.abs(x).sum(0, dtype=np.float64), len(x), index)

    def means(self) -> InputStatistics:
        rows = np.maximum(self.count, 1)[..., None]
        mean_square, mean_abs = ((s / rows).astype(np.float32) for s in (self.square, self.abs))
        return InputStatistics(mean_square, mean_abs, self.count)


def inner_rows(x: Floats, gate_up: Floats) -> Floats:
    """What an expert's down projection is fed with: SiLU(gate x) · up x.

    x [rows, H]; gate_up [2 I, H], rows gate0, up0, gate1, up1, … → [rows, I].
    """
    both = x @ gate_up.T
    return silu(both[:, 0::2]) * both[:, 1::2]


@dataclass
class ModelSums:
    """The sums of every matrix of a model, and the experts' rows that wait to be added.

    An expert's down projection reads what its gate and up projections made inside one operator of the engine. It is
    computed again from the rows that were routed to it, for many rows at once, since its weights are dequantised for that.
    """

    by_name: dict[str, Sums]
    waiting: dict[int, list[tuple[Floats, Bools]]] = field(default_factory=dict)  # by layer: inputs, experts used
    rows_waiting: int = 0

    @classmethod
    def empty(cls, config: ModelConfig) -> ModelSums:
        return cls({item.name: Sums.zeros(statistics_shape(item)) for item in calibrated_items(config)})

    def wait(self, layer: int, x: Floats, used: Bools) -> None:
        """x [rows, H] float32, used [rows, E]: which experts each row is routed to."""
        self.waiting.setdefault(layer, []).append((x, used))
        if layer == 0:
            self.rows_waiting += len(x)

    def add_waiting(self, gate_up: Callable[[int, int], Floats]) -> None:
        """Adds the rows that wait. `gate_up(layer, expert)` reads an expert's matrix [2 I, H] in the store's row order."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for layer, parts in self.waiting.items():
                x, used = (np.concatenate(list(p)) for p in zip(*parts, strict=True))
                list(pool.map(partial(self._add_expert, layer, x, used, gate_up), range(used.shape[1])))
        self.waiting.clear()
        self.rows_waiting = 0

    def _add_expert(
        self, layer: int, x: Floats, used: Bools, gate_up: Callable[[int, int], Floats], expert: int
    ) -> None:
        own = x[used[:, expert]]
        if len(own):
            self.by_name[f"layers.{layer}.experts.gate_up"].add_rows(own, expert)
            self.by_name[f"layers.{layer}.experts.down"].add_rows(inner_rows(own, gate_up(layer, expert)), expert)

    # -- to and from the file of an unfinished run -----------------------------------------------

    def tensors(self) -> dict[str, Array]:
        assert not self.rows_waiting
        return {f"{name}.{part}": getattr(s, part) for name, s in self.by_name.items() for part in PARTS}

    def take(self, tensors: Mapping[str, Array]) -> None:
        """Goes on from what `tensors` gave. Raises KeyError or ValueError when it is of another model."""
        for name, s in self.by_name.items():
            for part in PARTS:
                getattr(s, part)[...] = tensors[f"{name}.{part}"]


def rows_kept(config: ModelConfig) -> int:
    """Rows a layer that may wait: experts' weights are dequantised once for all of them."""
    return max(256, min(MOST_ROWS, BUFFER_BYTES // (4 * config.hidden_size * config.num_hidden_layers)))
