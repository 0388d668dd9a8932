"""The builder process: reads an EngineRequest from standard input, reports on standard output line by line in JSON.

It is a process of its own because TensorRT needs a prepared library path, because it aborts rather than raises on some
errors, and because a builder that runs out of memory must not take the caller with it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from clover.engines.tensorrt.backend import load
from clover.engines.tensorrt.kernels import OPERATORS, make_host, read_kernels
from clover.engines.tensorrt.network import PLUGIN_LAYERS, layer_list, limit_attention, plugin_counts, tensor_list
from clover.engines.tensorrt.request import EngineRequest
from clover.exporter.graph.tensorrt.rows import KV_LENGTH
from clover.plugins.tensorrt_plugin import register
from clover.runtime.errors import CloverError


class Reporter:
    """Writes events as JSON lines. Anything that libraries print goes to standard error."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def send(self, **event: Any) -> None:
        self._out.write(json.dumps(event) + "\n")
        self._out.flush()


def build(request: EngineRequest, report: Reporter) -> None:
    """Builds the engine file. Raises CloverError with TensorRT's own words for what went wrong."""
    trt = load(request.backend)
    logger = _logger(trt, report)
    names = {op: tuple(stems) for op, stems in request.kernel_names.items()}
    host = make_host(read_kernels(Path(request.kernels), names))
    creators = register(trt, [op for op in OPERATORS if op.name in request.plugins], host)

    def failed(what: str) -> CloverError:
        if host.error is not None:
            return CloverError(f"{what}: {host.error}")
        return CloverError(f"{what}: {logger.last or 'TensorRT gave no reason'}")

    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    parser.set_flag(trt.OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE)
    report.send(phase="parse")
    if not parser.parse_from_file(request.graph):
        raise failed("TensorRT does not take the step graph")
    limited = limit_attention(trt, network, KV_LENGTH)
    layers = layer_list(network)
    for name, wanted in request.plugins.items():
        found = plugin_counts(layers, name)
        if found != wanted:
            raise CloverError(
                f"{found} of {wanted} {name} nodes became {PLUGIN_LAYERS} layers; this {request.backend} version is not "
                "supported"
            )
    report.send(phase="network", layers=layers, attention=limited, tensors=tensor_list(network))

    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # what is float32 is meant so: the router decides by it
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        # otherwise TensorRT-RTX may allocate while a step runs, which no CUDA graph can hold
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if request.backend == "tensorrt-rtx":  # the other builds for the card it finds
        if not hasattr(trt.ComputeCapability, f"SM{request.sm}"):
            raise CloverError(f"{request.backend} {trt.__version__} does not build for SM {request.sm}")
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{request.sm}"), 0)
    for wanted_profile in request.profiles:
        profile = builder.create_optimization_profile()
        for tensor, dims in wanted_profile.shapes.items():
            profile.set_shape(tensor, *dims)
        for tensor, dims in wanted_profile.values.items():
            profile.set_shape_input(tensor, *dims)
        if config.add_optimization_profile(profile) < 0:
            raise failed(f"TensorRT does not take the {wanted_profile.name} shapes")
    monitor = _monitor(trt, report)
    config.progress_monitor = monitor
    report.send(phase="build")
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise failed("TensorRT could not build the engine")
    target = Path(request.engine)
    partial = target.with_name(f"{target.name}.partial")
    with partial.open("wb") as file:
        file.write(memoryview(engine))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)
    report.send(phase="done", bytes=engine.nbytes)
    del creators  # the registry keeps none alive, so they had to live until here


def _logger(trt: Any, report: Reporter) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = ""

        def log(self, severity: Any, message: str) -> None:
            # without a GPU every error is followed by one about the driver, which says nothing
            if severity <= trt.ILogger.ERROR and "cudaError 35" not in message and "driver version" not in message:
                self.last = self.last or message.strip()
            if severity <= trt.ILogger.WARNING:
                report.send(log=message)

    return Logger()


def _monitor(trt: Any, report: Reporter) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._last = ""

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if phase_name != self._last:  # some phases begin hundreds of times
                self._last = phase_name
                report.send(phase=phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return True

        def phase_finish(self, phase_name: str) -> None: ...

    return Monitor()


def main() -> None:
    """Entry point of the process; exit code 3 and an `error` line for anything the user should read."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with the report
    report = Reporter(out)
    try:
        build(EngineRequest.load(sys.stdin.read()), report)
    except CloverError as error:
        report.send(error=str(error))
        raise SystemExit(3) from None
    except MemoryError:
        report.send(error="the builder ran out of memory; close other programs and build again.")
        raise SystemExit(3) from None


if __name__ == "__main__":
    main()
