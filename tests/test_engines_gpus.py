"""Targets: names find their card, sizes parse, mismatches are named, and the driver's answers become a target."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import pytest

from clover.engines import gpu_driver
from clover.engines.gpus import (
    BACKEND_SMS,
    GIB,
    TARGETS,
    check_backend,
    custom_gpu,
    default_backend,
    find_gpu,
    gpus_table,
    normalise,
    parse_size,
    parse_sm,
    resolve_gpu,
)
from clover.runtime.errors import CloverError


@pytest.mark.parametrize(
    "name", ["RTX 5070 Ti", "5070ti", "geforce-rtx-5070-ti", "NVIDIA GeForce RTX 5070 Ti", "rtx_5070_TI", "5070 Ti"]
)
def test_one_card_has_many_spellings(name: str) -> None:
    assert find_gpu(name).name == "rtx-5070-ti"


def test_every_name_and_alias_is_unique_and_finds_its_own_row() -> None:
    seen: dict[str, str] = {}
    for gpu in TARGETS:
        for alias in (gpu.name, gpu.title, *gpu.aliases):
            assert seen.setdefault(normalise(alias), gpu.name) == gpu.name
            assert find_gpu(alias) is gpu
    for name in (
        "4090",
        "4080",
        "5070",
        "5080",
        "5090",
        "rtx pro 6000",
        "3090",
        "A100",
        "L40S",
        "H100",
        "h200",
        "b200",
        "b300",
        "GB300",
        "cpu",
    ):
        find_gpu(name)


def test_rows_are_consistent() -> None:
    for gpu in TARGETS:
        if gpu.is_cpu:
            continue
        assert gpu.memory_gib and gpu.visible_gib and 0.9 * gpu.memory_gib < gpu.visible_gib <= gpu.memory_gib
        assert gpu.sm in BACKEND_SMS[gpu.backend] and gpu.backend == default_backend(gpu.sm)
        # A card whose balance of operations and bytes is out by a factor of ten is a typing mistake.
        assert 50 < gpu.bf16_tflops * 1e3 / gpu.bandwidth_gbs < 500
    assert find_gpu("5070ti").memory_bytes == 16 * GIB


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(CloverError, match=r"did you mean .*rtx-5090"):
        find_gpu("rtx 5091")
    with pytest.raises(CloverError, match="known: rtx-3090"):
        find_gpu("radeon")


def test_sizes_and_capabilities() -> None:
    assert parse_size("16GiB") == parse_size("16384 MiB") == 16 * GIB
    assert parse_size("16 GB") == 16 * 10**9
    assert parse_size("1.5gib") == 3 * GIB // 2
    for wrong in ("16", "16G", "0GiB", "-1GiB", "much", ""):
        with pytest.raises(CloverError, match="16GiB"):
            parse_size(wrong)
    assert parse_sm("12.0") == parse_sm("sm_120") == parse_sm(120) == parse_sm("SM120") == 120
    with pytest.raises(CloverError, match="121"):
        parse_sm("119")


def test_custom_card_and_options() -> None:
    gpu = custom_gpu("12.0", "16GiB")
    assert (gpu.sm, gpu.visible_bytes, gpu.backend) == (120, 16 * GIB, "tensorrt-rtx")
    assert "RTX 5070" in gpu.source and gpu.bandwidth_gbs == 672
    assert custom_gpu(90, "94GB").backend == "tensorrt"
    assert resolve_gpu(None, "120", "16GiB") == gpu
    for arguments, message in (
        (("5090", "120", None), "not both"),
        ((None, "120", None), "go together"),
        ((None, None, None), "no target"),
    ):
        with pytest.raises(CloverError, match=message):
            resolve_gpu(*arguments)


def test_backend_mismatch_is_named() -> None:
    assert check_backend(find_gpu("h200")) == "tensorrt"
    assert check_backend(find_gpu("5090"), "tensorrt") == "tensorrt"
    with pytest.raises(CloverError, match=r"SM 90.*--backend tensorrt\."):
        check_backend(find_gpu("h200"), "tensorrt-rtx")
    with pytest.raises(CloverError, match="onnxruntime"):
        check_backend(find_gpu("cpu"), "tensorrt")
    with pytest.raises(CloverError, match="--gpu cpu"):
        check_backend(find_gpu("5090"), "onnxruntime")
    with pytest.raises(CloverError, match="unknown"):
        check_backend(find_gpu("5090"), "tvm")


def test_table_renders_and_serialises() -> None:
    rows, table = gpus_table()
    assert json.loads(json.dumps(rows))[0]["name"] == TARGETS[0].name
    assert table.row_count == len(TARGETS)


class FakeDriver:
    """Answers like libcuda for the given cards: (name, SM, bytes, memory clock in kHz, bus bits)."""

    def __init__(self, *cards: tuple[str, int, int, int, int], init: int = 0) -> None:
        self.cards, self.init = cards, init

    @staticmethod
    def _set(reference: Any, value: int) -> int:
        reference._obj.value = value
        return 0

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDeviceGetCount(self, count: Any) -> int:
        return self._set(count, len(self.cards))

    def cuDeviceGet(self, device: Any, index: int) -> int:
        return self._set(device, index)

    def cuDeviceGetName(self, buffer: Any, size: int, device: ctypes.c_int) -> int:
        buffer.value = self.cards[device.value][0].encode()
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: ctypes.c_int) -> int:
        return self._set(memory, self.cards[device.value][2])

    def cuDeviceGetAttribute(self, value: Any, which: int, device: ctypes.c_int) -> int:
        _, sm, _, clock, bus = self.cards[device.value]
        return self._set(value, {75: sm // 10, 76: sm % 10, 36: clock, 37: bus}[which])


def test_auto_finds_the_table_row_with_the_memory_really_there() -> None:
    driver = FakeDriver(
        ("NVIDIA GeForce RTX 5070", 120, 12227 * 2**20, 14_001_000, 192),
        ("NVIDIA GeForce RTX 5070 Ti", 120, 16303 * 2**20, 14_001_000, 256),
    )
    gpu = gpu_driver.detected_gpu(driver)
    assert (gpu.name, gpu.visible_bytes, gpu.bandwidth_gbs) == ("rtx-5070-ti", 16303 * 2**20, 896.0)
    assert gpu_driver.detect_gpus(driver)[0].bandwidth_gbs == pytest.approx(672, rel=1e-3)


def test_auto_does_not_mistake_another_card_for_a_row() -> None:
    laptop = gpu_driver.detected_gpu(
        FakeDriver(("NVIDIA GeForce RTX 5090 Laptop GPU", 120, 24463 * 2**20, 14_001_000, 256))
    )
    assert laptop.title.endswith("Laptop GPU") and laptop.bandwidth_gbs == pytest.approx(896, rel=1e-3)
    # Same memory as the desktop card of that name, half its bandwidth.
    driver = FakeDriver(("NVIDIA GeForce RTX 5080 Laptop GPU", 120, 16303 * 2**20, 14_001_000, 128))
    assert gpu_driver.detected_gpu(driver).bandwidth_gbs == pytest.approx(448, rel=1e-3)
    small = gpu_driver.detected_gpu(FakeDriver(("NVIDIA A100-SXM4-40GB", 80, 40960 * 2**20, 0, 5120)))
    assert small.name == "sm80-40gib" and small.bandwidth_gbs == 2039.0
    assert gpu_driver.detected_gpu(FakeDriver(("NVIDIA H200", 90, 143771 * 2**20, 3_201_000, 6016))).name == "h200"


def test_auto_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CloverError, match="sees no GPU"):
        gpu_driver.detected_gpu(FakeDriver(init=100))
    with pytest.raises(CloverError, match="error 999 to cuInit"):
        gpu_driver.detected_gpu(FakeDriver(init=999))
    with pytest.raises(CloverError, match="no backend supports"):
        gpu_driver.detected_gpu(FakeDriver(("Tesla P100", 60, 16 * GIB, 0, 4096)))

    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(CloverError, match="no NVIDIA driver"):
        resolve_gpu("auto")


def test_installed_memory_is_plausible() -> None:
    assert gpu_driver.installed_memory() > GIB
