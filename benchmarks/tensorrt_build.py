"""Builds the engine of the full-size model's dense part on this machine: time, memory and bytes.

    python benchmarks/tensorrt_build.py                       # 40 layers, INT4, RTX 5070 Ti: about a minute
    python benchmarks/tensorrt_build.py --precision bf16 --layers 8 --gpu 4090

The weights are random; routed experts are no part of an engine, so none are made. All three custom operators stand in
the network as plugin layers. Prints JSON: seconds and the peak memory of this process and of the builder's.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from clover.engines.gpus import find_gpu
from clover.engines.planner.full_size import FULL_SIZE
from clover.engines.tensorrt.request import EngineShapes
from clover.engines.tensorrt.target import GpuBuild, build_gpu_parts
from clover.exporter.config import ModelConfig
from clover.exporter.precision import PrecisionPlan, plan_precision
from clover.exporter.store_layout import StoreEntry
from clover.exporter.store_plan import DENSE_FILE, store_plan
from clover.exporter.store_writer import StoreWriter
from clover.exporter.weight_index import read_weight_index

PIECE = 2**24  # elements written at a time


def write_random_store(config: ModelConfig, precision: PrecisionPlan, directory: Path) -> None:
    """The dense weight file, filled with random numbers."""
    tensors = [t for item in store_plan(config, precision) if item.file == DENSE_FILE for t in item.tensors()]
    random = np.random.default_rng(0)
    # each write starts somewhere else: the builder keeps one copy of equal weights
    noise = random.standard_normal(2 * PIECE, np.float32) * np.float32(0.02)
    pieces: dict[str, Any] = {
        "U8": random.integers(0, 256, 2 * PIECE, np.uint8),
        "BF16": noise.astype(ml_dtypes.bfloat16),
        "F32": np.abs(noise).astype(ml_dtypes.bfloat16).astype(np.float32) + np.float32(2**-10),
    }
    with StoreWriter(directory / DENSE_FILE, [StoreEntry(t.name, t.dtype, t.shape) for t in tensors]) as writer:
        for tensor in tensors:
            size = int(np.prod(tensor.shape))
            for start in range(0, size, PIECE):
                at = int(random.integers(PIECE))
                writer.write_part(tensor.name, start, pieces[tensor.dtype][at : at + min(PIECE, size - start)])
        writer.finish()


def peak_memory(who: int) -> float:
    """Largest resident memory so far, in GB."""
    return resource.getrusage(who).ru_maxrss * 1024 / 1e9


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Builds once and returns what it took."""
    kinds = FULL_SIZE.layer_types[: arguments.layers]
    config = replace(FULL_SIZE, num_hidden_layers=arguments.layers, layer_types=kinds)
    precision = plan_precision(config, arguments.precision)
    write_random_store(config, precision, directory)
    weights = read_weight_index(directory, [DENSE_FILE])
    before, start, phases = peak_memory(resource.RUSAGE_SELF), time.perf_counter(), []

    def say(what: str, done: int, total: int) -> None:
        phases.append((what, round(time.perf_counter() - start, 2)))

    parts = build_gpu_parts(
        GpuBuild(find_gpu(arguments.gpu), arguments.sequences), directory, config, precision, weights, {},
        block_sizes=(32,), max_context=arguments.max_context, excluded_ids=(config.vocab_size - 1,),
        with_logits=False, say=say,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    layers = json.loads((directory / parts.engine.layers).read_text())["layers"]
    shapes = EngineShapes(arguments.sequences, 32, parts.engine.prefill_chunk, arguments.max_context, config.vocab_size)
    return {
        "gpu": arguments.gpu,
        "precision": arguments.precision,
        "layers": arguments.layers,
        "dense_weight_bytes": sum(t.nbytes for t in weights.values()),
        "engine_bytes": parts.files[parts.engine.file].bytes,
        "seconds": round(seconds, 1),
        "this_process_gb": [round(before, 2), round(peak_memory(resource.RUSAGE_SELF), 2)],
        "largest_child_gb": round(peak_memory(resource.RUSAGE_CHILDREN), 2),
        "network_layers": len(layers),
        "plugin_layers": dict(Counter(layer["plugin"] for layer in layers if "plugin" in layer)),
        "capacity": shapes.capacity,
        "phases": phases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="rtx-5070-ti")
    parser.add_argument("--precision", default="int4", choices=["int4", "bf16"])
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--max-context", type=int, default=8192)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(arguments, Path(directory)), indent=1))


if __name__ == "__main__":
    main()
