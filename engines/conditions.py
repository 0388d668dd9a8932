"""Under what conditions an engine was measured: what stands with every number."""

from __future__ import annotations

import os
from typing import Any

from clover import __version__
from clover.engines.bundle import Bundle
from clover.engines.cpu_cache import cpu_name
from clover.engines.open import choose_provider


def engine_conditions(bundle: Bundle, threads: int | None, provider: str | None) -> dict[str, Any]:
    """Model, versions, what runs it, precision, machine. `threads` and `provider`: as given to load the bundle, None for
    the default."""
    manifest, chosen = bundle.manifest, choose_provider(bundle, provider)
    if chosen == "tensorrt":
        backend = f"{manifest.target.backend} {manifest.target.backend_version}"  # it runs on no other version
        activations = "bfloat16"
    else:
        import onnxruntime

        backend = f"onnxruntime {onnxruntime.__version__}"
        integer = {"int4", "int8"} & set(manifest.precision_plan.classes.values())
        activations = "8-bit" if manifest.graph.accuracy_level == 4 and integer else "float32"
    return {
        "model": manifest.model.name,
        "checkpoint": manifest.model.checkpoint[:12],
        "clover": __version__,
        "target": manifest.target.name,
        "backend": backend,
        "provider": chosen,
        "precision": manifest.precision_plan.name,
        "activations": activations,
        "cpu": cpu_name(),
        "threads": threads or os.cpu_count(),
        "batch": 1,
    }
