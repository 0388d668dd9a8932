"""Runs a plan with Triton itself on torch tensors: the CPU interpreter of the tests, or a GPU in benchmarks.

The interpreter is on when TRITON_INTERPRET=1 stood in the environment before Triton was first imported.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clover.plugins.kernels.plan import Buffer, Kernel, Plan

if TYPE_CHECKING:
    import torch


def run(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs every launch of `plan` in order; `tensors` holds the inputs and the outputs, which are written in place.

    Workspace buffers are filled with NaN (or the largest integer) beforehand, so that a read of something never
    written shows. Returns the buffers, for tests that look at intermediate results.
    """
    device = next(iter(tensors.values())).device
    buffers = {b.name: _poisoned(b, device) for b in plan.buffers}
    run_on(plan, {**tensors, **buffers})
    return buffers


def run_on(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Runs every launch of `plan`; `tensors` holds the workspace buffers too. Nothing is allocated."""
    for launch in plan.launches:
        arguments = [tensors[a] if isinstance(a, str) else a for a in launch.arguments]
        kernel = launch.kernel
        triton_function(kernel)[launch.grid](
            *arguments, **triton_constants(kernel), num_warps=kernel.num_warps, num_stages=kernel.num_stages
        )


@functools.cache
def triton_function(kernel: Kernel) -> Any:
    """The Triton function a kernel is compiled from."""
    return getattr(importlib.import_module(kernel.module), kernel.function)


def triton_constants(kernel: Kernel) -> dict[str, Any]:
    """The kernel's constants as Triton takes them, element types included."""
    import triton.language as tl

    return {
        name: getattr(tl, value.removeprefix("tl.")) if isinstance(value, str) and value.startswith("tl.") else value
        for name, value in kernel.constants
    }


def _poisoned(buffer: Buffer, device: torch.device) -> torch.Tensor:
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "i32": torch.int32}
    dtype = dtypes[buffer.dtype]
    poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full(buffer.shape, poison, dtype=dtype, device=device)
