"""Memory and speed of a model on a target, before anything is built."""

from __future__ import annotations

from clover.engines.planner.command import plan_command
from clover.engines.planner.full_size import FULL_SIZE
from clover.engines.planner.parameters import count_parameters, parameter_class
from clover.engines.planner.plan import Plan, plan
from clover.engines.planner.routing import RoutingAssumptions

__all__ = ["FULL_SIZE", "Plan", "RoutingAssumptions", "count_parameters", "parameter_class", "plan", "plan_command"]
