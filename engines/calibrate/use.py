"""What a calibration will change in a build, checked before the first weight is read."""

from __future__ import annotations

from pathlib import Path

from clover.engines.manifest import UsedCalibration
from clover.exporter.calibration import Calibration, load_calibration
from clover.exporter.checkpoint import Checkpoint
from clover.exporter.store_plan import StoreItem
from clover.exporter.weights import weighted_items
from clover.runtime.errors import CloverError


def open_calibration(
    path: Path, checkpoint: Checkpoint, items: tuple[StoreItem, ...]
) -> tuple[Calibration, UsedCalibration]:
    """A calibration file, and what it will act on. Raises CloverError when it is damaged, another model's, or acts on nothing."""
    calibration = load_calibration(path)
    calibration.check_model(path, checkpoint.fingerprint(), checkpoint.config)
    weighted = weighted_items(checkpoint, items, calibration)
    if not weighted:
        raise CloverError(
            f"--calibration {path} has nothing to act on: this build quantises no matrix to INT4 itself (an INT4 checkpoint's "
            "own integers are kept as they are); leave it out."
        )
    layers = sorted({item.layer for item in weighted if item.tensor_class == "experts" and item.layer is not None})
    rare = {str(layer): tuple(calibration.rare_experts(layer)) for layer in layers}
    used = UsedCalibration(
        sha256=calibration.sha256,
        prompts=calibration.recorded["prompts"],
        rows=sum(calibration.recorded["rows"].values()),
        tensors=tuple(item.name for item in weighted),
        weight_only_experts={layer: experts for layer, experts in rare.items() if experts},
    )
    return calibration, used
