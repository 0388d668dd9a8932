"""MoECoresetRouting as a TensorRT plugin."""

from __future__ import annotations

from clover.plugins.kernels.plan import Kernel, Plan
from clover.plugins.moe_coreset_routing.kernel_launch import kernel, plan
from clover.plugins.moe_coreset_routing.spec import SPEC, CoresetAttributes
from clover.plugins.tensorrt_plugin import PluginOp, Shapes


def _plan(attributes: CoresetAttributes, shapes: Shapes) -> Plan:
    sequences, rows, experts = shapes[0]
    return plan(attributes, sequences=sequences, rows=rows, experts=experts)


def _kernels(attributes: CoresetAttributes, shapes: Shapes) -> tuple[Kernel, ...]:
    return (kernel(attributes, experts=shapes[0][2]),)


PLUGIN = PluginOp(
    spec=SPEC,
    inputs=(("logits", "FLOAT"), ("commit_length", "INT64"), ("row_length", "INT64"), ("top_p", "FLOAT")),
    outputs=(("routed_logits", "FLOAT"),),
    output_shapes=lambda attributes, given: (given[0],),
    plan=_plan,
    kernels=_kernels,
)
