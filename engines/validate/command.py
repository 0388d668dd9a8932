"""`clover validate`: runs the comparisons and puts the report together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clover.engines.bundle import Bundle
from clover.engines.logits import check_ids, parse_ids
from clover.engines.planner.parameters import count_parameters
from clover.engines.validate.bundle_tensors import BundleTensors, WeightStore
from clover.engines.validate.engine import EngineStep, run_engine
from clover.engines.validate.gates import Gates, checkpoint_gates, own_gates
from clover.engines.validate.layers import Remembered, compare_layers
from clover.engines.validate.metrics import Floats
from clover.engines.validate.report import Comparison, render
from clover.engines.validate.runs import make_runs, random_prompt
from clover.engines.validate.trace import trace_block
from clover.engines.validate.weights import compare_weights
from clover.exporter.checkpoint import Checkpoint
from clover.exporter.reference import ReferenceModel
from clover.runtime.errors import BundleError, CheckpointError, RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

LARGE_MODEL = 1_000_000_000  # parameters from which the reference computes in float32 and keeps no tensors


@dataclass(frozen=True)
class Validation:
    """The comparisons of one bundle."""

    bundle: Bundle
    prompt: list[int]
    comparisons: list[Comparison]

    @property
    def passed(self) -> bool:
        return not any(c.failures for c in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        return {
            "bundle": str(self.bundle.directory),
            "passed": self.passed,
            "prompt": self.prompt,
            "comparisons": [c.to_json() for c in self.comparisons],
        }

    def render(self) -> RenderableType:
        manifest = self.bundle.manifest
        return render(
            f"{manifest.model.name}, {manifest.precision_plan.name}, {manifest.target.name}", self.comparisons
        )


def validate(
    bundle: Bundle,
    checkpoint: Path | None = None,
    *,
    prompt: Sequence[int] | None = None,
    seed: int = 0,
    trace: bool = True,
    threads: int | None = None,
) -> Validation:
    """Compares a bundle's engine with the NumPy reference on the bundle's own weights, and on the checkpoint's.

    `prompt`: token ids, random ordinary ones when not given. Raises BundleError for an engine that can't run here,
    CheckpointError when the checkpoint is not the one the bundle was made from, RequestError for a wrong prompt.
    """
    manifest = bundle.manifest
    if manifest.target.backend != "onnxruntime":
        raise BundleError(
            f"{bundle.directory} was built for {manifest.target.name} ({manifest.target.backend}); only bundles for the "
            "CPU can be validated here, so build one with --gpu cpu from the same checkpoint."
        )
    source = _open_checkpoint(bundle, checkpoint) if checkpoint else None
    ids = random_prompt(manifest, seed) if prompt is None else _check_prompt(bundle, prompt)
    top_p = float(manifest.defaults["coreset_top_p"])
    runs = make_runs(manifest, ids, int(manifest.defaults["block_size"]), seed)
    steps = run_engine(bundle, runs, top_p, threads)
    precision = manifest.precision_plan

    def compare(name: str, tensors: Mapping[str, Floats], gates: Gates) -> Comparison:
        return _compare(name, tensors, gates, bundle, steps, ids if trace else None, top_p, threads)

    own = own_gates(precision, manifest.graph.accuracy_level)
    comparisons = [compare("own weights", BundleTensors(WeightStore(bundle)), own)]
    if source is not None:
        found = compare("checkpoint", source.tensors(), checkpoint_gates(precision))
        comparisons.append(replace(found, weights=compare_weights(WeightStore(bundle), source)))
    return Validation(bundle, ids, comparisons)


def _compare(
    name: str, tensors: Mapping[str, Floats], gates: Gates, bundle: Bundle, steps: Sequence[EngineStep],
    traced: Sequence[int] | None, top_p: float, threads: int | None,
) -> Comparison:  # fmt: skip
    # the bundle's head is a tensor of its own even where the checkpoint ties it to the embedding
    config = replace(bundle.manifest.config, tie_word_embeddings=False)
    large = count_parameters(config).total > LARGE_MODEL
    dtype = np.float32 if large else np.float64
    layers, head = compare_layers(config, tensors, steps, top_p, bundle.manifest.excluded_token_ids, dtype)
    trace = None
    if traced:
        model = ReferenceModel(config, tensors if large else Remembered(tensors), dtype)
        trace = trace_block(bundle, model, traced, top_p, threads)
    return Comparison(name, gates, layers, head, trace)


def _open_checkpoint(bundle: Bundle, directory: Path) -> Checkpoint:
    source = Checkpoint.open(directory)
    if source.fingerprint() != bundle.manifest.model.checkpoint:
        raise CheckpointError(
            f"{directory} is not the checkpoint that {bundle.directory} was made from (their fingerprints differ); "
            f"give the one of {bundle.manifest.model.name}, or build the bundle again."
        )
    return source


def _check_prompt(bundle: Bundle, prompt: Sequence[int]) -> list[int]:
    manifest = bundle.manifest
    check_ids(prompt, "prompt", manifest.config.vocab_size)
    room = manifest.max_context - 2 * int(manifest.defaults["block_size"]) - 1
    if not 1 <= len(prompt) <= room:
        raise RequestError(
            "prompt", f"--prompt holds {len(prompt)} tokens; validating this bundle takes a prompt of 1 to {room}."
        )
    if manifest.mask_token_id in prompt:
        raise RequestError("prompt", f"--prompt holds the mask token {manifest.mask_token_id}; leave it out.")
    return list(prompt)


def validate_command(
    bundle: Path, checkpoint: Path | None, prompt: str | None, seed: int, trace: bool, threads: int | None
) -> Validation:
    """The verb. Raises what `validate` raises."""
    ids = None if prompt is None else parse_ids(prompt, "prompt")
    return validate(Bundle.open(bundle), checkpoint, prompt=ids, seed=seed, trace=trace, threads=threads)
