"""Runs GPU engines: device memory, streams and CUDA graphs through cuda-bindings; no torch, no Triton.

Written against NVIDIA's documentation and tested with a stand-in driver and engine; not yet run on a card.
"""
