"""benchmarks/kernels.py: the script's own checks, in the interpreter and without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "kernels.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_a_gpu_one_sentence_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = run()
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout == "The kernels were not run: torch sees no CUDA device here.\n"


def test_every_operator_is_checked_in_the_interpreter() -> None:
    result = run("--json", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stderr
    cases = json.loads(result.stdout)["cases"]
    assert [case["name"].split()[0].strip(",") for case in cases] == ["gdn", "routing", "experts"]
    assert all(0 <= case["error"] < 1e-2 and case["microseconds"] is None for case in cases)
