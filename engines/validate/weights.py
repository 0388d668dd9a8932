"""What a bundle's stored weights differ from the checkpoint's, tensor by tensor: the cost of their precision, or a fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clover.engines.bundle import Bundle
from clover.engines.validate.bundle_tensors import WeightStore
from clover.exporter.checkpoint import Checkpoint
from clover.exporter.precision import Precision, TensorClass
from clover.exporter.source import resolve_source
from clover.exporter.store_plan import StoreItem
from clover.exporter.weights import row_blocks
from clover.runtime.errors import CheckpointError

# Least signal-to-noise ratio of any tensor. Seen, in groups of 64 and 32, random and trained: int4 19.8, int8 43.9,
# bf16 55.4, fp32 no noise at all. The gates leave room for weights with heavier tails.
LEAST_SNR_DB: dict[Precision, float] = {"fp32": 130.0, "bf16": 50.0, "int8": 38.0, "int4": 13.0}
# A quantiser of least squared error leaves an error at right angles to what it stored, so that this is 1 exactly but
# for the scales' rounding to bfloat16. Seen: 2.2e-3 (a small tensor).
MOST_SCALE_ERROR = 5e-3
# Scales that were chosen for the error of a matrix's output (a calibration) clip weights of small inputs. Seen: 9.8e-3.
MOST_CALIBRATED_SCALE_ERROR = 5e-2


@dataclass(frozen=True)
class WeightError:
    """One stored tensor against the checkpoint. snr_db: 10 log10(Σw² / Σ(w-q)²), infinite when they are equal.

    scale: Σwq / Σq², what q had to be multiplied by to come nearest to w.
    """

    name: str
    tensor_class: TensorClass | None
    precision: Precision
    layer: int | None
    signal: float  # Σw²
    noise: float  # Σ(w-q)²
    scale: float
    calibrated: bool = False

    @property
    def snr_db(self) -> float:
        return snr_db(self.signal, self.noise)

    @property
    def failure(self) -> str | None:
        """What is wrong with the tensor, None when nothing is."""
        where = "" if self.layer is None else f"layer {self.layer}: "
        if self.snr_db < LEAST_SNR_DB[self.precision] or not math.isfinite(self.noise):
            least = LEAST_SNR_DB[self.precision]
            return f"{where}the stored {self.name} is {self.snr_db:.1f} dB from the checkpoint (at least {least:g})"
        if abs(self.scale - 1) > (MOST_CALIBRATED_SCALE_ERROR if self.calibrated else MOST_SCALE_ERROR):
            return f"{where}the stored {self.name} is off by the factor {1 / self.scale:.5g} from the checkpoint"
        return None

    def to_json(self) -> dict[str, Any]:
        snr = self.snr_db
        return {**asdict(self), "snr_db": snr if math.isfinite(snr) else None}


def open_source(bundle: Bundle, checkpoint: str | Path) -> Checkpoint:
    """The checkpoint that `bundle` was made from; org/name is not downloaded. Raises CheckpointError when it is another."""
    directory = resolve_source(checkpoint, fetch="nothing")
    source = Checkpoint.open(directory)
    if source.fingerprint() != bundle.manifest.model.checkpoint:
        raise CheckpointError(
            f"{directory} is not the checkpoint that {bundle.directory} was made from (their fingerprints differ); "
            f"give the one of {bundle.manifest.model.name}, or build the bundle again."
        )
    return source


def snr_db(signal: float, noise: float) -> float:
    """Infinite without noise."""
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0.0 else -math.inf


def compare_weights(
    store: WeightStore, checkpoint: Checkpoint, progress: Callable[[str], None] = lambda name: None
) -> list[WeightError]:
    """Every tensor of the store against the checkpoint, in the store's order. Reads both once."""
    errors = []
    for item in store.items:
        progress(item.name)
        errors.append(_compare(store, item, checkpoint))
    return errors


def _compare(store: WeightStore, item: StoreItem, checkpoint: Checkpoint) -> WeightError:
    columns = item.shape[-1]
    experts = item.transform in ("expert_gate_up", "expert_down")
    stored = None if experts else store.read(item).reshape(-1, columns)
    sums = np.zeros(4)
    for first, block in row_blocks(checkpoint, item):
        w = block.reshape(-1, columns).astype(np.float64)
        part = store.read_expert(item, first // len(w)) if stored is None else stored[first : first + len(w)]
        q = part.astype(np.float64)
        sums += (w * w).sum(), ((w - q) ** 2).sum(), (w * q).sum(), (q * q).sum()
    signal, noise, product, squares = sums.tolist()
    scale = product / squares if squares else (1.0 if signal == 0.0 else math.inf)
    return WeightError(
        item.name, item.tensor_class, item.precision, item.layer, signal, noise, scale, item.name in store.calibrated
    )  # fmt: skip
