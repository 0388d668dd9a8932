"""Routed experts in memory: some on the card, the others in pinned host memory, and the table of their addresses.

Every expert takes one slot of equal size, four parts one after another: gate_up, its scales, down, its scales. Scales
are float32 in the weight store and bfloat16 here, which loses nothing: they were chosen to be exact in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from clover.engines.residency import Move, ResidencyPolicy
from clover.exporter.weight_index import StoredTensor
from clover.runtime.errors import BundleError
from clover.runtime.gpu.device import ALIGNMENT, Device

PARTS = ("gate_up", "gate_up_scales", "down", "down_scales")  # rows of the table
MOVE_BYTES = 256 * 2**20  # most bytes moved between two blocks


@dataclass(frozen=True)
class SlotLayout:
    """Where an expert's parts lie in its slot: (offset, bytes) each, bytes 0 where it has none; and the slot's size."""

    parts: tuple[tuple[int, int], ...]
    nbytes: int


class ExpertWeights:
    """The expert store's files, read expert by expert."""

    def __init__(self, directory: Path, index: Mapping[str, StoredTensor], layers: int, experts: int) -> None:
        self._directory, self._index = directory, index
        self.layers, self.experts = layers, experts
        self.quantised = "layers.0.experts.gate_up.qweight" in index
        offset, parts = 0, []
        for part in PARTS:
            stored = self._stored(0, part)
            nbytes = 0 if stored is None else stored.nbytes // experts
            if stored is not None and part.endswith("scales"):
                nbytes //= 2  # float32 in the store
            parts.append((offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.layout = SlotLayout(tuple(parts), offset)

    def read(self, layer: int, expert: int, slot: npt.NDArray[np.uint8]) -> None:
        """Fills a slot's bytes."""
        for part, (offset, nbytes) in zip(PARTS, self.layout.parts, strict=True):
            stored = self._stored(layer, part)
            if stored is None:
                continue
            size = stored.nbytes // self.experts
            data = np.memmap(
                self._directory / stored.file, np.uint8, "r", stored.offset + expert * size, (size,)
            )  # only this expert's pages are touched
            if part.endswith("scales"):
                slot[offset : offset + nbytes] = data.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint8)
            else:
                slot[offset : offset + nbytes] = data

    def _stored(self, layer: int, part: str) -> StoredTensor | None:
        if part.endswith("_scales"):
            name = f"layers.{layer}.experts.{part.removesuffix('_scales')}.scales"
            return self._index.get(name) if self.quantised else None
        name = f"layers.{layer}.experts.{part}.{'qweight' if self.quantised else 'weight'}"
        if name not in self._index:
            raise BundleError(f"the bundle's weights lack {name}; build the bundle again.")
        return self._index[name]


class ExpertStore:
    """All routed experts of a model, ready for the kernels. `table` is the device address of [layers, 4, E] int64."""

    def __init__(self, device: Device, weights: ExpertWeights, capacity: int) -> None:
        """At most `capacity` experts go onto the card. Raises CloverError when there is no room for them."""
        self._device, self._weights = device, weights
        self.policy = ResidencyPolicy(capacity, weights.layers, weights.experts)
        size, total = weights.layout.nbytes, weights.layers * weights.experts
        self._card = device.allocate(self.policy.capacity * size)
        self._host = device.pin((total - self.policy.capacity) * size) if total > self.policy.capacity else None
        self._swap = device.pin(size)
        self._addresses = device.pin(weights.layers * len(PARTS) * weights.experts * 8)
        self._table = device.allocate(self._addresses.nbytes)
        self._load()
        self._write_table()

    @property
    def host_experts(self) -> int:
        """Experts that are read over the link."""
        return self._weights.layers * self._weights.experts - self.policy.capacity

    def table(self, layer: int) -> int:
        """Device address of a layer's [4, E] addresses."""
        return self._table.address + layer * len(PARTS) * self._weights.experts * 8

    def observe(self, rows: npt.NDArray[np.int32]) -> None:
        """Counts a step; rows [layers, E]: how many rows chose each expert."""
        if self._host is not None:
            self.policy.observe(rows > 0)

    def follow_use(self) -> int:
        """Swaps the experts worth swapping, between blocks, when nothing is queued; returns how many."""
        if self._host is None:
            return 0
        moves = self.policy.plan_moves(MOVE_BYTES // (2 * self._weights.layout.nbytes))
        for move in moves:
            self._exchange(move)
        if moves:
            self.policy.apply(moves)
            self._write_table()
        return len(moves)

    # -- bytes ---------------------------------------------------------------------------------

    def _load(self) -> None:
        size = self._weights.layout.nbytes
        resident, slots = self.policy.resident, self.policy.slots
        host = None if self._host is None else self._host.array
        staging = self._swap.array
        for layer in range(self._weights.layers):
            for expert in range(self._weights.experts):
                at = int(slots[layer, expert]) * size
                if resident[layer, expert]:
                    self._weights.read(layer, expert, staging)
                    self._device.upload(self._card.address + at, self._swap.address, size)
                    self._device.synchronize()  # the staging slot is filled again
                else:
                    assert host is not None
                    self._weights.read(layer, expert, host[at : at + size])

    def _exchange(self, move: Move) -> None:
        assert self._host is not None
        size = self._weights.layout.nbytes
        card, host = self._card.address + move.card_slot * size, self._host.address + move.host_slot * size
        self._device.download(self._swap.address, card, size)
        self._device.upload(card, host, size)
        self._device.synchronize()
        ctypes.memmove(host, self._swap.address, size)

    def _write_table(self) -> None:
        layers, experts = self._weights.layers, self._weights.experts
        size = self._weights.layout.nbytes
        base = np.full((layers, experts), self._card.address, np.int64)
        if self._host is not None:
            base[~self.policy.resident] = self._host.device_address
        base += self.policy.slots * size
        table = self._addresses.array.view(np.int64).reshape(layers, len(PARTS), experts)
        for part, (offset, nbytes) in enumerate(self._weights.layout.parts):
            table[:, part] = base + offset if nbytes else 0
        self._device.upload(self._table.address, self._addresses.address, self._addresses.nbytes)
        self._device.synchronize()
