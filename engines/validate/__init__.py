"""`clover validate`: the engine against the NumPy reference, layer by layer and token by token."""

from clover.engines.validate.command import Validation, validate

__all__ = ["Validation", "validate"]
