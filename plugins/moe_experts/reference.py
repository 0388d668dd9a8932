"""MoEExperts in NumPy, expert by expert: only the experts some row chose are unpacked."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from clover.plugins.moe_experts.spec import INT4_ZERO_POINT, ExpertsAttributes
from clover.plugins.numerics import FloatArray, silu, softmax, top_indices

WeightArray = npt.NDArray[Any]  # uint8 (INT4 pairs), or a float type, bfloat16 included


def moe_experts(
    hidden: FloatArray,  # [N, H]
    router_logits: FloatArray,  # [N, E]
    gate_up: WeightArray,  # [E, 2I, H/2] uint8, or float [E, 2I, H], or the latter as pairs [E, I, 2, H]
    gate_up_scales: WeightArray | None,  # [E, 2I, H/G]
    down: WeightArray,  # [E, H, I/2] uint8, or float [E, H, I]
    down_scales: WeightArray | None,  # [E, H, I/G]
    *,
    attributes: ExpertsAttributes,
) -> FloatArray:
    """Returns mixed [N, H], in hidden's dtype. Raises ValueError when INT4 weights come without scales."""
    ids, weights = route(router_logits, attributes.top_k)  # [N, top_k] ×2
    mixed = np.zeros_like(hidden)
    for e in np.unique(ids):
        rows, slots = np.nonzero(ids == e)
        x = hidden[rows]  # [r, H]
        pairs = _expert(gate_up, gate_up_scales, e, attributes.group_size, hidden.dtype)
        pairs = pairs.reshape(attributes.intermediate, 2, -1)  # [I, 2, H]
        inner = silu(x @ pairs[:, 0].T) * (x @ pairs[:, 1].T)  # [r, I]
        y = inner @ _expert(down, down_scales, e, attributes.group_size, hidden.dtype).T  # [r, H]
        mixed[rows] += weights[rows, slots, None].astype(hidden.dtype) * y
    return mixed


def route(router_logits: FloatArray, top_k: int) -> tuple[npt.NDArray[np.intp], FloatArray]:
    """Each row's experts and their weights: router_logits [..., E] -> ids, weights [..., top_k], best first.

    Weights are softmax probabilities renormalised to sum to 1; ties go to the lower index.
    """
    probabilities = softmax(router_logits)
    ids = top_indices(probabilities, top_k)
    weights = np.take_along_axis(probabilities, ids, axis=-1)
    return ids, weights / weights.sum(axis=-1, keepdims=True)


def pair_rows(gate_up: WeightArray) -> WeightArray:
    """A checkpoint's gate_up [E, 2I, H] (gate rows first) as this op's pairs [E, I, 2, H], without a copy."""
    experts, rows, width = gate_up.shape
    return gate_up.reshape(experts, 2, rows // 2, width).swapaxes(1, 2)


def dequantize_int4(packed: WeightArray, scales: WeightArray, group_size: int, dtype: npt.DTypeLike) -> FloatArray:
    """packed uint8 [R, C/2] (low nibble first), scales [R, C/G] -> [R, C] = (nibble - 8) · scale."""
    nibbles = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(len(packed), -1)  # [R, C]
    values: FloatArray = nibbles.astype(dtype) - INT4_ZERO_POINT
    values *= np.repeat(scales.astype(dtype), group_size, axis=-1)
    return values


def _expert(
    weight: WeightArray, scales: WeightArray | None, expert: int, group_size: int, dtype: npt.DTypeLike
) -> FloatArray:
    if weight.dtype != np.uint8:
        values: FloatArray = weight[expert].astype(dtype, copy=False)
        return values
    if scales is None:
        raise ValueError("INT4 expert weights need their scales")
    return dequantize_int4(weight[expert], scales[expert], group_size, dtype)
