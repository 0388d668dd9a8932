"""Tiny random checkpoints and the independent float64 oracle, for any test module (`import oracle_support`)."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

Layout = Literal["fused", "per_expert"]
Prefix = Literal["model", "language_model"]

_built: dict[str, Path] = {}


@functools.cache
def oracle_module(name: Literal["oracle", "make_checkpoint"]) -> ModuleType:
    """tests/oracle/`name`.py, loaded from its file. `make_checkpoint` imports torch and transformers."""
    spec = importlib.util.spec_from_file_location(f"clover_{name}", Path(__file__).parent / "oracle" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def load_oracle(directory: Path) -> Any:
    """A fresh Oracle of the checkpoint: a test may change its tensors (`.t`) freely."""
    return oracle_module("oracle").Oracle.load(directory)


def tiny_checkpoint(
    seed: int = 0,
    layout: Layout = "fused",
    prefix: Prefix = "model",
    config: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """The directory of a tiny random checkpoint, made once per test run; treat it as read-only.

    overrides are fields of the text config (`num_experts=…`) or `shards`, `dtype`; `config` are fields written
    over the finished config.json (`{"moe_block_coreset": {"enabled": False}}`).
    """
    key = json.dumps([seed, layout, prefix, config, overrides], sort_keys=True, default=str)
    if key not in _built:
        directory = _root() / f"checkpoint-{len(_built)}"
        oracle_module("make_checkpoint").build(directory, layout=layout, prefix=prefix, seed=seed, **overrides)
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | (config or {}), indent=2))
        _built[key] = directory
    return _built[key]


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="clover-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root
