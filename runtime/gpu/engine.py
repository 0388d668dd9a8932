"""A TensorRT engine of the step graph: opened once, one execution context per profile over one piece of memory."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clover.plugins.tensorrt_plugin import PluginHost, PluginOp, register, unregister
from clover.runtime.errors import BundleError, CloverError
from clover.runtime.gpu.device import Device

DECODE, PREFILL = 0, 1  # the engine's profiles, in the order they were built


class StepEngine:
    """`run` queues one step. Not thread-safe.

    `trt` is the module tensorrt_rtx or tensorrt; the plugins' creators stay registered while the engine lives.
    """

    def __init__(self, trt: Any, path: Path, ops: tuple[PluginOp, ...], host: PluginHost, device: Device) -> None:
        """Raises BundleError when TensorRT can't open the engine on this card."""
        self._trt, self._host, self._device = trt, host, device
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
            unregister(trt, self._creators)
            raise

    @property
    def tensor_names(self) -> list[str]:
        """Every input and output."""
        return [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]

    def run(self, profile: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """Queues one step. shapes: every input's; addresses: every input's and output's, on the card, but for
        `candidates`, which the engine reads on the host. Raises CloverError when TensorRT refuses."""
        context = self._contexts[profile]
        for name, address in addresses.items():
            if not context.set_tensor_address(name, address):
                raise self._failure(f"the engine takes no memory for {name}")
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise self._failure(f"the engine does not take {name} of shape {list(shape)}")
        if not context.execute_async_v3(self._device.stream):
            raise self._failure("the engine failed to start a step")

    def close(self) -> None:
        """Frees the engine. The device must be idle."""
        if self._creators:
            self._contexts = []
            self._engine = self._runtime = None
            unregister(self._trt, self._creators)
            self._creators = []

    def _make_contexts(self) -> list[Any]:
        """Contexts of one engine never run at the same time here, so that they share the largest one's memory."""
        engine, contexts = self._engine, []
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        sizes = [engine.get_device_memory_size_for_profile_v2(p) for p in range(engine.num_optimization_profiles)]
        memory = self._device.allocate(max(sizes))
        for profile in range(engine.num_optimization_profiles):
            context = engine.create_execution_context(strategy)
            if context is None or not context.set_optimization_profile_async(profile, self._device.stream):
                raise self._failure("the engine has no execution context")
            context.set_device_memory(memory.address, memory.nbytes)
            contexts.append(context)
        self._device.synchronize()
        return contexts

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
