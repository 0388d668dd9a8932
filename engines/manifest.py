"""clover.json: the typed manifest of a bundle, the only interface between building and running."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clover.exporter.config import ModelConfig
from clover.exporter.precision import PrecisionPlan
from clover.runtime.errors import BundleError

MANIFEST = "clover.json"
VERSION = 1


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Part):
    """A file of the bundle; both are checked on load."""

    bytes: int
    sha256: str


class Model(_Part):
    """The model's identity: `config` rebuilds a ModelConfig, `checkpoint` is the source's fingerprint."""

    name: str
    config: dict[str, Any]
    config_sha256: str
    checkpoint: str


class Target(_Part):
    """What the bundle was built for."""

    name: str
    backend: Literal["onnxruntime", "tensorrt-rtx", "tensorrt"]
    backend_version: str
    sm: int | None = None


class Graph(_Part):
    """A step graph. `accuracy_level` 4: INT4 weights meet 8-bit activations; 1: float32 activations."""

    file: str
    with_logits: bool
    accuracy_level: int


class Engine(_Part):
    """A GPU engine for the target's card generation, and the shapes it takes.

    `sequences`, `max_rows`: slots and rows per sequence of a step. `capacity`: tokens of a slot's KV cache, the rows of
    a step included. `logit_rows`, `candidates`, `adjusted`: most rows with candidates, candidates, and adjusted ids.
    `resident_experts`: most routed experts on the card, None for as many as fit. `layers` lists the network's layers.
    `fingerprint` stands for everything the engine was made from.
    """

    file: str
    layers: str
    sequences: int
    max_rows: int
    prefill_chunk: int
    capacity: int
    logit_rows: int
    candidates: int
    adjusted: int
    resident_experts: int | None = None
    fingerprint: str


class UsedCalibration(_Part):
    """The calibration file that INT4 scales were chosen with.

    `tensors`: the store's matrices it acted on. `weight_only_experts`: by layer, the experts that too few rows were routed
    to, whose scales were chosen from their weights alone.
    """

    sha256: str
    prompts: int
    rows: int
    tensors: tuple[str, ...]
    weight_only_experts: dict[str, tuple[int, ...]] = Field(default_factory=dict)


class Kernels(_Part):
    """One custom operator's compiled kernels: `sha256` of all of them, and their files (NAME.cubin and NAME.json)."""

    sha256: str
    nodes: int
    names: tuple[str, ...]


class Manifest(_Part):
    """Everything the runtime must know of a bundle."""

    format: Literal["clover-bundle"] = "clover-bundle"
    version: int = VERSION
    clover_version: str
    model: Model
    target: Target
    precision: dict[str, Any]
    calibration: UsedCalibration | None = None
    block_sizes: tuple[int, ...]
    trained_block_size: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    excluded_token_ids: tuple[int, ...] = Field(description="never chosen: the mask token and vocabulary padding")
    max_context: int
    options: dict[str, Any] = Field(description="assumptions about the model that are not public, as built")
    defaults: dict[str, Any] = Field(description="decode options a request does not give")
    graph: Graph
    engines: tuple[Engine, ...] = Field(default=(), description="GPU engines; `graph` runs without them")
    kernels: dict[str, Kernels] = Field(default_factory=dict, description="custom operators' kernels of GPU engines")
    files: dict[str, FileEntry]

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_json(self.model.config)

    @property
    def precision_plan(self) -> PrecisionPlan:
        return PrecisionPlan.from_json(self.precision)

    def dump(self) -> str:
        """JSON text with a hash of itself, so that a flipped byte here is found as well."""
        body = self.model_dump(mode="json")
        return json.dumps({**body, "sha256": _digest(body)}, indent=1) + "\n"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the bundle in `directory`.

    Raises BundleError when there is none, when it is damaged, or when a newer clover wrote it.
    """
    path = directory / MANIFEST
    if not directory.is_dir():
        raise BundleError(f"{directory} is not a directory; give the path of a bundle made by `clover build`.")
    if not path.is_file():
        hint = (
            " (it looks like a checkpoint: run `clover build` on it first)"
            if (directory / "config.json").is_file()
            else ""
        )
        raise BundleError(f"{directory} holds no {MANIFEST}, so it is not a bundle{hint}.")
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(body, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path} is damaged ({error}); build the bundle again.") from None
    version = body.get("version")
    if isinstance(version, int) and version > VERSION:
        raise BundleError(
            f"{path} has format version {version}, and this clover reads up to {VERSION}; update clover or build the bundle again."
        )
    digest = body.pop("sha256", None)
    if digest != _digest(body):
        raise BundleError(f"{path} was changed after it was written (its hash does not match); build the bundle again.")
    try:
        return Manifest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BundleError(f"{path}: field {where} is wrong ({first['msg']}); build the bundle again.") from None
