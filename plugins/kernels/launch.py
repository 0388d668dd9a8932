"""Loads cubins and launches plans through the CUDA driver: neither Triton nor torch, only cuda-bindings.

Written against the driver API's documentation and tested with a stand-in driver; not yet run on a GPU.

Pointers and streams are plain integers, which is what TensorRT's `IPluginV3.enqueue` hands over:

    library = KernelLibrary(cubins)                      # once; loads in the context current at load() or first launch
    prepared = library.prepare(plan)                     # once per shape (on_shape_change)
    prepared.launch({"qkv": inputs[0], …}, workspace, stream)    # enqueue

A launch only queues work: nothing is allocated, copied or waited for, so it may be captured in a CUDA graph, once the
modules are loaded: `library.load()`, or a first launch outside of capture.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from clover.plugins.kernels.cubin import Cubin
from clover.plugins.kernels.plan import Kernel, Launch, Plan
from clover.runtime.errors import BundleError, CloverError

_STATIC_SHARED_LIMIT = 48 * 1024  # bytes; a block gets more only after asking for it (cuFuncSetAttribute)
_SCALARS: Mapping[str, type[Any]] = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
}


class KernelLibrary:
    """The cubins of one bundle and one GPU architecture, loaded when first needed.

    `driver` is the module `cuda.bindings.driver`, imported on demand; tests pass their own.
    """

    def __init__(self, cubins: Iterable[Cubin], driver: Any = None) -> None:
        self._cubins = {cubin.kernel: cubin for cubin in cubins}
        self._functions: dict[Kernel, Any] = {}
        self._modules: list[Any] = []
        self._driver = driver

    def prepare(self, plan: Plan) -> PreparedPlan:
        """Binds a plan to this library. BundleError when the plan needs a kernel the bundle lacks."""
        for launch in plan.launches:
            if launch.kernel not in self._cubins:
                raise BundleError(
                    f"the bundle has no compiled {launch.kernel.function} for these shapes and types; build it again"
                )
        return PreparedPlan(self, plan)

    def load(self) -> None:
        """Loads every kernel in the current context, so that no launch has to: modules can't be loaded in a capture."""
        for kernel in self._cubins:
            self.function(kernel)

    def cubin(self, kernel: Kernel) -> Cubin:
        """The compiled form of a kernel; KeyError when the library lacks it."""
        return self._cubins[kernel]

    @property
    def driver(self) -> Any:
        if self._driver is None:
            try:
                self._driver = importlib.import_module("cuda.bindings.driver")
            except ImportError as error:
                raise CloverError("GPU kernels need cuda-bindings; pip install cuda-bindings") from error
        return self._driver

    def function(self, kernel: Kernel) -> Any:
        """The loaded function of a kernel, in the context that is current at its first use."""
        if kernel not in self._functions:
            self._functions[kernel] = self._load(self._cubins[kernel])
        return self._functions[kernel]

    def _load(self, cubin: Cubin) -> Any:
        driver = self.driver
        attribute = driver.CUdevice_attribute
        device = self.call("cuCtxGetDevice")
        major = self.call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = self.call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        if not cubin.runs_on(major, minor):
            raise BundleError(
                f"the bundle's kernels are compiled for {cubin.target}, this GPU has compute capability "
                f"{major}.{minor}; build the bundle for it"
            )
        module = self.call("cuModuleLoadData", cubin.image)
        self._modules.append(module)
        function = self.call("cuModuleGetFunction", module, cubin.entry.encode())
        if cubin.shared_bytes > _STATIC_SHARED_LIMIT:
            size = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call("cuFuncSetAttribute", function, size, cubin.shared_bytes)
        return function

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a driver function; returns its result. CloverError with the driver's own name for the failure."""
        try:
            status, *results = getattr(self.driver, name)(*arguments)
        except RuntimeError as error:  # what cuda-bindings raises when it finds no driver library
            raise CloverError(f"the NVIDIA driver can't be used: {error}") from error
        if status != self.driver.CUresult.CUDA_SUCCESS:
            _, text = self.driver.cuGetErrorName(status)
            reason = text.decode() if isinstance(text, bytes) else str(status)
            raise CloverError(f"{name} failed with {reason}")
        return results[0] if results else None

    def close(self) -> None:
        """Unloads the modules. The context they were loaded in must be current and idle."""
        self._functions.clear()
        while self._modules:
            self.call("cuModuleUnload", self._modules.pop())


class PreparedPlan:
    """A plan whose argument blocks are laid out once, so that a launch only fills in pointers. Not thread-safe."""

    def __init__(self, library: KernelLibrary, plan: Plan) -> None:
        self._library = library
        self.plan = plan
        self._blocks = [
            _ArgumentBlock(launch, library.cubin(launch.kernel).hidden_parameters) for launch in plan.launches
        ]
        self._offsets = {buffer.name: buffer.offset for buffer in plan.buffers}

    @property
    def workspace_bytes(self) -> int:
        return self.plan.workspace_bytes

    def launch(self, pointers: Mapping[str, int], workspace: int, stream: int) -> None:
        """Queues the plan's launches on `stream` (a CUstream or cudaStream_t as an integer, 0 the default stream).

        pointers: the device address of every tensor the plan names, inputs and outputs. workspace: the address of
        `workspace_bytes` bytes. All must be multiples of 16, which the kernels' vector loads rely on.
        Raises CloverError for a missing or misaligned address, and for a launch the driver refuses.
        """
        addresses = {**pointers, **{name: workspace + offset for name, offset in self._offsets.items()}}
        for name, address in addresses.items():
            if address % 16:
                raise CloverError(f"tensor {name} lies at an address that is not a multiple of 16; align it")
        for launch, block in zip(self.plan.launches, self._blocks, strict=True):
            if 0 in launch.grid:
                continue
            cubin = self._library.cubin(launch.kernel)
            kernel_parameters = block.fill(addresses)
            self._library.call(
                "cuLaunchKernel",
                self._library.function(launch.kernel),
                *launch.grid,
                *(cubin.threads, 1, 1),
                cubin.shared_bytes,
                stream,
                kernel_parameters,
                0,
            )


def _parameter_types(kernel: Kernel, hidden: int) -> list[type[Any]]:
    """The C types of a kernel's parameters in order: pointers and numbers, then Triton's `hidden` scratch pointers."""
    own = [ctypes.c_uint64 if kind.startswith("*") else _SCALARS[kind] for _, kind in kernel.signature]
    return [*own, *[ctypes.c_uint64] * hidden]


def parameter_layout(cubin: Cubin) -> tuple[tuple[int, int], ...]:
    """(offset, size) in bytes of each parameter that a launch passes, as C lays them out."""
    at, placed = 0, []
    for kind in _parameter_types(cubin.kernel, cubin.hidden_parameters):
        size = ctypes.sizeof(kind)
        at = -(-at // size) * size
        placed.append((at, size))
        at += size
    return tuple(placed)


class _ArgumentBlock:
    """The `void **kernelParams` of one launch: an array of pointers to values, kept alive here.

    The driver copies the values before cuLaunchKernel returns, also during capture, so a block may be reused.
    """

    def __init__(self, launch: Launch, hidden: int) -> None:
        self._values: list[Any] = []
        self._named: list[tuple[str, Any]] = []
        given = (*launch.arguments, *[0] * hidden)
        for kind, argument in zip(_parameter_types(launch.kernel, hidden), given, strict=True):
            value = kind() if isinstance(argument, str) else kind(argument)
            if isinstance(argument, str):
                self._named.append((argument, value))
            self._values.append(value)
        self._array = (ctypes.c_void_p * len(self._values))(*(ctypes.addressof(v) for v in self._values))

    def fill(self, addresses: Mapping[str, int]) -> int:
        """Puts the addresses in place; returns the array's own address, which cuda-bindings takes as an int."""
        for name, value in self._named:
            if name not in addresses:
                raise CloverError(f"tensor {name} has no address; pass one for every input and output")
            value.value = addresses[name]
        return ctypes.addressof(self._array)
