"""Clover: compiler and small runtime for the Clover block-diffusion language model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# onnxruntime 1.32 writes a device id and may send usage data on Linux, too, unless told otherwise before its import
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"
__all__ = ["Clover", "CloverError", "__version__"]

if TYPE_CHECKING:
    from clover.runtime.clover import Clover
    from clover.runtime.errors import CloverError


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `clover --help` does not pay for onnxruntime.
    if name == "Clover":
        from clover.runtime.clover import Clover

        return Clover
    if name == "CloverError":
        from clover.runtime.errors import CloverError

        return CloverError
    raise AttributeError(f"module 'clover' has no attribute {name!r}")
