"""Named arrays that travel between host and card together, in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.runtime.errors import CloverError
from clover.runtime.gpu.device import ALIGNMENT, Device


@dataclass(frozen=True)
class Field:
    """One array of a block."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


class Block:
    """Arrays that lie one after another, each aligned, once in pinned host memory and once on the card.

    Raises CloverError when one of the two is full, and then leaves nothing allocated.
    """

    def __init__(self, device: Device, fields: Mapping[str, Field]) -> None:
        self.fields = dict(fields)
        self._device = device
        offsets, size = {}, 0
        for name, field in fields.items():
            offsets[name] = size
            size += -(-field.nbytes // ALIGNMENT) * ALIGNMENT
        self._card = device.allocate(size)
        try:
            self._host = device.pin(size)
        except CloverError:
            device.free(self._card)
            raise
        self.arrays: dict[str, npt.NDArray[Any]] = {
            name: self._host.array[offsets[name] : offsets[name] + field.nbytes].view(field.dtype).reshape(field.shape)
            for name, field in fields.items()
        }
        self.addresses = {name: self._card.address + offset for name, offset in offsets.items()}

    def upload(self) -> None:
        """Queues the copy to the card."""
        self._device.upload(self._card.address, self._host.address, self._host.nbytes)

    def download(self) -> None:
        """Queues the copy to the host."""
        self._device.download(self._host.address, self._card.address, self._host.nbytes)

    def free(self) -> None:
        """Frees both sides; the arrays must not be used any more."""
        self.arrays.clear()
        self._device.free(self._host)
        self._device.free(self._card)
