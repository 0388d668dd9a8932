"""BidirectionalGatedDeltaNet as a TensorRT plugin. Both states are updated in place."""

from __future__ import annotations

from clover.plugins.bidirectional_gdn.kernel_launch import kernels, plan
from clover.plugins.bidirectional_gdn.spec import SPEC, GatedDeltaNetAttributes
from clover.plugins.kernels.plan import Kernel, Plan
from clover.plugins.tensorrt_plugin import PluginOp, Shapes


def _plan(attributes: GatedDeltaNetAttributes, shapes: Shapes) -> Plan:
    sequences, rows, _ = shapes[SPEC.input_index("qkv")]
    return plan(attributes, sequences=sequences, rows=rows, taps=_taps(shapes))


def _kernels(attributes: GatedDeltaNetAttributes, shapes: Shapes) -> tuple[Kernel, ...]:
    return kernels(attributes, taps=_taps(shapes))


def _taps(shapes: Shapes) -> int:
    return shapes[SPEC.input_index("conv_weight")][1]


PLUGIN = PluginOp(
    spec=SPEC,
    inputs=(
        *((name, "BF16") for name in ("qkv", "a", "b", "conv_state")),
        ("recurrent_state", "FLOAT"),
        *((name, "BF16") for name in ("conv_weight", "conv_right")),
        *((name, "FLOAT") for name in ("decay_scale", "dt_bias", "logit_scale", "history_bias", "history_c")),
        *((name, "INT64") for name in ("commit_length", "row_length")),
    ),
    outputs=(("o", "BF16"), ("new_conv_state", "BF16"), ("new_recurrent_state", "FLOAT")),
    output_shapes=lambda attributes, given: ((*given[0][:2], attributes.value_width), given[3], given[4]),
    aliased={"new_conv_state": "conv_state", "new_recurrent_state": "recurrent_state"},
    plan=_plan,
    kernels=_kernels,
)
