"""Builds TensorRT and TensorRT-RTX engines of the GPU step graph, in a child process, with or without a GPU."""
