"""The GPU kernels of MoEExperts in Triton's interpreter, against the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover.plugins.kernels.interpreter import Output, shared_interpreter
from clover.plugins.kernels.plan import Dtype
from clover.plugins.moe_coreset_routing.spec import EXCLUDED_LOGIT
from clover.plugins.moe_experts.kernel_launch import ExpertShapes, plan
from clover.plugins.moe_experts.reference import moe_experts
from clover.plugins.moe_experts.spec import ExpertsAttributes
from clover.runtime.errors import CloverError

Array = npt.NDArray[Any]
TOLERANCE = {"fp32": 2e-5, "fp16": 1e-3, "bf16": 1e-2}


@dataclass(frozen=True)
class Case:
    shapes: ExpertShapes
    hidden: Array
    logits: Array
    gate_up: Array
    gate_up_scales: Array | None
    down: Array
    down_scales: Array | None


def rounded(x: Array, kind: Dtype) -> Array:
    import torch

    types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return torch.from_numpy(x.astype(np.float32)).to(types[kind]).float().numpy()


def case(
    rows: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    group: int,
    activation: Dtype = "fp32",
    seed: int = 0,
) -> Case:
    rng = np.random.default_rng(seed)

    def matrix(n: int, k: int) -> tuple[Array, Array | None]:
        if not group:
            return rounded(rng.standard_normal((experts, n, k)) * 0.1, activation), None
        packed = rng.integers(0, 256, (experts, n, k // 2), dtype=np.uint8)
        scales = rng.random((experts, n, k // group)) * 0.02 + 0.001
        return packed, rounded(
            np.copysign(scales, rng.random(scales.shape) - 0.5), activation
        )  # builds store both signs

    gate_up, gate_up_scales = matrix(2 * intermediate, hidden)
    down, down_scales = matrix(hidden, intermediate)
    return Case(
        ExpertShapes(
            ExpertsAttributes(top_k, intermediate, group),
            hidden,
            experts,
            activation=activation,
            weight="u8" if group else activation,
            scale=activation,
            multiply="fp32" if activation == "bf16" else None,
        ),
        rounded(rng.standard_normal((rows, hidden)), activation),
        (2 * rng.standard_normal((rows, experts))).astype(np.float32),
        gate_up,
        gate_up_scales,
        down,
        down_scales,
    )


def run(c: Case) -> dict[str, Array]:
    s = c.shapes
    weights = {"gate_up": (s.weight, c.gate_up), "down": (s.weight, c.down)}
    if c.gate_up_scales is not None and c.down_scales is not None:
        weights |= {"gate_up_scales": (s.scale, c.gate_up_scales), "down_scales": (s.scale, c.down_scales)}
        table: tuple[str | None, ...] = ("gate_up", "gate_up_scales", "down", "down_scales")
    else:
        table = ("gate_up", None, "down", None)
    return shared_interpreter().run(
        plan(s, rows=len(c.hidden)),
        {"hidden": (s.activation, c.hidden), "router_logits": ("fp32", c.logits), **weights},
        {"mixed": Output(s.activation, c.hidden.shape)},
        {"expert_table": table},
    )


def check(c: Case) -> dict[str, Array]:
    def wide(x: Array) -> Array:
        return x.astype(np.float64) if x.dtype == np.float32 else x

    got = run(c)
    want = moe_experts(
        c.hidden.astype(np.float64),
        c.logits.astype(np.float64),
        wide(c.gate_up),
        None if c.gate_up_scales is None else wide(c.gate_up_scales),
        wide(c.down),
        None if c.down_scales is None else wide(c.down_scales),
        attributes=c.shapes.attributes,
    )
    assert np.isfinite(got["mixed"]).all()
    error = np.linalg.norm(got["mixed"] - want) / np.linalg.norm(want)
    assert error <= TOLERANCE[c.shapes.activation], error
    return got


@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 70),
    group=st.sampled_from([0, 32, 64, 128]),
    experts=st.sampled_from([4, 9, 16]),
    top_k=st.integers(1, 4),
    activation=st.sampled_from(["fp32", "fp16"]),
    seed=st.integers(0, 99),
)
def test_matches_the_reference(rows: int, group: int, experts: int, top_k: int, activation: Dtype, seed: int) -> None:
    check(case(rows, 128, 128 if group == 128 else 64, experts, top_k, group, activation, seed))


@pytest.mark.parametrize("group", [0, 64])
def test_bfloat16(group: int) -> None:
    check(case(20, 128, 64, 4, 2, group, "bf16"))


def test_256_experts_top_8() -> None:
    got = check(case(32, 32, 32, 256, 8, 32))
    assert got["counts"].sum() == 32 * 8


def test_every_row_may_choose_the_same_expert() -> None:
    """More rows than one tile: the second tile of the same expert."""
    c = case(70, 128, 64, 8, 2, 64)
    c.logits[:, 5] = 30.0
    assert check(c)["counts"][5] == 70


def test_equal_logits_and_signed_zeros_choose_the_lowest_experts() -> None:
    c = case(4, 128, 64, 8, 3, 64)
    c.logits[:] = 0.0
    c.logits[:, ::2] = -0.0
    np.testing.assert_array_equal(check(c)["ids"], np.tile(np.arange(3), (4, 1)))


def test_rows_without_experts_are_zero_and_touch_no_weight() -> None:
    """Padding rows, as the routing kernel marks them; and experts outside a row's coreset are never read."""
    c = case(5, 128, 64, 8, 2, 64)
    c.logits[1] = c.logits[4] = EXCLUDED_LOGIT
    c.logits[:, 3:] = EXCLUDED_LOGIT
    got = run(c)
    assert (got["mixed"][[1, 4]] == 0).all() and (got["mixed"][[0, 2, 3]] != 0).any()
    assert (got["counts"][3:] == 0).all() and got["counts"].sum() == 3 * 2


def test_one_possible_expert_takes_the_whole_weight() -> None:
    c = case(3, 128, 64, 8, 4, 64)
    c.logits[:, :7] = EXCLUDED_LOGIT
    got = check(c)
    assert got["counts"].tolist() == [0, 0, 0, 0, 0, 0, 0, 3]


def test_impossible_shapes_are_refused_by_name() -> None:
    with pytest.raises(CloverError, match="group_size is 48"):
        ExpertShapes(ExpertsAttributes(2, 96, 48), 96, 8)
    with pytest.raises(CloverError, match="group_size is 0 with u8"):
        ExpertShapes(ExpertsAttributes(2, 64, 0), 128, 8)
