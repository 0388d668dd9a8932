"""MoEExperts lowered to ONNX Runtime's MoE (float32) and QMoE (INT4, INT8) operators."""

from __future__ import annotations

from clover.exporter.config import ModelConfig
from clover.exporter.graph.builder import CONTRIB, GraphBuilder
from clover.exporter.precision import BITS, PrecisionPlan


def lower_experts(
    b: GraphBuilder,
    c: ModelConfig,
    precision: PrecisionPlan,
    layer: int,
    hidden: str,
    routing: str,
    accuracy_level: int,
) -> str:
    """hidden [N, H], routing [N, E] logits (-1e30: not used) -> [N, H].

    The operator's own softmax over the top-k logits is the renormalised router weight.
    """
    g = f"layers.{layer}.experts."
    # alpha 1, beta 0: the fused SwiGLU is plain SiLU(gate) * up on interleaved rows
    common = {
        "k": c.num_experts_per_tok,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
        "normalize_routing_weights": 1,
    }
    kind = precision["experts"]
    if kind in ("fp32", "bf16"):
        gate_up, down = b.weight(f"{g}gate_up.weight"), b.weight(f"{g}down.weight")
        if kind == "bf16":
            gate_up, down = b.to_float(gate_up), b.to_float(down)
        return b.op("MoE", hidden, routing, gate_up, "", down, domain=CONTRIB, **common)
    zero_points = [b.weight(name) for part in ("gate_up", "down") if (name := f"{g}{part}.zero_points") in b.weights]
    absent = [""] * 4 if zero_points else []  # the second bias, and a third matrix with its scales and bias
    return b.op(
        "QMoE", hidden, routing,
        b.weight(f"{g}gate_up.qweight"), b.weight(f"{g}gate_up.scales"), "",
        b.weight(f"{g}down.qweight"), b.weight(f"{g}down.scales"), *absent, *zero_points,
        domain=CONTRIB, expert_weight_bits=BITS[kind], block_size=precision.group_size,
        accuracy_level=accuracy_level, **common,
    )  # fmt: skip
