"""Every driver call against the real bindings: they check arguments before they look for a driver, so no card is needed."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from clover.engines.gpu_driver import load_driver
from clover.plugins.kernels.launch import KernelLibrary
from clover.runtime.errors import CloverError
from clover.runtime.gpu.device import Device

driver: Any = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
ROOT = Path(__file__).parent.parent

try:
    load_driver()
except CloverError:
    pass
else:
    pytest.skip("a driver would run the calls, on addresses that are none", allow_module_level=True)

STREAM, DEVICE, CONTEXT = driver.CUstream(0), driver.CUdevice(0), driver.CUcontext(0)
GRAPH, EXECUTABLE, MODULE, FUNCTION = driver.CUgraph(0), driver.CUgraphExec(0), driver.CUmodule(0), driver.CUfunction(0)
CAPTURE = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
MAJOR = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
SHARED = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PARAMETERS = (ctypes.c_void_p * 1)()
# Arguments of the kinds the runtime passes: handles as the driver gave them, addresses and streams of TensorRT as ints.
CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (0,),
    "cuDeviceGet": (0,),
    "cuDeviceGetAttribute": (MAJOR, DEVICE),
    "cuDevicePrimaryCtxRetain": (DEVICE,),
    "cuDevicePrimaryCtxRelease": (DEVICE,),
    "cuCtxSetCurrent": (CONTEXT,),
    "cuCtxGetDevice": (),
    "cuGetErrorName": (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY,),
    "cuStreamCreate": (1,),
    "cuStreamSynchronize": (STREAM,),
    "cuStreamBeginCapture": (STREAM, CAPTURE),
    "cuStreamEndCapture": (STREAM,),
    "cuStreamDestroy": (STREAM,),
    "cuGraphInstantiate": (GRAPH, 0),
    "cuGraphDestroy": (GRAPH,),
    "cuGraphLaunch": (EXECUTABLE, STREAM),
    "cuGraphExecDestroy": (EXECUTABLE,),
    "cuMemGetInfo": (),
    "cuMemAlloc": (256,),
    "cuMemFree": (256,),
    "cuMemHostAlloc": (256, 2),
    "cuMemHostGetDevicePointer": (256, 0),
    "cuMemFreeHost": (256,),
    "cuMemsetD8Async": (256, 0, 16, STREAM),
    "cuMemcpyHtoDAsync": (256, 512, 16, STREAM),
    "cuMemcpyDtoHAsync": (256, 512, 16, STREAM),
    "cuMemcpyDtoDAsync": (256, 512, 16, STREAM),
    "cuModuleLoadData": (b"image",),
    "cuModuleGetFunction": (MODULE, b"entry"),
    "cuModuleUnload": (MODULE,),
    "cuFuncSetAttribute": (FUNCTION, SHARED, 65_536),
    "cuLaunchKernel": (FUNCTION, 1, 1, 1, 128, 1, 1, 0, 77, ctypes.addressof(PARAMETERS), 0),
}


def test_every_call_the_runtime_makes_is_listed() -> None:
    sources = [*(ROOT / "runtime" / "gpu").glob("*.py"), ROOT / "plugins" / "kernels" / "launch.py"]
    named = {n for p in sources for n in re.findall(r"\bcu[A-Z]\w+", p.read_text()) if n not in ("cuMemHost",)}
    assert named - {"cuLaunchKernelEx"} == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_the_bindings_take_the_arguments(name: str) -> None:
    """A wrong number or kind of arguments is a TypeError; with right ones only the driver is missing."""
    call = getattr(driver, name)
    with pytest.raises(RuntimeError, match="driver"):
        call(*CALLS[name])
    with pytest.raises(TypeError):
        call(*CALLS[name], 0)


def test_handles_and_codes_are_numbers_as_the_runtime_uses_them() -> None:
    assert int(driver.CUstream(5)) == 5 and int(driver.CUdeviceptr(1 << 40)) == 1 << 40
    assert int(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY) == 2 and driver.CUresult.CUDA_SUCCESS == 0


def test_without_a_driver_a_sentence_says_so() -> None:
    with pytest.raises(CloverError, match="the NVIDIA driver can't be used"):
        Device()
    with pytest.raises(CloverError, match="the NVIDIA driver can't be used"):
        KernelLibrary([]).call("cuCtxGetDevice")


def test_every_name_of_tensorrt_that_the_runtime_uses_exists() -> None:
    """The stand-ins answer to any name; the real classes do not."""
    trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx-cu13")
    text = (ROOT / "runtime" / "gpu" / "engine.py").read_text()
    used = {
        trt.ICudaEngine: r"\bengine\.(\w+)|self\._engine\.(\w+)",
        trt.IExecutionContext: r"\bcontext\.(\w+)|self\._contexts\[profile\]\.(\w+)",
        trt.IRuntimeConfig: r"\bsettings\.(\w+)",
        trt.IRuntimeCache: r"self\._cache\.(\w+)",
        trt.Runtime: r"self\._runtime\.(\w+)",
        trt: r"\btrt\.([A-Z]\w+)|self\._trt\.([A-Z]\w+)",
    }
    for owner, pattern in used.items():
        names = {name for found in re.finditer(pattern, text) for name in found.groups() if name}
        assert names, owner
        assert not {n for n in names if not hasattr(owner, n)}, owner
    assert hasattr(trt.IExecutionContext, "is_stream_capturable") and hasattr(
        trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"
    )
    assert trt.DynamicShapesKernelSpecializationStrategy.EAGER and trt.ExecutionContextAllocationStrategy.USER_MANAGED
