"""What a model's quantisable matrices are fed with, as `clover calibrate` measured it: a safetensors file.

For every matrix of the weight store that has inputs (not the embedding), under its store name: `NAME.mean_square` and
`NAME.mean_abs`, float32 [K] per input channel, and `NAME.count`, int64, the rows that were seen. Of routed experts they
are [E, K] and [E]: each expert's own rows. The metadata names the model and holds a hash of everything in the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.exporter.config import ModelConfig
from clover.exporter.precision import plan_precision
from clover.exporter.safetensors_file import NUMPY_DTYPES, SafetensorsFile
from clover.exporter.store_layout import StoreEntry, layout
from clover.exporter.store_plan import StoreItem, store_plan
from clover.runtime.errors import CheckpointError, CloverError

FORMAT = "clover-calibration"
VERSION = "1"
# Fewer rows say too little: the mean of n squares of a Gaussian channel is off by √(2/n), here a quarter.
LEAST_ROWS = 32

_DTYPES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}  # safetensors' names

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class InputStatistics:
    """Of one matrix's inputs: mean squares and mean magnitudes [K], count []; [E, K] and [E] of routed experts."""

    mean_square: Floats
    mean_abs: Floats
    count: Ints


@dataclass(frozen=True)
class Calibration:
    """Statistics by store item. `checkpoint` is the fingerprint of the model's checkpoint, `sha256` the file's own."""

    statistics: Mapping[str, InputStatistics]
    checkpoint: str
    model: str
    recorded: Mapping[str, Any]  # prompts, rows, precision of the bundle, options: for a reader
    sha256: str = ""

    def importance(self, item: StoreItem, expert: int | None = None) -> Floats | None:
        """E[x²] of a matrix's inputs, float32 [K]; None where the prompts say too little (LEAST_ROWS) or it has none."""
        found = self.statistics.get(item.name)
        if found is None:
            return None
        index = () if expert is None else expert
        return found.mean_square[index] if found.count[index] >= LEAST_ROWS else None

    def rare_experts(self, layer: int) -> list[int]:
        """Experts of a layer that fewer than LEAST_ROWS rows were routed to."""
        return np.flatnonzero(self.statistics[f"layers.{layer}.experts.gate_up"].count < LEAST_ROWS).tolist()

    def check_model(self, path: Path, checkpoint: str, config: ModelConfig) -> None:
        """Raises CloverError when it was recorded with another checkpoint, or a matrix's statistics are not there."""
        if self.checkpoint != checkpoint:
            raise CloverError(
                f"--calibration {path} was recorded with another checkpoint ({self.model}, {self.checkpoint[:12]}) than this one "
                f"({checkpoint[:12]}); run `clover calibrate` on a bundle of this checkpoint."
            )
        for item in calibrated_items(config):
            found, shape = self.statistics.get(item.name), statistics_shape(item)
            if found is None or found.mean_square.shape != shape:
                has = "nothing" if found is None else f"shape {list(found.mean_square.shape)}"
                raise CloverError(
                    f"--calibration {path} has {has} for {item.name}, not shape {list(shape)}; record it again."
                )


def calibrated_items(config: ModelConfig) -> list[StoreItem]:
    """The store's matrices whose inputs are measured: all that may be quantised, but the embedding, which is looked up."""
    items = store_plan(config, plan_precision(config, "fp32"))
    return [item for item in items if item.tensor_class not in (None, "embed")]


def statistics_shape(item: StoreItem) -> tuple[int, ...]:
    """[K], or [E, K] of routed experts."""
    return (item.shape[0], item.shape[-1]) if item.tensor_class == "experts" else (item.shape[-1],)


def save_calibration(path: Path, calibration: Calibration) -> str:
    """Writes the file beside `path`, renames it there and returns its sha256. Raises OSError."""
    tensors: dict[str, Array] = {}
    for name, s in calibration.statistics.items():
        for part in ("mean_square", "mean_abs", "count"):
            tensors[f"{name}.{part}"] = getattr(s, part)
    metadata = {
        "checkpoint": calibration.checkpoint,
        "model": calibration.model,
        "recorded": json.dumps(calibration.recorded, sort_keys=True),
    }
    return write_tensors(path, tensors, metadata, FORMAT)


def load_calibration(path: Path) -> Calibration:
    """Reads and checks a calibration file. Raises CloverError saying what is wrong with it."""
    tensors, metadata = read_tensors(path, FORMAT)
    names = sorted({name.rpartition(".")[0] for name in tensors})
    try:
        statistics = {
            n: InputStatistics(*(tensors[f"{n}.{part}"] for part in ("mean_square", "mean_abs", "count")))
            for n in names
        }
        recorded = json.loads(metadata["recorded"])
        found = Calibration(statistics, metadata["checkpoint"], metadata["model"], recorded, _file_hash(path))
    except (KeyError, ValueError) as error:
        raise CloverError(f"--calibration {path} lacks a part ({error}); record it again.") from None
    for name, s in statistics.items():
        if not (np.isfinite(s.mean_square).all() and (s.mean_square >= 0).all()):
            raise CloverError(f"--calibration {path} has mean squares of {name} that are no numbers; record it again.")
    return found


# -- a checked safetensors file, which an unfinished calibration is as well --------------------------


def write_tensors(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str], form: str) -> str:
    """Writes a safetensors file with a hash of its content beside `path` and renames it there; the file's sha256.

    The same tensors and metadata give the same bytes, which the safetensors library doesn't promise.
    """
    body = {**metadata, "format": form, "version": VERSION}
    work = path.with_name(f".{path.name}.writing")
    try:
        entries = [StoreEntry(name, _DTYPES[t.dtype], t.shape) for name, t in sorted(tensors.items())]
        header, places = layout(entries, {**body, "content": _content_hash(tensors, body)})
        with work.open("wb") as file:
            file.write(header)
            for name in sorted(places, key=lambda n: places[n]):
                file.write(np.ascontiguousarray(tensors[name]).data)
        sha256 = _file_hash(work)
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
    return sha256


def read_tensors(path: Path, form: str) -> tuple[dict[str, Array], dict[str, str]]:
    """The tensors and metadata of a file that `write_tensors` wrote. Raises CloverError for any other or a damaged one."""
    try:
        file = SafetensorsFile(path)
        tensors = {name: file.read(name) for name in file.tensors}
    except CheckpointError:
        if not path.is_file():
            raise CloverError(f"--calibration {path} does not exist; make it with `clover calibrate`.") from None
        raise CloverError(f"--calibration {path} is damaged, or no calibration file; record it again.") from None
    metadata = dict(file.metadata)
    if metadata.get("format") != form:
        raise CloverError(f"--calibration {path} was not made by `clover calibrate`; give one that was.")
    if metadata.get("version") != VERSION:
        raise CloverError(
            f"--calibration {path} has format version {metadata.get('version')}, and this clover reads {VERSION}; record it again."
        )
    if metadata.pop("content", None) != _content_hash(tensors, metadata):
        raise CloverError(f"--calibration {path} is damaged (its hash does not match); record it again.")
    return tensors, metadata


def _content_hash(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(json.dumps([name, str(tensors[name].dtype), tensors[name].shape]).encode())
        digest.update(np.ascontiguousarray(tensors[name]).data)
    return digest.hexdigest()


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
