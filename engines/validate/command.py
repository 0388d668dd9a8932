"""`clover validate`: runs the comparisons and puts the report together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clover.engines.bundle import Bundle
from clover.engines.logits import check_ids, parse_ids
from clover.engines.manifest import read_manifest
from clover.engines.open import Provider, choose_provider
from clover.engines.planner.parameters import count_parameters
from clover.engines.validate.bundle_tensors import BundleTensors, WeightStore
from clover.engines.validate.engine import run_engine
from clover.engines.validate.gates import Gates, checkpoint_gates, own_gates
from clover.engines.validate.layers import Remembered, compare_layers
from clover.engines.validate.metrics import Floats
from clover.engines.validate.report import Comparison, render
from clover.engines.validate.runs import make_runs, random_prompt
from clover.engines.validate.sessions import SessionAgreement, compare_sessions
from clover.engines.validate.static import StaticValidation, check_gpu_bundle, checks_table, refuse_options
from clover.engines.validate.trace import trace_block
from clover.engines.validate.weights import compare_weights, open_source
from clover.exporter.reference import ReferenceModel
from clover.runtime.errors import BundleError, RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clover.engines.tensorrt.checks import Check

LARGE_MODEL = 1_000_000_000  # more parameters than this: the reference computes in float32 and keeps no tensors


@dataclass(frozen=True)
class Validation:
    """The comparisons of one bundle. checks: of a GPU bundle's parts, before anything was loaded; sessions: of its engine
    with ONNX Runtime, where the engine ran."""

    bundle: Bundle
    prompt: list[int]
    comparisons: list[Comparison]
    provider: Provider
    checks: list[Check] = field(default_factory=list)
    sessions: SessionAgreement | None = None

    @property
    def passed(self) -> bool:
        return not any(c.failures for c in self.comparisons) and not (self.sessions and self.sessions.failures)

    def to_json(self) -> dict[str, Any]:
        return {
            "bundle": str(self.bundle.directory),
            "passed": self.passed,
            "checks": [c.to_json() for c in self.checks],
            "numbers_compared": True,
            "prompt": self.prompt,
            "layers_run_by": "cpu",
            "trace_run_by": self.provider,
            "gpu_against_onnxruntime": self.sessions.to_json() if self.sessions else None,
            "comparisons": [c.to_json() for c in self.comparisons],
        }

    def render(self) -> RenderableType:
        from rich.console import Group

        manifest = self.bundle.manifest
        title = f"{manifest.model.name}, {manifest.precision_plan.name}, {manifest.target.name}"
        before = [checks_table(title, self.checks)] if self.checks else []
        return Group(*before, render(title, self.comparisons), *(self.sessions.render() if self.sessions else ()))


def validate(
    bundle: Bundle,
    checkpoint: str | Path | None = None,
    *,
    prompt: Sequence[int] | None = None,
    seed: int = 0,
    trace: bool = True,
    threads: int | None = None,
    provider: str | None = None,
) -> Validation:
    """Compares a bundle's engine with the NumPy reference on the bundle's own weights, and on the checkpoint's.

    The layers are those of the step graph, run by ONNX Runtime on the CPU. `provider`: what runs the trace, by default a
    GPU bundle's engine; an engine for another backend rounds differently, so that its trace is reported, not gated, and
    a GPU engine is compared with ONNX Runtime besides, state and candidates of the same steps.
    `prompt`: token ids, random ordinary ones when not given.

    Raises BundleError when the engine can't run here, CheckpointError when the checkpoint is not the one the bundle was
    made from, RequestError for a wrong prompt.
    """
    manifest, chosen = bundle.manifest, choose_provider(bundle, provider)
    source = open_source(bundle, checkpoint) if checkpoint else None
    ids = random_prompt(manifest, seed) if prompt is None else _check_prompt(bundle, prompt)
    top_p = float(manifest.defaults["coreset_top_p"])
    runs = make_runs(manifest, ids, int(manifest.defaults["block_size"]), seed)
    steps = run_engine(bundle, runs, top_p, threads)
    precision = manifest.precision_plan
    # the bundle's head is a tensor of its own even where the checkpoint ties it to the embedding
    config = replace(manifest.config, tie_word_embeddings=False)
    large = count_parameters(config).total > LARGE_MODEL
    dtype = np.float32 if large else np.float64

    def compare(name: str, tensors: Mapping[str, Floats], gates: Gates) -> Comparison:
        if chosen != "cpu":
            gates = replace(gates, trace_tie=None)
        followed = None
        if trace:
            model = ReferenceModel(config, tensors if large else Remembered(tensors), dtype)
            followed = trace_block(bundle, model, ids, top_p, chosen, threads)
        layers, head = compare_layers(config, tensors, steps, top_p, manifest.excluded_token_ids, dtype)
        return Comparison(name, gates, layers, head, followed)

    own = own_gates(precision, manifest.graph.accuracy_level)
    comparisons = [compare("own weights", BundleTensors(WeightStore(bundle)), own)]
    if source is not None:
        found = compare("checkpoint", source.tensors(), checkpoint_gates(precision))
        comparisons.append(replace(found, weights=compare_weights(WeightStore(bundle), source)))
    sessions = compare_sessions(bundle, runs, top_p, threads) if chosen == "tensorrt" else None
    return Validation(bundle, ids, comparisons, chosen, sessions=sessions)


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
    directory: Path,
    checkpoint: str | Path | None,
    prompt: str | None,
    seed: int | None,
    trace: bool | None,
    threads: int | None,
    provider: str | None,
) -> Validation | StaticValidation:
    """The verb; None stands for an option that was not given. The engine of a GPU bundle is checked before it is loaded,
    and where it can't run the checks are all there is: options for comparing numbers are then refused.

    Raises what `validate` raises.
    """
    ids = None if prompt is None else parse_ids(prompt, "prompt")
    manifest = read_manifest(directory)
    checks: list[Check] = []
    if manifest.engines and provider in (None, "tensorrt"):
        bundle = Bundle(directory, manifest)  # that its files are whole is one of the checks
        checks, runs_here = check_gpu_bundle(bundle)
        if not runs_here and provider is not None:
            raise BundleError(next(c.found for c in checks if c.verdict != "passed"))
        if not runs_here:
            numeric = {"--checkpoint": checkpoint, "--prompt": prompt, "--seed": seed, "--threads": threads}
            refuse_options({**numeric, "--trace": trace or None}, directory)
            return StaticValidation(bundle, checks)
    else:
        bundle = Bundle.open(directory)
    found = validate(
        bundle, checkpoint, prompt=ids, seed=seed or 0, trace=trace is not False, threads=threads, provider=provider
    )
    return replace(found, checks=checks)
