"""`clover validate`: the engine against the NumPy reference, layer by layer and token by token."""
