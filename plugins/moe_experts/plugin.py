"""MoEExperts as a TensorRT plugin. Its weights are not in the engine: `expert_table` holds their addresses.

Beside the op's output it gives out `counts` [E], how many rows chose each expert, which the kernels need anyway: it
tells the runtime which experts are worth a place on the card.
"""

from __future__ import annotations

from dataclasses import replace

from clover.plugins.kernels.plan import Kernel, Plan
from clover.plugins.moe_experts.kernel_launch import ExpertShapes, kernels, plan
from clover.plugins.moe_experts.spec import SPEC, ExpertsAttributes
from clover.plugins.tensorrt_plugin import PluginOp, Shapes

TILES = (32, 64)  # rows of a product's tile: which one runs depends on the rows of the step


def _shapes(attributes: ExpertsAttributes, shapes: Shapes) -> ExpertShapes:
    hidden, logits = shapes[0], shapes[1]
    return ExpertShapes(attributes, hidden[1], logits[1], weight="u8" if attributes.group_size else "bf16")


def _plan(attributes: ExpertsAttributes, shapes: Shapes) -> Plan:
    whole = plan(_shapes(attributes, shapes), rows=shapes[0][0])
    return replace(whole, buffers=tuple(b for b in whole.buffers if b.name != "counts"))


def _kernels(attributes: ExpertsAttributes, shapes: Shapes) -> tuple[Kernel, ...]:
    sizes = _shapes(attributes, shapes)
    return tuple(dict.fromkeys(k for tile in TILES for k in kernels(sizes, tile_rows=tile).all))


PLUGIN = PluginOp(
    spec=SPEC,
    inputs=(("hidden", "BF16"), ("router_logits", "FLOAT"), ("expert_table", "INT64")),
    outputs=(("mixed", "BF16"), ("counts", "INT32")),
    output_shapes=lambda attributes, given: (given[0], (given[2][1],)),
    plan=_plan,
    kernels=_kernels,
)
