"""A TensorRT engine of the step graph: opened once, one execution context per profile over one piece of memory."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from clover.plugins.tensorrt_plugin import PluginHost, PluginOp, register, unregister
from clover.runtime.errors import BundleError, CloverError
from clover.runtime.gpu.buffers import Field
from clover.runtime.gpu.device import Device
from clover.runtime.gpu.tensors import ON_HOST, check_tensors

log = logging.getLogger("clover")

DECODE, PREFILL = 0, 1  # the engine's profiles, in the order they were built


class StepEngine:
    """`set_shape`, then `enqueue` as often as the shape stays. Not thread-safe.

    `trt` is the module tensorrt_rtx or tensorrt; the plugins' creators stay registered while the engine lives. TensorRT-
    RTX compiles an engine's kernels for the card when they are first needed; `cache` is a file that keeps them for the
    next process.
    """

    def __init__(
        self,
        trt: Any,
        path: Path,
        ops: tuple[PluginOp, ...],
        host: PluginHost,
        device: Device,
        cache: Path | None = None,
    ) -> None:
        """Raises BundleError when TensorRT can't open the engine on this card."""
        self._trt, self._host, self._device = trt, host, device
        self._cache_file = cache
        self._runtime: Any = None
        self._engine: Any = None
        self._cache: Any = None
        self._run_settings: Any = None
        self._contexts: list[Any] = []
        self._logger = _logger(trt)
        self._creators = register(trt, ops, host)
        try:
            host.library.load()
            self._runtime = trt.Runtime(self._logger)
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                self._engine = self._runtime.deserialize_cuda_engine(view)
            if self._engine is None:
                raise self._failure(f"{path} can't be opened on this card", BundleError)
            self._contexts = self._make_contexts()
        except BaseException:
            self._cache_file = None
            self.close()
            raise

    def check_tensors(self, bound: Mapping[str, Field]) -> None:
        """Raises BundleError unless the engine's inputs and outputs are those that will be bound to it, each where
        `set_shape` puts it."""
        engine = self._engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        check_tensors(bound, {n: (engine.get_tensor_dtype(n).name, tuple(engine.get_tensor_shape(n))) for n in names})
        for name in names:  # page-locked memory, which ON_HOST lies in, can be read from both sides
            if name != ON_HOST and engine.get_tensor_location(name) != self._trt.TensorLocation.DEVICE:
                raise BundleError(f"the engine wants {name} in other memory than this clover; build the bundle again.")

    def set_shape(self, profile: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """Prepares the steps that follow. shapes: every input's; addresses: every input's and output's, on the card, but
        for `candidates`, which the engine reads on the host. Raises CloverError when TensorRT refuses."""
        context = self._contexts[profile]
        for name, address in addresses.items():
            if not context.set_tensor_address(name, address):
                raise self._failure(f"the engine takes no memory for {name}")
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise self._failure(f"the engine does not take {name} of shape {list(shape)}")

    def enqueue(self, profile: int) -> None:
        """Queues one step of the shape set last. Raises CloverError when TensorRT refuses."""
        done = self._contexts[profile].execute_async_v3(self._device.stream)
        if not done or self._host.error is not None:
            raise self._failure("the engine failed to start a step")

    def can_be_captured(self, profile: int) -> bool:
        """Whether a step of the shape set last, run once, may become a CUDA graph."""
        ask = getattr(self._contexts[profile], "is_stream_capturable", None)
        return ask is None or bool(ask(self._device.stream))

    def check_in_place(self, inputs: Iterable[str]) -> None:
        """Raises BundleError unless `next.NAME` may share NAME's memory, for each of the inputs."""
        ask = getattr(self._engine, "get_aliased_input_tensor", lambda name: None)
        for name in inputs:
            shared = ask(f"next.{name}")
            if shared and shared != name:
                raise BundleError(f"the engine updates {name} in the memory of {shared}; build the bundle again.")

    def close(self) -> None:
        """Frees the engine. The device must be idle. Raises nothing."""
        if not self._creators:
            return
        self._save_cache()
        self._contexts = []  # before the engine, and the engine before its runtime and plugins
        self._run_settings = self._cache = None
        self._engine = None
        self._runtime = None
        try:
            self._host.library.close()
        except CloverError as error:  # after a failure on the card every call fails
            log.debug("closing the engine: %s", error)
        unregister(self._trt, self._creators)
        self._creators = []

    def _make_contexts(self) -> list[Any]:
        """Contexts of one engine never run at the same time here, so that they share the largest one's memory."""
        engine, contexts, settings = self._engine, [], self._settings()
        sizes = [engine.get_device_memory_size_for_profile_v2(p) for p in range(engine.num_optimization_profiles)]
        memory = self._device.allocate(max(sizes))
        for profile in range(engine.num_optimization_profiles):
            context = engine.create_execution_context(settings)
            if context is None or not context.set_optimization_profile_async(profile, self._device.stream):
                raise self._failure("the engine has no execution context")
            context.set_device_memory(memory.address, memory.nbytes)
            contexts.append(context)
        self._device.synchronize()
        return contexts

    def _settings(self) -> Any:
        """How contexts are made: with memory of ours, and in TensorRT-RTX with kernels compiled at a shape's first run,
        since a graph captured before would keep the slower ones for ever."""
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not hasattr(self._engine, "create_runtime_config") or not hasattr(self._trt, "IRuntimeCache"):
            return strategy
        settings = self._engine.create_runtime_config()
        settings.set_execution_context_allocation_strategy(strategy)
        eager = self._trt.DynamicShapesKernelSpecializationStrategy.EAGER
        settings.dynamic_shapes_kernel_specialization_strategy = eager
        self._run_settings = settings
        self._cache = settings.create_runtime_cache()
        if self._cache_file is not None and self._cache_file.is_file():
            self._cache.deserialize(self._cache_file.read_bytes())  # refused by itself when of another machine
        settings.set_runtime_cache(self._cache)
        return settings

    def _save_cache(self) -> None:
        """Keeps the compiled kernels; a place that can't be written is done without."""
        if self._cache is None or self._cache_file is None:
            return
        content = self._cache.serialize()
        if content is None:
            return
        partial = self._cache_file.with_name(f"{self._cache_file.name}.{os.getpid()}.partial")
        try:
            self._cache_file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(memoryview(content))
            partial.replace(self._cache_file)
        except OSError as error:
            log.info("compiled kernels are not kept in %s (%s)", self._cache_file, error.strerror)

    def _failure(self, what: str, kind: type[CloverError] = CloverError) -> CloverError:
        if self._host.error is not None:
            error, self._host.error = self._host.error, None
            return kind(f"{what}: {error}")
        return kind(f"{what}: {self._logger.last or 'TensorRT gave no reason'}")


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = ""

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.last = message.strip()

    return Logger()
