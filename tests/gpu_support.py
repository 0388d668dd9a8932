"""Bundles with real GPU engines, built once per test run."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine_support import NANO

from clover.engines.build import BuildRequest, build_target
from clover.engines.bundle import Bundle
from clover.exporter.precision import Precision

ROOT = Path(tempfile.mkdtemp(prefix="clover-gpu-"))
atexit.register(shutil.rmtree, ROOT, ignore_errors=True)
KERNELS = ROOT / "kernels"  # compiled once for all bundles of a test run


@lru_cache(maxsize=16)
def gpu_bundle(gpu: str, precision: Precision, checkpoint: Path = NANO, **options: Any) -> Bundle:
    """A bundle of the nano model, with TensorRT-RTX and Triton really at work."""
    directory = Path(tempfile.mkdtemp(dir=ROOT))
    request = BuildRequest(
        checkpoint, directory / "bundle", target=gpu, precision=precision,
        **{"max_context": 256, "block_sizes": (16, 32), "kernel_cache": KERNELS, **options},
    )  # fmt: skip
    return build_target(request)
