"""Runs plans in Triton's CPU interpreter, in a process of its own.

Triton decides at import whether it interprets or compiles, so the interpreter can't share a process with code that
compiles kernels. It checks numbers, not speed: a program takes milliseconds. Its tl.dot is wrong for bfloat16
operands, so plans that multiply in bfloat16 are refused here (`ExpertShapes(multiply="fp32")` makes one that runs).
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from clover.plugins.kernels.plan import Dtype, Plan

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Output:
    """A tensor to hand back. `in_place_of` names the input whose memory it shares; otherwise it starts as NaN."""

    dtype: Dtype
    shape: tuple[int, ...]
    in_place_of: str | None = None


@dataclass(frozen=True)
class Request:
    plan: Plan
    inputs: Mapping[str, tuple[Dtype, Array]]
    outputs: Mapping[str, Output]
    tables: Mapping[str, Sequence[str | None]]


class Interpreter:
    """A child process that interprets plans. Use `shared_interpreter()`: starting one takes seconds."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "clover.plugins.kernels.interpreter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TRITON_INTERPRET": "1"},
        )

    def run(
        self,
        plan: Plan,
        inputs: Mapping[str, tuple[Dtype, Array]],
        outputs: Mapping[str, Output],
        tables: Mapping[str, Sequence[str | None]] | None = None,
    ) -> dict[str, Array]:
        """Runs `plan` and returns its outputs and workspace buffers, bfloat16 and float16 widened to float32.

        inputs: element type on the device and values. tables: address tables to build, e.g.
        {"expert_table": ("gate_up", "gate_up_scales", "down", "down_scales")}: row r, column e is the address of
        entry e of the r-th named input, each entry in memory of its own (a row of zeros for None).
        RuntimeError with the child's message when a kernel fails.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump(Request(plan, inputs, outputs, tables or {}), self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        result: dict[str, Array] = answer
        return result

    def close(self) -> None:
        """Ends the child process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._process.stdout.close()


@functools.cache
def shared_interpreter() -> Interpreter:
    """The process's one interpreter, ended with it."""
    interpreter = Interpreter()
    atexit.register(interpreter.close)
    return interpreter


def _answer(request: Request) -> dict[str, Array]:
    import torch

    from clover.plugins.kernels.triton_run import run

    for launch in request.plan.launches:
        if dict(launch.kernel.constants).get("DOT") == "tl.bfloat16":
            raise ValueError("Triton's interpreter multiplies bfloat16 wrongly; plan with multiply='fp32'")
    types = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "i32": torch.int32,
        "i64": torch.int64,
        "u8": torch.uint8,
    }
    tensors: dict[str, Any] = {
        name: torch.from_numpy(np.array(values)).to(types[dtype]) for name, (dtype, values) in request.inputs.items()
    }
    parts = []  # keeps every entry of the tables alive
    for table, names in request.tables.items():
        entries = [None if name is None else [entry.clone() for entry in tensors[name]] for name in names]
        parts.append(entries)
        width = max(len(entry) for entry in entries if entry is not None)
        tensors[table] = torch.tensor(
            [[0] * width if entry is None else [e.data_ptr() for e in entry] for entry in entries], dtype=torch.int64
        )
    for name, output in request.outputs.items():
        tensors[name] = (
            tensors[output.in_place_of]
            if output.in_place_of
            else torch.full(output.shape, float("nan"), dtype=types[output.dtype])
        )
    buffers = run(request.plan, tensors)
    shown = {**{name: tensors[name] for name in request.outputs}, **buffers}
    return {name: (t.float() if t.dtype in (torch.bfloat16, torch.float16) else t).numpy() for name, t in shown.items()}


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: Any = _answer(request)
        except Exception as error:  # whatever a kernel does wrong belongs to the caller
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything printed must not mix with the answers
    from clover.plugins.kernels import interpreter

    interpreter._serve(sys.stdin.buffer, _answers)
