"""Asks the NVIDIA driver which GPUs this machine has, through its own library: no toolkit, no context, no torch."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass, replace
from typing import Any

from clover.engines.gpus import BACKEND_SMS, GIB, TARGETS, Gpu, custom_gpu, normalise
from clover.runtime.errors import CloverError

# CUdevice_attribute values of cuda.h.
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76
MEMORY_CLOCK_KHZ, MEMORY_BUS_BITS = 36, 37
# "Laptop GPU" and "Max-Q" cards share a desktop card's name and neither its memory nor its clocks.
OTHER_CARD_WORDS = ("laptop", "maxq", "mobile")
LINUX_LIBRARIES = ("libcuda.so.1", "libcuda.so", "/usr/lib/wsl/lib/libcuda.so.1")


@dataclass(frozen=True)
class DetectedGpu:
    """What the driver says about one GPU. `bandwidth_gbs` is 0 when the driver does not tell."""

    index: int
    name: str
    sm: int
    memory_bytes: int
    bandwidth_gbs: float


def load_driver() -> Any:
    """The driver's library. Raises CloverError when there is none."""
    names = ("nvcuda.dll",) if sys.platform == "win32" else LINUX_LIBRARIES
    for name in names:
        try:
            if sys.platform == "win32":
                return ctypes.WinDLL(name)
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CloverError(
        "--gpu auto finds no NVIDIA driver on this machine; install it, or name the target, such as --gpu rtx-5070-ti."
    )


def detect_gpus(driver: Any = None) -> list[DetectedGpu]:
    """Every GPU of this machine in the driver's order. Raises CloverError when the driver is missing or broken."""
    driver = load_driver() if driver is None else driver

    def call(function: str, *arguments: Any) -> None:
        code = getattr(driver, function)(*arguments)
        if code == 100:  # CUDA_ERROR_NO_DEVICE
            raise CloverError(
                "--gpu auto: the NVIDIA driver is installed but sees no GPU; name the target, such as --gpu h200."
            )
        if code != 0:
            raise CloverError(f"--gpu auto: the driver answers error {code} to {function}; run nvidia-smi to see why.")

    def attribute(device: ctypes.c_int, which: int) -> int:
        value = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(value), which, device)
        return value.value

    call("cuInit", 0)
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    found = []
    for index in range(count.value):
        device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
        call("cuDeviceGet", ctypes.byref(device), index)
        call("cuDeviceGetName", name, len(name), device)
        call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        sm = 10 * attribute(device, COMPUTE_CAPABILITY_MAJOR) + attribute(device, COMPUTE_CAPABILITY_MINOR)
        # Two transfers a clock; the driver reports 0 for a clock it does not know.
        bandwidth = 2e3 * attribute(device, MEMORY_CLOCK_KHZ) * attribute(device, MEMORY_BUS_BITS) / 8 / 1e9
        found.append(DetectedGpu(index, name.value.decode(errors="replace"), sm, memory.value, bandwidth))
    return found


def target_of(found: DetectedGpu) -> Gpu:
    """The target for a detected GPU: the table's row when the name and memory agree, with the memory really there.

    Raises CloverError when no backend supports the card.
    """
    if not any(found.sm in sms for sms in BACKEND_SMS.values()):
        raise CloverError(f"--gpu auto: no backend supports {found.name} (SM {found.sm}); use --gpu cpu.")
    visible = found.memory_bytes / GIB
    key = normalise(found.name)
    rows = [(normalise(alias), gpu) for gpu in TARGETS for alias in (gpu.name, gpu.title, *gpu.aliases)]
    matches = [
        (len(alias), gpu)
        for alias, gpu in rows
        if gpu.sm == found.sm and alias in key and gpu.visible_gib and abs(visible / gpu.visible_gib - 1) < 0.1
    ]
    if matches and not any(word in key for word in OTHER_CARD_WORDS):
        row = max(matches, key=lambda m: m[0])[1]
        return replace(row, visible_gib=visible, source=f"{row.source}; memory from the driver")
    gpu = custom_gpu(found.sm, found.memory_bytes)
    told = "memory and bandwidth" if found.bandwidth_gbs else "memory"
    return replace(
        gpu, title=found.name, bandwidth_gbs=found.bandwidth_gbs or gpu.bandwidth_gbs,
        source=f"{told} from the driver; {gpu.source.partition('; ')[2]}",
    )  # fmt: skip


def detected_gpu(driver: Any = None) -> Gpu:
    """The target for the GPU with the most memory. Raises CloverError when there is none."""
    found = detect_gpus(driver)
    if not found:
        raise CloverError(
            "--gpu auto: the NVIDIA driver is installed but sees no GPU; name the target, such as --gpu h200."
        )
    return target_of(max(found, key=lambda g: g.memory_bytes))


def installed_memory() -> int:
    """Bytes of RAM in this machine; 0 when the system does not tell."""
    if sys.platform == "win32":

        class MemoryStatus(ctypes.Structure):
            _fields_ = (
                ("length", ctypes.c_ulong), ("load", ctypes.c_ulong), ("total", ctypes.c_ulonglong),
                ("rest", ctypes.c_ulonglong * 6),
            )  # fmt: skip

        status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
        return int(status.total) if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else 0
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
