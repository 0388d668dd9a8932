"""Kernels compiled ahead of time, without a GPU: the images, their descriptions and the cache."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from clover.plugins.bidirectional_gdn import kernel_launch as gdn
from clover.plugins.bidirectional_gdn.spec import GatedDeltaNetAttributes
from clover.plugins.kernels.compile import ARCHITECTURES, compile_kernel, compile_kernels
from clover.plugins.kernels.cubin import SHARED_MEMORY_LIMIT, Cubin, source_digest
from clover.plugins.kernels.image import check_image, read_image
from clover.plugins.kernels.launch import parameter_layout
from clover.plugins.kernels.model_kernels import full_model_kernels, table
from clover.plugins.kernels.plan import Kernel
from clover.plugins.moe_coreset_routing import kernel_launch as routing
from clover.plugins.moe_coreset_routing.spec import CoresetAttributes
from clover.plugins.moe_experts import kernel_launch as experts
from clover.plugins.moe_experts.spec import ExpertsAttributes
from clover.runtime.errors import BundleError, CloverError

pytest.importorskip("triton")


def small_kernels() -> list[Kernel]:
    """Every kernel, specialised for a tiny model: fast to compile, the same code."""
    shapes = experts.ExpertShapes(ExpertsAttributes(2, 64, 64), 128, 16)
    return [
        *gdn.kernels(GatedDeltaNetAttributes(1, 2, 16, 16, 32, 0.25)),
        routing.kernel(CoresetAttributes(2, 2), experts=16),
        *experts.kernels(shapes, tile_rows=32).all,
    ]


@pytest.fixture(scope="session")
def cache(request: pytest.FixtureRequest) -> Path:
    """Kept between test runs; an entry is found by a hash of all it was made from."""
    store = request.config.cache
    assert store is not None
    return Path(store.mkdir("cubins"))


def check(cubin: Cubin) -> None:
    assert cubin.image[:4] == b"\x7fELF"
    assert f".text.{cubin.entry}".encode() in cubin.image
    assert cubin.entry == cubin.kernel.function
    assert re.fullmatch(rf"sm_{cubin.sm}a?", cubin.target)
    assert cubin.shared_bytes <= SHARED_MEMORY_LIMIT[cubin.sm]
    assert cubin.hidden_parameters == 2  # Triton 3.9: global scratch and profile scratch
    assert 0 < cubin.registers <= 255
    assert b"kernel.py" not in cubin.image, "a path of the build machine is inside"
    image = check_image(cubin)
    assert image.sm == cubin.sm and image.threads == cubin.threads
    # what the driver copies arguments by is what the launcher packs: pointers, numbers, two scratch pointers
    sizes = [8 if kind.startswith("*") else 4 for _, kind in cubin.kernel.signature] + [8, 8]
    assert [size for _, size in image.parameters] == sizes
    assert image.parameters == parameter_layout(cubin)
    assert cubin.source == source_digest(cubin.kernel.module)


@pytest.mark.parametrize("sm", [80, 89, 90, 120])
def test_every_kernel_compiles(sm: int, cache: Path) -> None:
    cubins = compile_kernels(small_kernels(), sm, cache=cache)
    assert len({c.name for c in cubins}) == len(cubins) == 8
    for cubin in cubins:
        check(cubin)


@pytest.mark.parametrize("sm", [80, 120])
def test_expert_weights_are_loaded_sixteen_bytes_at_a_time(sm: int, cache: Path, tmp_path: Path) -> None:
    """An address out of a table has no known alignment; without the kernels' promise, loads go byte by byte."""
    from triton import knobs

    for kernel in small_kernels():
        if kernel.function in ("gate_up_product", "down_product"):
            image, _ = compile_kernel(kernel, sm, cache=cache).write(tmp_path)
            command = [knobs.nvidia.nvdisasm.path, "-c", str(image)]
            code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            assert "LDGSTS.E.BYPASS.128" in code and "LDG.E.U8" not in code
            assert "HMMA" in code


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_every_kernel_of_the_full_model_compiles(sm: int, cache: Path) -> None:
    for cubin in compile_kernels([kernel for _, kernel in full_model_kernels()], sm, cache=cache):
        check(cubin)
        assert cubin.spill_store_bytes <= 256, (cubin.name, cubin.spill_store_bytes)


@pytest.mark.slow
def test_the_documented_table_is_what_the_kernels_take(cache: Path) -> None:
    document = (Path(__file__).parent.parent / "docs" / "kernels.md").read_text()
    assert table(ARCHITECTURES, cache) in document


def test_compiling_again_gives_the_same_bytes() -> None:
    kernel = small_kernels()[-1]
    first, second = compile_kernel(kernel, 120), compile_kernel(kernel, 120)
    assert first == second and first.image == second.image


def test_a_stored_cubin_reads_back_and_damage_is_noticed(cache: Path, tmp_path: Path) -> None:
    cubin = compile_kernel(small_kernels()[-1], 90, cache=cache)
    image, description = cubin.write(tmp_path)
    assert Cubin.read(description) == cubin
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([image.name, description.name])
    data = bytearray(image.read_bytes())
    data[100] ^= 1
    image.write_bytes(data)
    with pytest.raises(BundleError, match="does not match its recorded hash"):
        Cubin.read(description)
    description.write_text(json.dumps({"sm": 90}))
    with pytest.raises(BundleError, match="incomplete"):
        Cubin.read(description)
    image.unlink()
    with pytest.raises(BundleError, match="can't be read"):
        Cubin.read(description)


def test_an_image_that_disagrees_with_its_description_is_found(cache: Path) -> None:
    """Another count, order or width of parameters, other threads, another architecture, another kernel, half a file."""
    cubin = compile_kernel(small_kernels()[0], 120, cache=cache)
    signature = cubin.kernel.signature

    def with_signature(*given: tuple[str, str]) -> Cubin:
        return replace(cubin, kernel=replace(cubin.kernel, signature=given))

    for wrong, told in (
        (replace(cubin, hidden_parameters=1), "takes parameters"),
        (with_signature(*signature[1:]), "takes parameters"),
        (with_signature(signature[-1], *signature[:-1]), "takes parameters"),
        (with_signature(*signature[:-1], ("rows", "i64")), "takes parameters"),
        (replace(cubin, kernel=replace(cubin.kernel, num_warps=8)), "needs blocks of 128 threads, not 256"),
        (replace(cubin, sm=121), "is compiled for SM 120"),
        (replace(cubin, entry="other"), "holds no kernel other"),
        (replace(cubin, image=cubin.image[:3000]), "can't be read"),
        (replace(cubin, image=b"PK" + cubin.image[2:]), "is not a cubin"),
        (replace(cubin, shared_bytes=100 * 1024), "bytes of shared memory"),
    ):
        with pytest.raises(BundleError, match=told):
            check_image(wrong)
    older = compile_kernel(small_kernels()[0], 89, cache=cache)
    assert read_image(older.image, older.entry).sm == 89, "another ELF version keeps it elsewhere"


def test_a_kernel_changed_with_or_without_its_launch_code_has_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kernel", "kernel_launch"):
        (tmp_path / f"{name}.py").write_bytes(b"one = 1\ntwo = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    first = source_digest("kernel")
    (tmp_path / "kernel.py").write_bytes(b"one = 1\r\ntwo = 2\r\n")
    assert source_digest("kernel") == first, "the line ends of another system"
    for name in ("kernel", "kernel_launch"):
        (tmp_path / f"{name}.py").write_bytes(b"one = 2\n")
        assert source_digest("kernel") != first
        first = source_digest("kernel")
    with pytest.raises(CloverError, match="reinstall clover"):
        source_digest("no_such_kernel")


def test_the_cache_notices_a_changed_kernel_and_mends_a_damaged_entry(tmp_path: Path) -> None:
    kernel = small_kernels()[-1]
    compile_kernel(kernel, 90, cache=tmp_path)
    (image,) = tmp_path.glob("*/*.cubin")
    good = image.read_bytes()
    image.write_bytes(b"half")
    assert compile_kernel(kernel, 90, cache=tmp_path).image == good == image.read_bytes()
    compile_kernel(replace(kernel, num_warps=8), 90, cache=tmp_path)
    assert len(list(tmp_path.glob("*/*.cubin"))) == 2


def test_which_devices_accept_an_image(cache: Path) -> None:
    plain = compile_kernel(small_kernels()[-1], 80, cache=cache)
    exact = compile_kernel(small_kernels()[-1], 120, cache=cache)
    assert plain.runs_on(8, 0) and plain.runs_on(8, 9) and not plain.runs_on(9, 0) and not plain.runs_on(7, 5)
    assert exact.runs_on(12, 0) and not exact.runs_on(12, 1) and not exact.runs_on(10, 0)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(CloverError, match=r"compute capability 7\.5"):
        compile_kernel(small_kernels()[0], 75)
