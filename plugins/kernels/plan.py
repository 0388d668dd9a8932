"""Descriptions of kernels and of their launches: plain data, no Triton, no torch.

Each operator's `kernel_launch.py` turns shapes into a `Plan`. The same plan is executed by Triton on torch tensors
(`triton_run.py`: interpreter and benchmarks), compiled to cubins (`compile.py`) and launched with raw pointers
(`launch.py`), so an argument order or a grid rule is written down once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Dtype = Literal["bf16", "fp16", "fp32", "i32", "i64", "u8"]
Constant = int | float | str | bool

DTYPE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "i32": 4, "i64": 8, "u8": 1}
ALIGNMENT = 256  # bytes; what cudaMalloc and TensorRT give, and far more than the 16 that vector loads need


@dataclass(frozen=True)
class Kernel:
    """One specialised kernel: a Triton function, the types of its run-time arguments, and its compile-time constants.

    `signature` lists the run-time arguments in order: `("qkv", "*bf16")` is a pointer, `("rows", "i32")` a number. A constant spelt `tl.bfloat16` (and so on) is that Triton element type.
    """

    module: str  # where the Triton function lives, e.g. "clover.plugins.moe_experts.kernel"
    function: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        """A short unique name, safe as a file name: the function and a digest of everything that specialises it."""
        digest = hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
        return f"{self.function}-{digest[:12]}"

    def to_json(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "function": self.function,
            "signature": [list(pair) for pair in self.signature],
            "constants": [list(pair) for pair in self.constants],
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Kernel:
        """The inverse of `to_json`; KeyError or TypeError on anything else."""
        return cls(
            module=data["module"],
            function=data["function"],
            signature=tuple((name, kind) for name, kind in data["signature"]),
            constants=tuple((name, value) for name, value in data["constants"]),
            num_warps=data["num_warps"],
            num_stages=data["num_stages"],
        )


@dataclass(frozen=True)
class Buffer:
    """A tensor that lives in the workspace between the launches of one plan."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the workspace, a multiple of ALIGNMENT

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Launch:
    """One kernel launch. Arguments follow the kernel's signature: a tensor's or buffer's name, or a number."""

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: tuple[str | int | float, ...]

    def __post_init__(self) -> None:
        if len(self.arguments) != len(self.kernel.signature):
            raise ValueError(f"{self.kernel.function}: {len(self.arguments)} arguments for {self.kernel.signature}")
        for (name, kind), argument in zip(self.kernel.signature, self.arguments, strict=True):
            if isinstance(argument, str) != kind.startswith("*"):
                raise ValueError(f"{self.kernel.function}: {argument!r} is no argument for {name}, {kind}")


@dataclass(frozen=True)
class Plan:
    """The launches of one operator for one set of shapes, in stream order, and the workspace they need."""

    launches: tuple[Launch, ...]
    buffers: tuple[Buffer, ...]

    @property
    def workspace_bytes(self) -> int:
        return max((b.offset + _aligned(b.nbytes) for b in self.buffers), default=0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def lay_out(buffers: Iterable[tuple[str, Dtype, tuple[int, ...]]]) -> tuple[Buffer, ...]:
    """Places buffers one after another, each aligned."""
    placed: list[Buffer] = []
    offset = 0
    for name, dtype, shape in buffers:
        placed.append(Buffer(name, dtype, shape, offset))
        offset += _aligned(placed[-1].nbytes)
    return tuple(placed)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
