"""Clover: compiler and small runtime for the Clover block-diffusion language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
