"""The GPU kernel of MoECoresetRouting in Triton's interpreter, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from clover.plugins.kernels.interpreter import Output, shared_interpreter
from clover.plugins.moe_coreset_routing.kernel_launch import kernel, plan
from clover.plugins.moe_coreset_routing.reference import moe_coreset_routing
from clover.plugins.moe_coreset_routing.spec import EXCLUDED_LOGIT, CoresetAttributes
from clover.plugins.numerics import softmax, top_indices
from clover.runtime.errors import CloverError

Array = npt.NDArray[Any]


def run(a: CoresetAttributes, logits: Array, commit: list[int], length: list[int], top_p: float | list[float]) -> Array:
    sequences, rows, experts = logits.shape
    return shared_interpreter().run(
        plan(a, sequences=sequences, rows=rows, experts=experts),
        {
            "logits": ("fp32", logits),
            "commit_length": ("i64", np.array(commit)),
            "row_length": ("i64", np.array(length)),
            "top_p": ("fp32", np.ascontiguousarray(np.broadcast_to(np.asarray(top_p, np.float32), sequences))),
        },
        {"routed_logits": Output("fp32", logits.shape)},
    )["routed_logits"]


def check(
    a: CoresetAttributes, logits: Array, commit: list[int], length: list[int], top_p: float | list[float]
) -> Array:
    got = run(a, logits, commit, length, top_p)
    want = moe_coreset_routing(logits, np.array(commit), np.array(length), np.asarray(top_p, np.float32), attributes=a)
    for s, n in enumerate(length):
        np.testing.assert_array_equal(got[s, :n], want[s, :n])
        assert (got[s, n:] == np.float32(EXCLUDED_LOGIT)).all(), "padding rows must choose no expert"
    return got


def is_close_call(a: CoresetAttributes, logits: Array, commit: list[int], length: list[int], top_p: float) -> bool:
    """Whether the order of a float32 sum could decide the coreset: two implementations may then differ."""
    for s, (c, n) in enumerate(zip(commit, length, strict=True)):
        if n <= c:
            continue
        p = softmax(logits[s, c:n].astype(np.float64))
        voted = top_indices(p, a.top_k)
        votes = np.zeros_like(p)
        np.put_along_axis(votes, voted, np.take_along_axis(p, voted, -1), -1)
        share = np.sort(votes.sum(0) / votes.sum())[::-1]
        running = np.cumsum(share)
        size = max(int((running < top_p).sum()) + 1, a.min_experts)
        if np.abs(running - top_p).min() < 1e-5:
            return True
        if size < len(share) and share[size] > 0 and share[size - 1] - share[size] < 1e-6:
            return True
    return False


@st.composite
def cases(draw: st.DrawFn) -> tuple[CoresetAttributes, Array, list[int], list[int], float]:
    experts = draw(st.sampled_from([8, 16, 24, 64]))
    top_k = draw(st.integers(1, 8))
    rows, sequences = draw(st.integers(1, 64)), draw(st.integers(1, 2))
    length = [draw(st.integers(0, rows)) for _ in range(sequences)]
    commit = [draw(st.integers(0, n)) for n in length]
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    logits = rng.standard_normal((sequences, rows, experts)) * draw(st.sampled_from([0.1, 1.0, 6.0]))
    if draw(st.booleans()):
        logits = np.round(logits)  # many exact ties
    top_p = draw(st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.99, 1.0, 2.0]))
    return (
        CoresetAttributes(top_k, min(draw(st.sampled_from([top_k, 8])), experts)),
        logits.astype(np.float32),
        commit,
        length,
        top_p,
    )


@settings(max_examples=15, deadline=None)
@given(cases())
def test_matches_the_reference(case: tuple[CoresetAttributes, Array, list[int], list[int], float]) -> None:
    assume(not is_close_call(*case))
    check(*case)


@pytest.mark.parametrize("rows", [1, 17, 64])
def test_256_experts(rows: int) -> None:
    a, rng = CoresetAttributes(8, 8), np.random.default_rng(rows)
    got = check(a, (rng.standard_normal((1, rows, 256)) * 2).astype(np.float32), [0], [rows], 0.9)
    kept = (got[0] > EXCLUDED_LOGIT).sum(-1)
    assert (kept == kept[0]).all() and 8 <= kept[0] <= 8 * rows


def test_equal_logits_choose_the_lowest_experts() -> None:
    got = check(CoresetAttributes(8, 8), np.full((1, 32, 256), 1.5, np.float32), [0], [32], 0.9)
    assert (np.flatnonzero(got[0, 0] > EXCLUDED_LOGIT) == np.arange(8)).all()


def test_a_share_that_reaches_top_p_exactly_ends_the_coreset() -> None:
    logits = np.zeros((1, 4, 8), np.float32)
    for row, expert in enumerate((3, 3, 1, 6)):  # shares 1/2, 1/4, 1/4, exact in float32
        logits[0, row, expert] = 60.0
    for top_p, kept in ((0.5, [3]), (0.75, [1, 3]), (0.76, [1, 3, 6])):
        got = check(CoresetAttributes(1, 1), logits, [0], [4], top_p)
        assert np.flatnonzero(got[0, 0] > EXCLUDED_LOGIT).tolist() == kept


def test_each_sequence_has_its_own_share() -> None:
    logits = np.zeros((3, 4, 8), np.float32)
    for row, expert in enumerate((3, 3, 1, 6)):
        logits[:, row, expert] = 60.0
    got = check(CoresetAttributes(1, 1), logits, [0, 0, 0], [4, 4, 4], [0.5, 0.76, 1.0])
    kept = [np.flatnonzero(g[0] > EXCLUDED_LOGIT).tolist() for g in got]
    assert kept == [[3], [1, 3, 6], list(range(8))]


def test_commit_and_padding_rows_neither_vote_nor_change() -> None:
    a, rng = CoresetAttributes(2, 2), np.random.default_rng(0)
    logits = rng.standard_normal((1, 40, 16)).astype(np.float32)
    other = logits.copy()
    other[0, :20] += 3 * rng.standard_normal((20, 16)).astype(np.float32)
    other[0, 30:] = 50.0
    first, second = check(a, logits, [20], [30], 0.5), check(a, other, [20], [30], 0.5)
    np.testing.assert_array_equal(first[0, 20:30], second[0, 20:30])


def test_more_experts_per_row_than_experts_is_refused() -> None:
    with pytest.raises(CloverError, match="top_k is 8 of 4 experts"):
        kernel(CoresetAttributes(8, 8), experts=4)
