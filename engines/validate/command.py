"""`clover validate`: runs the comparisons and puts the report together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clover.engines.bundle import Bundle
from clover.engines.logits import check_ids, parse_ids
from clover.engines.open import Provider, choose_provider
from clover.engines.planner.parameters import count_parameters
from clover.engines.validate.bundle_tensors import BundleTensors, WeightStore
from clover.engines.validate.engine import run_engine
from clover.engines.validate.gates import Gates, checkpoint_gates, own_gates
from clover.engines.validate.layers import Remembered, compare_layers
from clover.engines.validate.metrics import Floats
from clover.engines.validate.report import Comparison, render
from clover.engines.validate.runs import make_runs, random_prompt
from clover.engines.validate.trace import trace_block
from clover.engines.validate.weights import compare_weights, open_source
from clover.exporter.reference import ReferenceModel
from clover.runtime.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

LARGE_MODEL = 1_000_000_000  # more parameters than this: the reference computes in float32 and keeps no tensors


@dataclass(frozen=True)
class Validation:
    """The comparisons of one bundle."""

    bundle: Bundle
    prompt: list[int]
    comparisons: list[Comparison]
    provider: Provider

    @property
    def passed(self) -> bool:
        return not any(c.failures for c in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        return {
            "bundle": str(self.bundle.directory),
            "passed": self.passed,
            "prompt": self.prompt,
            "layers_run_by": "cpu",
            "trace_run_by": self.provider,
            "comparisons": [c.to_json() for c in self.comparisons],
        }

    def render(self) -> RenderableType:
        manifest = self.bundle.manifest
        return render(
            f"{manifest.model.name}, {manifest.precision_plan.name}, {manifest.target.name}", self.comparisons
        )


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
    GPU bundle's engine; an engine for another backend rounds differently, so that its trace is reported, not gated.
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
    return Validation(bundle, ids, comparisons, chosen)


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
    bundle: Path,
    checkpoint: str | Path | None,
    prompt: str | None,
    seed: int,
    trace: bool,
    threads: int | None,
    provider: str | None,
) -> Validation:
    """The verb. Raises what `validate` raises."""
    ids = None if prompt is None else parse_ids(prompt, "prompt")
    return validate(
        Bundle.open(bundle), checkpoint, prompt=ids, seed=seed, trace=trace, threads=threads, provider=provider
    )
