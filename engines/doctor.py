"""`clover doctor`: what is installed, what can be built and run on this machine, and what to install for the rest."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover.engines.gpus import BACKEND_SMS
from clover.runtime.errors import CloverError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clover.engines.gpu_driver import DetectedGpu

# What `pip list` calls them; the first that is installed counts. The module is what must be importable.
PACKAGES: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "onnx": ("onnx",),
    "numpy": ("numpy",),
    "safetensors": ("safetensors",),
    "tokenizers": ("tokenizers",),
    "tensorrt_rtx": ("tensorrt-rtx-cu13", "tensorrt-rtx", "tensorrt_rtx"),
    "tensorrt": ("tensorrt-cu13", "tensorrt", "tensorrt-cu12"),
    "cuda.bindings": ("cuda-bindings",),
    "triton": ("triton",),
    "torch": ("torch",),
    "transformers": ("transformers",),
    "fastapi": ("fastapi",),
    "uvicorn": ("uvicorn",),
}
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimd", "asimddp", "i8mm")
WINDOWS_FEATURES = {"avx2": 40, "avx512f": 41}  # IsProcessorFeaturePresent's numbers


def installed_version(names: tuple[str, ...]) -> str | None:
    """The version of the first distribution of `names` that is installed; nothing is imported."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def cpu_features() -> tuple[str, ...]:
    """Which of CPU_FEATURES this CPU has, as far as the system tells."""
    if sys.platform == "win32":
        present = ctypes.windll.kernel32.IsProcessorFeaturePresent
        return tuple(name for name, number in WINDOWS_FEATURES.items() if present(number))
    if sys.platform == "darwin":
        asked = ["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
        words = _output(asked).lower().split()
        return ("asimd",) if platform.machine() == "arm64" else tuple(n for n in CPU_FEATURES if n in words)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    flags = next((line for line in text.splitlines() if line.lower().startswith(("flags", "features"))), "")
    words = flags.partition(":")[2].split()
    return tuple(name for name in CPU_FEATURES if name in words)


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def find_gpus(detect: Callable[[], list[DetectedGpu]] | None = None) -> tuple[list[DetectedGpu], str | None]:
    """The GPUs that the driver sees, and why there are none."""
    if detect is None:
        from clover.engines.gpu_driver import detect_gpus

        detect = detect_gpus
    try:
        found = detect()
    except CloverError as error:
        reason = str(error).partition(";")[0].removeprefix("--gpu auto finds ").removeprefix("--gpu auto: ")
        return [], reason
    return found, None if found else "the NVIDIA driver sees no GPU"


def diagnose(
    version: Callable[[tuple[str, ...]], str | None] = installed_version,
    detect: Callable[[], list[DetectedGpu]] | None = None,
) -> dict[str, Any]:
    """JSON data: versions, CPU, GPUs, and for every backend whether it can build and run here, and what is missing."""
    from clover import __version__
    from clover.engines.gpu_driver import installed_memory

    versions = {name: version(names) for name, names in PACKAGES.items()}
    gpus, no_gpu = find_gpus(detect)
    features = cpu_features()
    backends = {
        "onnxruntime": _cpu_backend(versions, features),
        "tensorrt-rtx": _gpu_backend("tensorrt-rtx", "tensorrt_rtx", versions, gpus, no_gpu),
        "tensorrt": _gpu_backend("tensorrt", "tensorrt", versions, gpus, no_gpu),
    }
    serving = [n for n in ("fastapi", "uvicorn") if versions[n] is None]
    return {
        "clover": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": {"cores": os.cpu_count(), "features": list(features), "memory_bytes": installed_memory()},
        "gpus": [
            {"index": g.index, "name": g.name, "sm": g.sm, "memory_bytes": g.memory_bytes} for g in gpus
        ],
        "no_gpu": no_gpu,
        "packages": versions,
        "backends": backends,
        "serve": {"ready": not serving, "missing": [_extra("serve", serving)] if serving else []},
    }  # fmt: skip


def _extra(extra: str, names: list[str]) -> str:
    return f"{' and '.join(names)}: pip install '.[{extra}]' in Clover's checkout"


def _cpu_backend(versions: dict[str, str | None], features: tuple[str, ...]) -> dict[str, Any]:
    missing = [f"{n}: pip install clover-deploy" for n in ("onnxruntime", "onnx") if versions[n] is None]
    notes = []
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if x86 and features and "avx2" not in features:
        notes.append("this CPU has no AVX2, so INT4 is slow")
    return {"build": not missing, "run": not missing, "missing": missing, "notes": notes}


def _gpu_backend(
    backend: str, module: str, versions: dict[str, str | None], gpus: list[DetectedGpu], no_gpu: str | None
) -> dict[str, Any]:
    """Engines build without a GPU; compiling kernels needs Triton; running needs the driver and a card it supports."""
    capabilities = BACKEND_SMS[backend]  # type: ignore[index]
    library = [] if versions[module] else [_extra(backend, [module])]
    build_missing = library + ([] if versions["triton"] else ["to build, triton: pip install triton"])
    missing = library + ([] if versions["cuda.bindings"] else ["to run, cuda.bindings: pip install cuda-bindings"])
    fitting = [g.name for g in gpus if g.sm in capabilities]
    if no_gpu is not None:
        missing.append(f"to run: {no_gpu}")
    elif not fitting:
        cards = ", ".join(f"{g.name} (SM {g.sm})" for g in gpus)
        missing.append(f"to run: a card of SM {', '.join(map(str, capabilities))}; this machine has {cards}")
    return {
        "build": not build_missing,
        "run": not missing,
        "missing": list(dict.fromkeys([*build_missing, *missing])),
        "notes": [f"runs on {name}" for name in fitting] if not missing else [],
    }


def render_diagnosis(data: dict[str, Any]) -> RenderableType:
    """What `diagnose` found, for the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    cpu = data["cpu"]
    memory = f"{cpu['memory_bytes'] / 1e9:.0f} GB of memory" if cpu["memory_bytes"] else "memory unknown"
    lines = [
        f"clover {data['clover']}, Python {data['python']}, {data['system']}",
        f"CPU: {cpu['cores']} cores, {memory}, {' '.join(cpu['features']) or 'features unknown'}",
    ]
    lines += [f"GPU {g['index']}: {g['name']}, SM {g['sm']}, {g['memory_bytes'] / 2**30:.1f} GiB" for g in data["gpus"]]
    if data["no_gpu"]:
        lines.append(f"GPU: none ({data['no_gpu']})")
    installed = ", ".join(f"{name} {v}" for name, v in data["packages"].items() if v)
    absent = ", ".join(name for name, v in data["packages"].items() if not v)
    lines += [f"installed: {installed}"] + ([f"not installed: {absent}"] if absent else [])
    table = Table()
    for heading in ("backend", "build", "run"):
        table.add_column(heading, no_wrap=True)
    table.add_column("what is missing")
    for name, b in data["backends"].items():
        table.add_row(
            name, _yes(b["build"]), _yes(b["run"]), Text("\n".join([*b["missing"], *b["notes"]]) or "nothing")
        )
    serve = data["serve"]
    table.add_row("clover serve", "-", _yes(serve["ready"]), Text("\n".join(serve["missing"]) or "nothing"))
    return Group(Text("\n".join(lines)), table)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
