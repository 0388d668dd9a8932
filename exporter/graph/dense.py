"""Dense layers, norms and embeddings in ONNX Runtime's operators, at the precision of their tensor class."""

from __future__ import annotations

from dataclasses import dataclass

from clover.exporter.graph.builder import CONTRIB, GraphBuilder
from clover.exporter.precision import BITS, PrecisionPlan, TensorClass

# INT4 weights times 8-bit activations: 1.2 % RMS error against float32 activations, several times as fast
FAST_ACCURACY = 4
EXACT_ACCURACY = 1


@dataclass(frozen=True)
class Dense:
    """Authors dense layers of one model. `accuracy_level` 4 multiplies INT4 by 8-bit activations, 1 by float32."""

    builder: GraphBuilder
    precision: PrecisionPlan
    accuracy_level: int

    def linear(self, x: str, name: str, kind: TensorClass | None, bias: str = "", *, exact: bool = False) -> str:
        """x [N, K] times the stored rows [M, K] -> [N, M]. `exact`: float32 activations whatever the level."""
        b = self.builder
        precision = self.precision[kind] if kind else "fp32"
        if precision in ("fp32", "bf16"):
            weight = b.weight(f"{name}.weight")
            if precision == "bf16":
                weight = b.to_float(weight)
            return b.op("Gemm", x, weight, *([bias] if bias else []), transB=1)
        rows, groups, _ = b.weights[f"{name}.qweight"].shape
        group = self.precision.group_size
        inputs = [x, b.weight(f"{name}.qweight"), b.weight(f"{name}.scales")]
        if bias or f"{name}.zero_points" in b.weights:
            inputs += [b.optional_weight(f"{name}.zero_points"), "", bias]
        return b.op(
            "MatMulNBits", *inputs, domain=CONTRIB, N=rows, K=groups * group, bits=BITS[precision], block_size=group,
            accuracy_level=EXACT_ACCURACY if exact else self.accuracy_level,
        )  # fmt: skip

    def embed(self, token_ids: str) -> str:
        """token_ids [S, T] -> [S, T, H]."""
        b = self.builder
        precision = self.precision["embed"]
        if precision in ("fp32", "bf16"):
            rows = b.op("Gather", b.weight("embed.weight"), token_ids)
            return b.to_float(rows) if precision == "bf16" else rows
        inputs = [b.weight("embed.qweight"), token_ids, b.weight("embed.scales")]
        if "embed.zero_points" in b.weights:
            inputs.append(b.weight("embed.zero_points"))
        return b.op(
            "GatherBlockQuantized", *inputs, domain=CONTRIB, bits=BITS[precision], block_size=self.precision.group_size, gather_axis=0, quantize_axis=1,
        )  # fmt: skip

    def rms_norm(self, x: str, name: str, epsilon: float) -> str:
        """x / sqrt(mean x² + eps) times the stored factor (1 + w), over the last axis."""
        b = self.builder
        return b.op("SimplifiedLayerNormalization", x, b.weight(f"{name}.weight"), epsilon=epsilon, axis=-1)
