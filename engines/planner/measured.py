"""The roofline of steps that were really run: their rows, context and experts, on this machine or on a card."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from clover.engines.gpus import Backend, Gpu
from clover.engines.planner.memory import weights_of
from clover.engines.planner.parameters import count_parameters
from clover.engines.planner.plan import plan
from clover.engines.planner.roofline import Machine, step_cost
from clover.engines.planner.routing import RoutingAssumptions
from clover.exporter.config import ModelConfig
from clover.exporter.precision import PrecisionPlan


@dataclass(frozen=True)
class MeasuredStep:
    """One run of the step graph for one sequence.

    context: tokens committed before it. distinct: experts that its rows touched in a layer, mean over the layers.
    """

    commit: int
    preview: int
    logit_rows: int
    context: int
    distinct: float


def machine_on(
    config: ModelConfig,
    precision: PrecisionPlan,
    gpu: Gpu,
    *,
    backend: Backend | None = None,
    max_context: int | None = None,
    resident_experts: int | None = None,
) -> Machine:
    """The model placed on a target for one sequence; on the CPU it is taken to fit. Raises CloverError when it can't fit
    a card."""
    counts = count_parameters(config)
    if gpu.is_cpu or backend == "onnxruntime":
        weights = weights_of(config, precision, "onnxruntime")
        return Machine(config, counts, weights, gpu, "onnxruntime", 0, 1, counts.experts, RoutingAssumptions())
    placed = plan(config, gpu, precision, backend=backend, max_context=max_context, resident_experts=resident_experts)
    resident = placed.require_fit().placement.experts_resident
    return Machine(config, counts, placed.weights, gpu, placed.backend, 0, 1, resident, RoutingAssumptions())


def floor_seconds(machine: Machine, steps: Iterable[MeasuredStep]) -> float:
    """The least time that the steps can take, one after another."""
    return sum(
        step_cost(
            replace(machine, context=s.context), "measured", s.commit, s.preview, s.logit_rows, s.distinct, s.preview
        ).seconds
        for s in steps
    )
