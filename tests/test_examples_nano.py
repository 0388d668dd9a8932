"""The nano model through the whole runtime: it answers held-out prompts, and INT4 answers as well as float32."""

from __future__ import annotations

import importlib.util
import sys
from functools import lru_cache
from types import ModuleType

import pytest
from engine_support import NANO, REPOSITORY, bundle

from clover.runtime.clover import Clover

COUNT = 200


@lru_cache
def quality() -> ModuleType:
    """benchmarks/quality.py, which scores answers."""
    spec = importlib.util.spec_from_file_location("quality", REPOSITORY / "benchmarks" / "quality.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quality"] = module
    spec.loader.exec_module(module)
    return module


@lru_cache
def exact(precision: str, task: str, mode: str = "fill") -> float:
    """Share of exact answers on held-out prompts."""
    with Clover.load(bundle(NANO, precision=precision).directory, threads=1, max_context=1024) as engine:
        return float(quality().score(engine, task, COUNT, mode=mode).share)


def test_threshold_fill_answers_nine_dispatch_messages_in_ten() -> None:
    assert exact("fp32", "dispatch") >= 0.9


@pytest.mark.parametrize("task", ["dispatch", "tool", "decide"])
def test_int4_loses_at_most_two_points(task: str) -> None:
    assert exact("int4", task) >= exact("fp32", task) - 0.02


def test_held_out_prompts_are_not_the_training_stream() -> None:
    prompts = {prompt for task in ("dispatch", "tool", "decide") for prompt, _ in quality().held_out(task, COUNT)}
    import random

    import data  # put on the path by benchmarks/quality.py

    stream = random.Random(1)  # the trainer's default seed
    seen = {data.sample(stream)[1] for _ in range(20_000)}
    shared = prompts & seen
    assert len(shared) / len(prompts) < 0.2, "single short orders repeat by chance; whole messages don't"
