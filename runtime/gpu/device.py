"""Device and pinned host memory, copies, a stream and captured graphs: the little of CUDA's driver API a session needs."""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.runtime.errors import CloverError

log = logging.getLogger("clover")

ALIGNMENT = 256  # bytes; cuMemAlloc and cuMemHostAlloc align to at least that


class CardMemoryError(CloverError):
    """The card's memory is full."""


@dataclass(frozen=True)
class DeviceBuffer:
    """Memory on the card. `address` is a multiple of 256."""

    address: int
    nbytes: int


@dataclass(frozen=True)
class PinnedBuffer:
    """Page-locked host memory, which the card can read in place. `address`: as the host sees it."""

    address: int
    device_address: int
    nbytes: int

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes, as a view; valid until the buffer is freed."""
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        return np.ctypeslib.as_array(memory)


class Device:
    """One CUDA device with one stream. Everything is queued on the stream unless it says otherwise.

    `driver` is the module `cuda.bindings.driver`; tests pass a stand-in. Raises CloverError when there is no driver, no
    such device, or no memory left.
    """

    def __init__(self, index: int = 0, driver: Any = None) -> None:
        self._driver = driver or _import_driver()
        self._memory: dict[int, str] = {}  # address -> the function that frees it
        self.call("cuInit", 0)
        self._device = self.call("cuDeviceGet", index)
        # the primary context is the one TensorRT uses, too
        self._context = self.call("cuDevicePrimaryCtxRetain", self._device)
        self.activate()
        self._stream = self.call("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING
        self.stream = int(self._stream)

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a driver function and returns its result. Raises CloverError with the driver's name for the failure."""
        try:
            status, *results = getattr(self._driver, name)(*arguments)
        except RuntimeError as error:  # cuda-bindings' way of saying that there is no driver library
            raise CloverError(f"the NVIDIA driver can't be used ({error}); install it, or run on the CPU.") from None
        if int(status) != 0:
            _, text = self._driver.cuGetErrorName(status)
            reason = text.decode() if isinstance(text, bytes) else str(status)
            if "OUT_OF_MEMORY" in reason and name == "cuMemHostAlloc":
                raise CloverError(
                    f"the driver gives no {arguments[0] / 1e9:.1f} GB of page-locked host memory, which the experts that are "
                    "not on the card need; close other programs, add RAM, or keep more experts on the card."
                )
            if "OUT_OF_MEMORY" in reason:
                raise CardMemoryError(
                    "the card's memory is full; close other programs on it, or build with a smaller --max-context, "
                    "fewer --sequences or fewer --resident-experts."
                )
            raise CloverError(f"the NVIDIA driver answers {reason} to {name}; run nvidia-smi to see why.")
        return results[0] if results else None

    def activate(self) -> None:
        """Makes the device the calling thread's: the driver keeps that per thread, and sessions may change theirs."""
        self.call("cuCtxSetCurrent", self._context)

    @property
    def capability(self) -> int:
        """Compute capability, 120 for 12.0."""
        major, minor = (self.call("cuDeviceGetAttribute", self._attribute(a), self._device) for a in ("MAJOR", "MINOR"))
        return 10 * int(major) + int(minor)

    def _attribute(self, which: str) -> Any:
        return getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{which}")

    @property
    def free_memory(self) -> int:
        """Bytes free on the card now."""
        status, free, _ = self._driver.cuMemGetInfo()
        if int(status) != 0:
            raise CloverError("the NVIDIA driver does not tell the card's free memory; run nvidia-smi to see why.")
        return int(free)

    # -- memory --------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Memory on the card, its content undefined."""
        address = int(self.call("cuMemAlloc", max(nbytes, 1)))
        self._memory[address] = "cuMemFree"
        return DeviceBuffer(address, nbytes)

    def pin(self, nbytes: int) -> PinnedBuffer:
        """Page-locked memory that the card reads over the link."""
        address = int(self.call("cuMemHostAlloc", max(nbytes, 1), 2))  # CU_MEMHOSTALLOC_DEVICEMAP
        self._memory[address] = "cuMemFreeHost"
        return PinnedBuffer(address, int(self.call("cuMemHostGetDevicePointer", address, 0)), nbytes)

    def clear(self, address: int, nbytes: int) -> None:
        """Zeros."""
        if nbytes:
            self.call("cuMemsetD8Async", address, 0, nbytes, self._stream)

    def upload(self, address: int, source: int, nbytes: int) -> None:
        """Host (pinned, or the copy waits) to card."""
        if nbytes:
            self.call("cuMemcpyHtoDAsync", address, source, nbytes, self._stream)

    def download(self, target: int, address: int, nbytes: int) -> None:
        """Card to host; there once `synchronize` returns."""
        if nbytes:
            self.call("cuMemcpyDtoHAsync", target, address, nbytes, self._stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Card to card."""
        if nbytes:
            self.call("cuMemcpyDtoDAsync", target, source, nbytes, self._stream)

    def synchronize(self) -> None:
        """Waits for everything queued."""
        self.call("cuStreamSynchronize", self._stream)

    # -- graphs --------------------------------------------------------------------------------

    @contextmanager
    def capture(self) -> Iterator[list[Any]]:
        """Records what is queued inside instead of running it; the list holds the executable graph afterwards."""
        graphs: list[Any] = []
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", self._stream, mode)
        try:
            yield graphs
        except BaseException:
            self._driver.cuStreamEndCapture(self._stream)
            raise
        graph = self.call("cuStreamEndCapture", self._stream)
        try:
            graphs.append(self.call("cuGraphInstantiate", graph, 0))
        finally:
            self.call("cuGraphDestroy", graph)

    def launch(self, graph: Any) -> None:
        """Runs a captured graph."""
        self.call("cuGraphLaunch", graph, self._stream)

    def destroy(self, graph: Any) -> None:
        """Frees a captured graph. Raises nothing."""
        self._try("cuGraphExecDestroy", graph)

    def free(self, buffer: DeviceBuffer | PinnedBuffer) -> None:
        """Frees one buffer now."""
        self.call(self._memory.pop(buffer.address), buffer.address)

    def close(self) -> None:
        """Frees everything allocated here, the stream and the context. Harmless when closed already.

        Raises nothing: after a failure on the card every call fails, and the first failure is the one to tell.
        """
        if self._context is None:
            return
        self._try("cuCtxSetCurrent", self._context)
        self._try("cuStreamSynchronize", self._stream)
        for address, release in self._memory.items():
            self._try(release, address)
        self._memory.clear()
        self._try("cuStreamDestroy", self._stream)
        self._try("cuDevicePrimaryCtxRelease", self._device)
        self._context = None

    def _try(self, name: str, *arguments: Any) -> None:
        try:
            self.call(name, *arguments)
        except CloverError as error:
            log.debug("freeing what is on the card: %s", error)


def _import_driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise CloverError("running a GPU bundle needs cuda-bindings; pip install cuda-bindings.") from None
