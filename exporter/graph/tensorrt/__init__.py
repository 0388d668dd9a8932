"""The step graph of GPU engines: standard ONNX operators and the three custom ones, in bfloat16 or in float32.

The same authoring code writes both: bfloat16 is what TensorRT builds, float32 what ONNX Runtime runs on a CPU to
hold this graph to the reference (`lower.py`).
"""
