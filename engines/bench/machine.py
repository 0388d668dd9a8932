"""What this machine's CPU can do at most: reading memory, and multiplying matrices as the engine would."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np

from clover.engines.gpus import Gpu, find_gpu

READ_BYTES, PIECES = 256 * 2**20, 4  # larger than the caches, of which each try reads one piece after the other
MATRIX = 512
TRIES = 40  # short ones: on a machine that others use too, few are left alone


@dataclass(frozen=True)
class CpuSpeeds:
    """read_gbs: GB/s (1e9) read by all threads together. gflops: of a square product in float32, and of 8-bit integers."""

    read_gbs: float
    float32_gflops: float
    int8_gflops: float

    def best(self, other: CpuSpeeds) -> CpuSpeeds:
        """The better of two measurements, each by itself: others' work only ever makes them worse."""
        return CpuSpeeds(
            max(self.read_gbs, other.read_gbs),
            max(self.float32_gflops, other.float32_gflops),
            max(self.int8_gflops, other.int8_gflops),
        )

    def target(self, *, int8: bool) -> Gpu:
        """This machine as a target for the planner; `int8`: integer weights meet 8-bit activations."""
        gflops = self.int8_gflops if int8 else self.float32_gflops
        return replace(
            find_gpu("cpu"),
            bandwidth_gbs=self.read_gbs,
            bf16_tflops=gflops / 1e3,
            source="measured in the same run",
        )


def measure_cpu(threads: int) -> CpuSpeeds:
    """The best of many short tries, with as many threads as the engine has."""
    return CpuSpeeds(
        _read_gbs(threads), _gflops("MatMul", np.float32, threads), _gflops("MatMulInteger", np.int8, threads)
    )


def _read_gbs(threads: int) -> float:
    pieces = [np.array_split(p, threads) for p in np.array_split(np.ones(READ_BYTES // 8, np.int64), PIECES)]
    turns = cycle(pieces)  # none is in a cache any more when its turn comes again
    with ThreadPoolExecutor(threads) as pool:
        return READ_BYTES / PIECES / _least_seconds(lambda: list(pool.map(np.max, next(turns)))) / 1e9


def _gflops(operator: str, dtype: type[np.generic], threads: int) -> float:
    """Of [MATRIX, MATRIX] times a constant of the same shape, under ONNX Runtime as the engine runs."""
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    whole = dtype == np.int8
    shape = [MATRIX, MATRIX]
    left = TensorProto.UINT8 if whole else TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node(operator, ["left", "right"], ["product"])],
        operator,
        [helper.make_tensor_value_info("left", left, shape)],
        [helper.make_tensor_value_info("product", TensorProto.INT32 if whole else TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.ones(shape, dtype), "right")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = {"left": np.ones(shape, np.uint8 if whole else np.float32)}
    return 2 * MATRIX**3 / _least_seconds(lambda: session.run(None, given)) / 1e9


def _least_seconds(work: Callable[[], Any]) -> float:
    work()
    taken = []
    for _ in range(TRIES):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)
