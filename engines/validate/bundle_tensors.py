"""A bundle's own weights under checkpoint names: dequantised, and the store's transforms undone.

What the engine multiplies by and what the reference multiplies by are then the same numbers, so that a difference
between them is the engine's and not the quantisation's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.engines.bundle import Bundle
from clover.exporter.checkpoint import expected_tensors
from clover.exporter.prequantized import PackedRows
from clover.exporter.quantize import dequantize_int4, dequantize_int8, unpack_int4
from clover.exporter.safetensors_file import SafetensorsFile
from clover.exporter.store_plan import StoreItem, store_plan

Floats = npt.NDArray[np.floating[Any]]


class WeightStore:
    """Reads the items of a bundle's weight store as float32, in the store's layout."""

    def __init__(self, bundle: Bundle) -> None:
        manifest = bundle.manifest
        self.config = manifest.config
        self.items = store_plan(self.config, manifest.precision_plan)
        self.calibrated = frozenset(manifest.calibration.tensors if manifest.calibration else ())  # items
        self._files = {name: SafetensorsFile(bundle.directory / name) for name in {i.file for i in self.items}}

    def read(self, item: StoreItem) -> npt.NDArray[np.float32]:
        """The whole item, float32 [..., rows, columns]."""
        return self._dequantized(item, lambda name: self._files[item.file].read(name)).reshape(item.shape)

    def read_expert(self, item: StoreItem, expert: int) -> npt.NDArray[np.float32]:
        """One expert's matrix of an item [E, rows, columns]."""
        return self._dequantized(item, lambda name: self._files[item.file].read_slice(name, expert))

    def nbytes(self, item: StoreItem) -> int:
        """Bytes of the item in its file, scales included."""
        return sum(t.nbytes for t in item.tensors())

    def _dequantized(self, item: StoreItem, read: Callable[[str], npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        if item.precision in ("fp32", "bf16"):
            return read(f"{item.name}.weight").astype(np.float32, copy=False)
        packed, scales = read(f"{item.name}.qweight"), read(f"{item.name}.scales")
        packed = packed.reshape(*scales.shape[:-1], -1)  # blocks of bytes or rows of bytes: the same memory
        if item.zero_points:
            zeros = unpack_int4(read(f"{item.name}.zero_points"))[..., : scales.shape[-1]]
            flat: list[npt.NDArray[Any]] = [x.reshape(-1, x.shape[-1]) for x in (packed, scales, zeros)]
            return PackedRows(flat[0], flat[1], flat[2]).dequantize().reshape(*scales.shape[:-1], -1)
        return dequantize_int4(packed, scales) if item.precision == "int4" else dequantize_int8(packed, scales)


class BundleTensors(Mapping[str, Floats]):
    """Checkpoint name → tensor, read anew on every access. `lm_head.weight` is always there, tied or not."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._items = {source: item for item in store.items for source in item.sources}
        self._shapes = expected_tensors(store.config)

    def __getitem__(self, name: str) -> Floats:
        item = self._items[name]
        values = self._store.read(item)
        if len(item.sources) > 1:
            values = self._own_rows(values, item, name)
        return untransform(values, item, name, self._store.config.num_attention_heads)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def _own_rows(self, values: npt.NDArray[np.float32], item: StoreItem, name: str) -> npt.NDArray[np.float32]:
        """The rows of a stacked item that come from the source `name`."""
        start = 0
        for source in item.sources[: item.sources.index(name)]:
            start += self._shapes[source][0]
        return values[start : start + self._shapes[name][0]]


def untransform(values: npt.NDArray[np.float32], item: StoreItem, name: str, heads: int) -> Floats:
    """The checkpoint tensor `name` from its rows in the store: the inverse of the item's transform."""
    match item.transform:
        case "copy" | "rows" | "expert_down":
            return values
        case "one_plus":
            return values.astype(np.float64) - 1.0  # float32 would round a factor's last bit away
        case "decay_rate":
            return np.log(-values.astype(np.float64))
        case "flat_conv":
            return values[:, None]
        case "attention_qkv":
            if name != item.sources[0]:
                return values
            rows, columns = values.shape  # all heads' queries, then all heads' gates
            return values.reshape(2, heads, -1, columns).swapaxes(0, 1).reshape(rows, columns)
        case "expert_gate_up":
            experts, rows, columns = values.shape  # rows gate0, up0, gate1, up1, …
            return values.reshape(experts, rows // 2, 2, columns).swapaxes(1, 2).reshape(values.shape)
