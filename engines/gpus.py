"""The targets a bundle can be built for: one table of cards, and how a user's words find a row of it.

Memory is what the box says (GiB) and what the driver leaves visible (GiB, the total that nvidia-smi reports; ECC
and firmware take the difference). Bandwidths are GB/s (1e9), one direction for the host link. TFLOP/s are dense
BF16 tensor operations with float32 accumulation. They are the vendor's peaks: floors for a step's time, no promise.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from clover.runtime.errors import CloverError

if TYPE_CHECKING:
    from rich.table import Table

Backend = Literal["tensorrt-rtx", "tensorrt", "onnxruntime"]

# Compute capabilities each backend builds for. TensorRT-RTX: what its builder accepts (8.0 is accepted, though the
# support matrix lists no 8.0 card). TensorRT: support matrix of 10.13.
BACKEND_SMS: dict[Backend, tuple[int, ...]] = {
    "tensorrt-rtx": (75, 80, 86, 89, 120, 121),
    "tensorrt": (75, 80, 86, 89, 90, 100, 103, 120, 121),
    "onnxruntime": (),
}
GIB = 1024**3
PCIE4, PCIE5 = ("PCIe 4.0 x16", 31.5), ("PCIe 5.0 x16", 63.0)
C2C = ("NVLink-C2C", 450.0)


@dataclass(frozen=True)
class Gpu:
    """One target. `sm` is the compute capability as an integer (120 for 12.0); None for the CPU."""

    name: str
    title: str
    aliases: tuple[str, ...]
    sm: int | None
    memory_gib: float | None  # as sold; None: whatever memory the machine has
    visible_gib: float | None  # what the driver reports
    bandwidth_gbs: float
    bf16_tflops: float
    link: str
    link_gbs: float
    backend: Backend
    source: str

    @property
    def memory_bytes(self) -> int | None:
        """Memory as sold, in bytes."""
        return None if self.memory_gib is None else int(self.memory_gib * GIB)

    @property
    def visible_bytes(self) -> int | None:
        """Memory a process can hope for, in bytes, before any context is created."""
        return None if self.visible_gib is None else int(self.visible_gib * GIB)

    @property
    def is_cpu(self) -> bool:
        return self.sm is None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "aliases": list(self.aliases)}


def default_backend(sm: int | None) -> Backend:
    """TensorRT-RTX where it supports the card (its engines build without a GPU), else TensorRT; CPU: ONNX Runtime."""
    if sm is None:
        return "onnxruntime"
    return "tensorrt-rtx" if sm in BACKEND_SMS["tensorrt-rtx"] else "tensorrt"


def _card(
    name: str, title: str, aliases: str, sm: int, memory: tuple[float, float], bandwidth: float, tflops: float,
    link: tuple[str, float], source: str,
) -> Gpu:  # fmt: skip
    return Gpu(name, title, tuple(aliases.split()), sm, *memory, bandwidth, tflops, *link, default_backend(sm), source)


AMPERE, ADA = "NVIDIA Ampere GA102 whitepaper", "NVIDIA Ada GPU architecture whitepaper"
BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper"
PRO_BLACKWELL = "NVIDIA RTX PRO Blackwell GPU architecture whitepaper"
HALF = "BF16 is half of the figure with sparsity"
HGX_B200 = f"NVIDIA HGX B200 datasheet, an eighth of the board; {HALF}; bandwidth from the driver's bus width and clock"
HGX_B300 = f"NVIDIA HGX B300 datasheet, an eighth of the board; {HALF}; the link is that of the host's side"
GB300_NVL72 = f"NVIDIA GB300 NVL72 datasheet, a 72nd of the rack; {HALF}"
DDR5 = "two channels of DDR5 at about 70 % of their peak and 1 TFLOP/s, a guess at a desktop"

# fmt: off
TARGETS: tuple[Gpu, ...] = (
    # name, title, aliases, SM, GiB (sold, visible), GB/s, BF16 TFLOP/s, host link, source
    _card("rtx-3090", "GeForce RTX 3090", "3090", 86, (24, 24.0), 936.2, 71.0, PCIE4, AMPERE),
    _card("rtx-4080", "GeForce RTX 4080", "4080", 89, (16, 15.99), 716.8, 97.5, PCIE4, ADA),
    _card("rtx-4090", "GeForce RTX 4090", "4090", 89, (24, 23.98), 1008.0, 165.2, PCIE4, ADA),
    _card("rtx-5070", "GeForce RTX 5070", "5070", 120, (12, 11.94), 672.0, 61.7, PCIE5, BLACKWELL),
    _card("rtx-5070-ti", "GeForce RTX 5070 Ti", "5070ti", 120, (16, 15.92), 896.0, 87.9, PCIE5, BLACKWELL),
    _card("rtx-5080", "GeForce RTX 5080", "5080", 120, (16, 15.92), 960.0, 112.6, PCIE5, BLACKWELL),
    _card("rtx-5090", "GeForce RTX 5090", "5090", 120, (32, 31.84), 1792.0, 209.5, PCIE5, BLACKWELL),
    _card("rtx-pro-6000", "RTX PRO 6000 Blackwell", "pro6000", 120, (96, 95.59), 1792.0, 503.8, PCIE5, PRO_BLACKWELL),
    _card("l40s", "L40S", "l40s-48gb", 89, (48, 44.98), 864.0, 362.0, PCIE4, "NVIDIA L40S datasheet"),
    _card("a100", "A100 80GB SXM", "a100-80gb a100-sxm", 80, (80, 80.0), 2039.0, 312.0, PCIE4, "NVIDIA A100 datasheet"),
    _card("h100", "H100 80GB SXM", "h100-80gb h100-sxm", 90, (80, 79.64), 3350.0, 989.4, PCIE5,
          f"NVIDIA H100 datasheet; {HALF}"),
    _card("h200", "H200 SXM", "h200-141gb", 90, (141, 140.4), 4800.0, 989.4, PCIE5, f"NVIDIA H200 datasheet; {HALF}"),
    _card("b200", "B200 SXM", "b200-180gb", 100, (180, 178.3), 7672.0, 2250.0, PCIE5, HGX_B200),
    _card("b300", "B300 SXM", "b300-288gb", 103, (288, 268.5), 8000.0, 2250.0, PCIE5, HGX_B300),
    _card("gb300", "GB300 (Grace Blackwell)", "gb300-nvl72", 103, (288, 277.5), 8000.0, 2500.0, C2C, GB300_NVL72),
    Gpu("cpu", "this machine's CPU", ("host",), None, None, None, 60.0, 1.0, "none", 0.0, "onnxruntime", DDR5),
)
# fmt: on

MAKER_WORDS = ("nvidia", "geforce", "graphics", "gpu")


def normalise(name: str) -> str:
    """`NVIDIA GeForce RTX 5070 Ti`, `geforce-rtx-5070-ti` and `RTX5070TI` all become `rtx5070ti`."""
    squashed = re.sub(r"[^a-z0-9]+", "", name.lower())
    for word in MAKER_WORDS:
        squashed = squashed.replace(word, "")
    return squashed


def _by_name() -> dict[str, Gpu]:
    return {normalise(alias): gpu for gpu in TARGETS for alias in (gpu.name, gpu.title, *gpu.aliases)}


def find_gpu(name: str, option: str = "--gpu") -> Gpu:
    """The target called `name`, however it is written. Raises CloverError suggesting the nearest names."""
    rows = _by_name()
    key = normalise(name)
    if key in rows:
        return rows[key]
    near = difflib.get_close_matches(key, rows, n=3, cutoff=0.6)
    names = list(dict.fromkeys(rows[k].name for k in near))
    hint = f"did you mean {' or '.join(names)}?" if names else f"known: {', '.join(g.name for g in TARGETS)}."
    other = " Any other card: --sm 120 --memory 16GiB." if option == "--gpu" else ""
    raise CloverError(f"{option} {name!r} is no known target; {hint}{other}")


SIZE_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
SIZE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_size(text: str | int, option: str = "--memory") -> int:
    """Bytes in `16GiB`, `16 GB`, `16303MiB`; an int passes through. Raises CloverError for anything else."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)\s*", text.lower())
    size = int(float(match[1]) * SIZE_UNITS[match[2]]) if match and match[2] in SIZE_UNITS else 0
    if size <= 0:
        raise CloverError(f"{option} {text!r} is no size; write a number and its unit, such as 16GiB or 16303MiB.")
    return size


def parse_sm(text: str | int) -> int:
    """Compute capability 120 from `120`, `12.0`, `sm_120` or `sm120`. Raises CloverError listing the known ones."""
    known = sorted(set(BACKEND_SMS["tensorrt-rtx"]) | set(BACKEND_SMS["tensorrt"]))
    digits = re.sub(r"^sm_?", "", str(text).strip().lower()).replace(".", "")
    if not digits.isdigit() or int(digits) not in known:
        raise CloverError(f"--sm {text} is not supported; choose from {', '.join(map(str, known))} (12.0 is 120).")
    return int(digits)


def custom_gpu(sm: str | int, memory: str | int) -> Gpu:
    """A card that is not in the table, from `--sm` and `--memory`.

    Its speeds are those of the slowest card of the same generation in the table, and `source` says so.
    """
    capability, size = parse_sm(sm), parse_size(memory)
    cards = [g for g in TARGETS if g.sm is not None]
    like = min(cards, key=lambda g: (abs((g.sm or 0) - capability), g.bandwidth_gbs))
    gib = size / GIB
    return replace(
        like, name=f"sm{capability}-{gib:.4g}gib", title=f"custom card, SM {capability}, {gib:.4g} GiB", aliases=(),
        sm=capability, memory_gib=gib, visible_gib=gib, backend=default_backend(capability),
        source=f"given by --sm and --memory; speeds assumed to be those of {like.title}",
    )  # fmt: skip


def check_backend(gpu: Gpu, backend: str | None = None) -> Backend:
    """The backend to build `gpu` with: `backend`, or the target's own. Raises CloverError naming a mismatch."""
    if backend is None:
        return gpu.backend
    for name, capabilities in BACKEND_SMS.items():
        if name != backend:
            continue
        if gpu.sm is None:
            if name == "onnxruntime":
                return name
            raise CloverError(f"--backend {backend} needs a GPU and the target is the CPU; use --backend onnxruntime.")
        if name == "onnxruntime":
            raise CloverError(f"--backend onnxruntime runs on the CPU and the target is {gpu.title}; use --gpu cpu.")
        if gpu.sm not in capabilities:
            raise CloverError(
                f"{backend} has no support for SM {gpu.sm} ({gpu.title}), only {', '.join(map(str, capabilities))}; "
                f"use --backend {default_backend(gpu.sm)}."
            )
        return name
    raise CloverError(f"--backend {backend!r} is unknown; choose from {', '.join(BACKEND_SMS)}.")


def resolve_gpu(name: str | None, sm: str | int | None = None, memory: str | int | None = None) -> Gpu:
    """The target of `--gpu NAME`, `--gpu auto`, `--gpu cpu`, or `--sm N --memory SIZE`.

    Raises CloverError when the options contradict each other or name nothing.
    """
    if sm is not None or memory is not None:
        if name is not None:
            raise CloverError("give either --gpu or --sm with --memory, not both.")
        if sm is None or memory is None:
            raise CloverError("--sm and --memory go together, such as --sm 120 --memory 16GiB.")
        return custom_gpu(sm, memory)
    if name is None:
        raise CloverError("no target given; use --gpu rtx-5070-ti, --gpu auto, --gpu cpu, or --sm 120 --memory 16GiB.")
    if name.strip().lower() == "auto":
        from clover.engines.gpu_driver import detected_gpu

        return detected_gpu()
    return find_gpu(name)


def gpus_table() -> tuple[list[dict[str, Any]], Table]:
    """Every target as JSON rows, and as a table for the terminal."""
    from rich.table import Table

    table = Table(title="Targets")
    for heading in ("--gpu", "card", "SM"):
        table.add_column(heading, no_wrap=True)
    for heading in ("memory GiB", "visible GiB", "GB/s", "BF16 TFLOP/s"):
        table.add_column(heading, justify="right")
    for heading in ("host link", "backend"):
        table.add_column(heading, no_wrap=True)
    for g in TARGETS:
        table.add_row(
            g.name, g.title, "-" if g.sm is None else str(g.sm), _number(g.memory_gib), _number(g.visible_gib),
            _number(g.bandwidth_gbs), _number(g.bf16_tflops), g.link, g.backend,
        )  # fmt: skip
    return [g.to_json() for g in TARGETS], table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.6g}"
