"""A compiled kernel as it is stored in a bundle: the image in one file, everything needed to launch it in JSON."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clover.plugins.kernels.plan import Kernel
from clover.runtime.errors import BundleError, CloverError

WARP = 32  # threads

# Dynamic shared memory one block may ask for, bytes (CUDA programming guide, technical specifications).
SHARED_MEMORY_LIMIT: Mapping[int, int] = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    103: 227 * 1024,
    120: 99 * 1024,
    121: 99 * 1024,
}


def source_digest(module: str) -> str:
    """sha256 of an operator's `kernel.py` (the module of that name) and the `kernel_launch.py` beside it.

    The two agree on grids and arguments, so that a launch is right only for kernels compiled from the same two. Raises
    CloverError when they are not installed.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise CloverError(f"kernel module {module} is missing; reinstall clover")
    kernel = Path(spec.origin)
    try:  # as text, since line ends may differ between systems
        texts = [p.read_text(encoding="utf-8") for p in (kernel, kernel.with_name("kernel_launch.py"))]
    except OSError as error:
        raise CloverError(f"{error.filename} can't be read ({error.strerror}); reinstall clover") from None
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


@dataclass(frozen=True)
class Cubin:
    """One kernel compiled for one GPU architecture.

    sm: compute capability times ten. target: what the assembler was told, e.g. "sm_120a"; an "a" target runs on exactly
    that capability, others also on later minors of the same major. entry: the function's name in the image.
    hidden_parameters: 64-bit parameters that Triton adds after the kernel's own (scratch pointers); pass 0 for each.
    registers per thread; spill bytes per thread as the assembler reports them. source: `source_digest` of the kernel's
    module when it was compiled.
    """

    kernel: Kernel
    sm: int
    target: str
    entry: str
    image: bytes
    shared_bytes: int
    hidden_parameters: int
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    triton: str
    assembler: str
    source: str

    @property
    def name(self) -> str:
        """File stem: unique per kernel and architecture."""
        return f"{self.kernel.name}-sm{self.sm}"

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return self.kernel.num_warps * WARP

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.image).hexdigest()

    def runs_on(self, major: int, minor: int) -> bool:
        """Whether a device of compute capability major.minor accepts the image."""
        if self.target.endswith("a"):
            return self.sm == 10 * major + minor
        return self.sm // 10 == major and self.sm % 10 <= minor

    def to_json(self) -> dict[str, Any]:
        """Everything but the image, whose hash stands for it."""
        return {
            "kernel": self.kernel.to_json(),
            "sm": self.sm,
            "target": self.target,
            "entry": self.entry,
            "sha256": self.sha256,
            "shared_bytes": self.shared_bytes,
            "hidden_parameters": self.hidden_parameters,
            "registers": self.registers,
            "spill_store_bytes": self.spill_store_bytes,
            "spill_load_bytes": self.spill_load_bytes,
            "triton": self.triton,
            "assembler": self.assembler,
            "source": self.source,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], image: bytes) -> Cubin:
        """The inverse of `to_json`. BundleError when fields are missing or the image is not the described one."""
        try:
            fields = {**data, "kernel": Kernel.from_json(data["kernel"]), "image": image}
            expected = fields.pop("sha256")
            cubin = cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(
                f"a kernel's description is incomplete or misspelt ({error}); build the bundle again"
            ) from error
        if cubin.sha256 != expected:
            raise BundleError(f"kernel {cubin.name} does not match its recorded hash; copy or build the bundle again")
        return cubin

    def write(self, directory: Path) -> tuple[Path, Path]:
        """Writes NAME.cubin and NAME.json, each complete or not at all, the description last. Returns their paths."""
        directory.mkdir(parents=True, exist_ok=True)
        image, description = directory / f"{self.name}.cubin", directory / f"{self.name}.json"
        _replace(image, self.image)
        _replace(description, (json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n").encode())
        return image, description

    @classmethod
    def read(cls, description: Path) -> Cubin:
        """Reads NAME.json and the NAME.cubin beside it. BundleError when either is missing or damaged."""
        try:
            data = json.loads(description.read_text())
            image = description.with_suffix(".cubin").read_bytes()
        except (OSError, ValueError) as error:
            raise BundleError(
                f"kernel {description.stem} can't be read ({error}); copy or build the bundle again"
            ) from error
        return cls.from_json(data, image)


def _replace(path: Path, content: bytes) -> None:
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_bytes(content)
    half.replace(path)
