"""The launcher, with a stand-in for the CUDA driver that keeps what it is given."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from clover.plugins.bidirectional_gdn import kernel_launch as gdn
from clover.plugins.bidirectional_gdn.spec import GatedDeltaNetAttributes
from clover.plugins.kernels.cubin import Cubin
from clover.plugins.kernels.launch import KernelLibrary
from clover.plugins.kernels.plan import Kernel, Plan
from clover.plugins.moe_coreset_routing import kernel_launch as routing
from clover.plugins.moe_coreset_routing.spec import CoresetAttributes
from clover.plugins.moe_experts import kernel_launch as experts
from clover.plugins.moe_experts.spec import ExpertsAttributes
from clover.runtime.errors import BundleError, CloverError


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


@dataclass
class Driver:
    """Mimics the parts of cuda.bindings.driver that the launcher uses: same names, same return tuples."""

    capability: tuple[int, int] = (12, 0)
    launch_status: Status = Status.CUDA_SUCCESS
    images: list[bytes] = field(default_factory=list)
    attributes: list[tuple[Any, ...]] = field(default_factory=list)
    launches: list[SimpleNamespace] = field(default_factory=list)
    arity: dict[str, list[type[Any]]] = field(default_factory=dict)  # entry -> its parameters' types

    CUresult = Status
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor"
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")

    def cuCtxGetDevice(self) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, 0

    def cuDeviceGetAttribute(self, name: str, device: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, self.capability[name == "minor"]

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:
        self.images.append(image)
        return Status.CUDA_SUCCESS, f"module {len(self.images)}"

    def cuModuleGetFunction(self, module: str, entry: bytes) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, entry.decode()

    def cuFuncSetAttribute(self, *arguments: Any) -> tuple[Any, ...]:
        self.attributes.append(arguments)
        return (Status.CUDA_SUCCESS,)

    def cuGetErrorName(self, status: Status) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, status.name.encode()

    def cuModuleUnload(self, module: str) -> tuple[Any, ...]:
        self.images.pop()
        return (Status.CUDA_SUCCESS,)

    def cuLaunchKernel(self, function: str, *arguments: Any) -> tuple[Any, ...]:
        *shape, shared, stream, parameters, extra = arguments
        kinds = self.arity[function]
        array = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        values = [ctypes.cast(array[i], ctypes.POINTER(kind)).contents.value for i, kind in enumerate(kinds)]
        self.launches.append(
            SimpleNamespace(
                function=function,
                grid=tuple(shape[:3]),
                block=tuple(shape[3:]),
                shared=shared,
                stream=stream,
                values=values,
            )
        )
        assert extra == 0
        return (self.launch_status,)


def cubin(kernel: Kernel, shared: int = 1024) -> Cubin:
    return Cubin(
        kernel, 120, "sm_120a", kernel.function, kernel.function.encode(), shared, 2, 64, 0, 0, "3.9.0", "13", ""
    )


def library(plan: Plan, driver: Driver, shared: int = 1024) -> KernelLibrary:
    kinds = {"i32": ctypes.c_int32}
    for launch in plan.launches:
        kernel = launch.kernel
        driver.arity[kernel.function] = [kinds.get(kind, ctypes.c_uint64) for _, kind in kernel.signature]
        driver.arity[kernel.function] += [ctypes.c_uint64] * 2
    return KernelLibrary([cubin(launch.kernel, shared) for launch in plan.launches], driver)


def gdn_plan() -> Plan:
    return gdn.plan(GatedDeltaNetAttributes(16, 32, 128, 128, 32, 0.1), sequences=2, rows=40)


def addresses(plan: Plan) -> dict[str, int]:
    buffers = {b.name for b in plan.buffers}
    names = sorted({a for launch in plan.launches for a in launch.arguments if isinstance(a, str)} - buffers)
    return {name: 0x10_0000_0000 + 0x1000 * i for i, name in enumerate(names)}


def test_arguments_grid_block_and_stream_reach_the_driver() -> None:
    plan, driver = gdn_plan(), Driver()
    where = addresses(plan)
    prepared = library(plan, driver).prepare(plan)
    prepared.launch(where, workspace=0x20_0000_0000, stream=77)
    first, second = driver.launches
    assert (first.function, first.grid, first.block, first.shared) == ("convolve", (3, 64, 2), (128, 1, 1), 1024)
    assert (second.function, second.grid, second.stream) == ("mix", (4, 32, 2), 77)
    names = [name for name, _ in plan.launches[0].kernel.signature]
    expected = [0x20_0000_0000 if name == "mixed" else 40 if name == "rows" else where[name] for name in names]
    assert first.values == [*expected, 0, 0]  # the two scratch pointers Triton adds
    # a second launch with other addresses reuses the blocks and loads nothing again
    moved = {name: address + 0x100 for name, address in where.items()}
    prepared.launch(moved, workspace=0x30_0000_0000, stream=0)
    assert driver.launches[2].values[0] == moved["qkv"] and driver.launches[2].values[7] == 0x30_0000_0000
    assert len(driver.images) == 2


def test_a_number_for_a_pointer_or_the_other_way_round_is_no_launch() -> None:
    launch = gdn_plan().launches[0]
    for arguments in ((7, *launch.arguments[1:]), (*launch.arguments[:-1], "rows"), launch.arguments[:-1]):
        with pytest.raises(ValueError, match="argument"):
            replace(launch, arguments=arguments)


def test_no_grid_passes_what_the_device_takes() -> None:
    """65,535 blocks along y and z: only x may count rows of all sequences."""
    shapes = experts.ExpertShapes(ExpertsAttributes(8, 512, 128), 2048, 256)
    net = GatedDeltaNetAttributes(16, 32, 128, 128, 32, 0.1)
    plans = (
        experts.plan(shapes, rows=512 * 512),
        gdn.plan(net, sequences=512, rows=512),
        routing.plan(CoresetAttributes(8, 8), sequences=512, rows=512, experts=256),
    )
    for plan in plans:
        for launch in plan.launches:
            assert max(launch.grid[1:]) <= 65_535, launch.kernel.function


def test_workspace_buffers_do_not_overlap_and_fit() -> None:
    shapes = experts.ExpertShapes(ExpertsAttributes(8, 512, 128), 2048, 256)
    plan, driver = experts.plan(shapes, rows=33), Driver()
    library(plan, driver).prepare(plan).launch(addresses(plan), workspace=1 << 40, stream=0)
    assert [launch.function for launch in driver.launches] == [
        *("choose_experts", "list_rows", "gate_up_product", "down_product", "combine")
    ]
    ends = 0
    for buffer in plan.buffers:
        assert buffer.offset >= ends and buffer.offset % 256 == 0
        ends = buffer.offset + buffer.nbytes
    assert plan.workspace_bytes >= ends


def test_large_shared_memory_is_asked_for() -> None:
    plan, driver = gdn_plan(), Driver()
    library(plan, driver, shared=60_000).prepare(plan).launch(addresses(plan), 0, 0)
    assert driver.attributes == [("convolve", "shared", 60_000), ("mix", "shared", 60_000)]


def test_load_loads_and_close_unloads_every_module_once() -> None:
    plan, driver = gdn_plan(), Driver()
    loaded = library(plan, driver)
    loaded.load()
    assert driver.images == [b"convolve", b"mix"] and not driver.launches
    loaded.prepare(plan).launch(addresses(plan), 0, 0)
    assert len(driver.images) == 2
    loaded.close()
    assert driver.images == []


def test_mistakes_are_named() -> None:
    plan, driver = gdn_plan(), Driver()
    where = addresses(plan)
    prepared = library(plan, driver).prepare(plan)
    with pytest.raises(CloverError, match="tensor qkv has no address"):
        prepared.launch({name: a for name, a in where.items() if name != "qkv"}, 0, 0)
    with pytest.raises(CloverError, match="tensor a lies at an address"):
        prepared.launch({**where, "a": where["a"] + 8}, 0, 0)
    with pytest.raises(BundleError, match="no compiled convolve"):
        KernelLibrary([], driver).prepare(plan)
    driver.launch_status = Status.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(CloverError, match="cuLaunchKernel failed with CUDA_ERROR_INVALID_VALUE"):
        prepared.launch(where, 0, 0)
    with pytest.raises(BundleError, match=r"compiled for sm_120a, this GPU has compute capability 9\.0"):
        library(plan, Driver(capability=(9, 0))).prepare(plan).launch(where, 0, 0)
