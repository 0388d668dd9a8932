"""`clover plan`: options as the user writes them, to JSON data and something to print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover.engines.gpus import parse_size, resolve_gpu
from clover.engines.planner.full_size import FULL_SIZE
from clover.engines.planner.plan import DEFAULT_HOST_MEMORY, DEFAULT_PREFILL_CHUNK, plan
from clover.engines.planner.routing import RoutingAssumptions
from clover.exporter.config import ModelConfig
from clover.exporter.precision import Precision, TensorClass, plan_precision
from clover.exporter.source import resolve_source

if TYPE_CHECKING:
    from rich.console import RenderableType


def plan_command(
    checkpoint: str | Path | None = None,
    *,
    gpu: str | None = None,
    sm: str | int | None = None,
    memory: str | int | None = None,
    precision: Precision = "int4",
    overrides: Mapping[TensorClass, Precision] | None = None,
    group_size: int | None = None,
    max_context: int | None = None,
    sequences: int = 1,
    block_sizes: Sequence[int] = (),
    backend: str | None = None,
    host_memory: str | int | None = None,
    resident_experts: int | None = None,
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
    block_skew: float = 1.0,
    popularity_skew: float = 0.0,
    distinct: float | None = None,
    hit_rate: float | None = None,
) -> tuple[dict[str, Any], RenderableType]:
    """The plan of a checkpoint as JSON data and a renderable. None: the published full-size model; of org/name no weights
    are downloaded.

    `host_memory` None means the RAM of this machine when the target is this machine (`cpu`, `auto`), else 32 GiB.
    Raises CloverError for wrong options; a model that does not fit is reported in data["fits"] and data["problem"].
    """
    from clover.engines.planner.render import render_plan

    target = resolve_gpu(gpu, sm, memory)
    config = FULL_SIZE if checkpoint is None else ModelConfig.load(resolve_source(checkpoint, fetch="config"))
    if host_memory is not None:
        ram = parse_size(host_memory, "--host-memory")
    else:
        ram = DEFAULT_HOST_MEMORY
        if target.is_cpu or (gpu or "").strip().lower() == "auto":
            from clover.engines.gpu_driver import installed_memory

            ram = installed_memory() or ram
    result = plan(
        config,
        target,
        plan_precision(config, precision, overrides, group_size),
        max_context=max_context,
        sequences=sequences,
        block_sizes=block_sizes,
        backend=backend,
        routing=RoutingAssumptions(block_skew, popularity_skew, distinct, hit_rate),
        resident_experts=resident_experts,
        host_memory=ram,
        prefill_chunk=prefill_chunk,
    )
    return result.to_json(), render_plan(result)
