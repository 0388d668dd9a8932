"""The step graph: one ONNX graph for prefill, denoising, committing and autoregressive decoding."""
