"""Choosing tokens: the distribution that sampling draws from, and the logits that penalties give."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clover.runtime.errors import RequestError
from clover.runtime.options import DecodeOptions, LengthRamp, make_options
from clover.runtime.penalties import Endings, PenaltyState
from clover.runtime.select import candidates_needed, choose_tokens, sampling_weights
from clover.runtime.session import Candidates

DRAWS = 20_000
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -1e30])  # the last is an excluded token


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    live = probabilities > 0
    assert counts[~live].sum() == 0, "a token of probability 0 was drawn"
    expected = probabilities[live] * counts.sum()
    return float(((counts[live] - expected) ** 2 / expected).sum())


def expected_probabilities(temperature: float, top_k: int, top_p: float) -> npt.NDArray[np.float64]:
    """softmax(logits / temperature) over the best k, then over the smallest set that reaches top_p."""
    weights: npt.NDArray[np.float64] = np.exp(LOGITS / temperature - LOGITS.max() / temperature)
    weights[top_k or len(weights) :] = 0.0
    weights /= weights.sum()
    size = 1 + int(np.searchsorted(np.cumsum(weights), top_p - 1e-12))
    weights[size:] = 0.0
    weights /= weights.sum()
    return weights


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("top_k", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    o = DecodeOptions(temperature=temperature, top_k=top_k, top_p=top_p)
    ids = np.array([30, 10, 50, 20, 40, 60])
    tile = (DRAWS, 1)
    rows = Candidates(np.tile(ids, tile), np.tile(LOGITS - 5, tile), np.tile(LOGITS, tile).astype(np.float32))
    chosen, logprobs = choose_tokens(rows, o, np.random.default_rng(0))
    counts = np.array([(chosen == i).sum() for i in ids])
    assert chi_square(counts, expected_probabilities(temperature, top_k, top_p)) < 25.0  # p < 1e-4 at 4 degrees
    column = {i: n for n, i in enumerate(ids.tolist())}
    assert np.array_equal(logprobs, LOGITS[[column[c] for c in chosen.tolist()]] - 5), "raw log-probabilities"


@given(
    scores=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40),
    temperature=st.floats(0.01, 10),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.001, 1.0),
)
def test_restricted_weights_are_a_prefix_that_reaches_top_p(
    scores: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    row = np.array([sorted(scores, reverse=True)], np.float32)
    got = sampling_weights(row, temperature, top_k, top_p)[0]
    free = sampling_weights(row, temperature, 0, 1.0)[0]
    kept = np.flatnonzero(got)
    assert got[0] == 1.0 and np.array_equal(got[kept], free[kept])
    within = free[: top_k or None]
    share = within / within.sum()
    size = int(kept[-1]) + 1
    assert size <= len(within) and (share[:size].sum() >= top_p - 1e-9 or free[size : len(within)].sum() == 0)
    assert size == 1 or share[: size - 1].sum() < top_p + 1e-9


def test_a_row_draws_one_number_whatever_stands_beside_it() -> None:
    """So that a position's draw depends on the seed and the rows before it alone."""
    o = DecodeOptions(temperature=1.0)
    three = Candidates(np.tile(np.arange(6), (3, 1)), np.zeros((3, 6), np.float32), np.tile(LOGITS, (3, 1)))
    rng, same = np.random.default_rng(1), np.random.default_rng(1)
    together = choose_tokens(three, o, rng)[0].tolist()
    one = Candidates(three.ids[:1], three.logprobs[:1], three.scores[:1])
    assert [choose_tokens(one, o, same)[0][0] for _ in range(3)] == together


def test_no_more_candidates_than_needed_and_never_fewer() -> None:
    assert candidates_needed(DecodeOptions(), 768) == 1
    assert candidates_needed(DecodeOptions(logprobs=5), 768) == 6
    assert candidates_needed(DecodeOptions(temperature=1.0), 768) == 768
    assert candidates_needed(DecodeOptions(temperature=1.0, top_k=40, logprobs=3), 248_320) == 40
    for top_k in (1024, 1023):
        assert candidates_needed(DecodeOptions(temperature=1.0, top_k=top_k), 248_320) == top_k
    with pytest.raises(RequestError, match="top_k"):  # more than a step returns: refused, not cut in silence
        DecodeOptions(top_k=1025)


@given(
    batches=st.lists(st.lists(st.integers(0, 11), max_size=6), max_size=5),
    presence=st.sampled_from([0.0, 0.9, -1.0]),
    frequency=st.sampled_from([0.0, 0.3, -0.5]),
    repetition=st.sampled_from([1.0, 1.05, 2.0, 0.5]),
    bias=st.dictionaries(st.integers(0, 11), st.floats(-100, 100, width=32), max_size=4),
    length=st.sampled_from([0, 99, 100, 150, 200, 10_000]),
    logits=st.lists(st.floats(-20, 20, width=32), min_size=12, max_size=12),
)
def test_an_adjustment_is_the_formula(
    batches: list[list[int]], presence: float, frequency: float, repetition: float, bias: dict[int, float], length: int,
    logits: list[float],
) -> None:  # fmt: skip
    o = DecodeOptions(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, logit_bias=bias,
        length_ramp=LengthRamp(100, 200, 4.0),
    )  # fmt: skip
    state = PenaltyState(o, Endings((10, 11)))
    for batch in batches:
        state.add(batch)
        state.adjustment()  # the adjustment in between must not stick
    state.at_length(length)
    got = np.array(logits, np.float64)
    a = state.adjustment()
    assert len(set(a.ids.tolist())) == len(a.ids)
    assert a is state.adjustment()
    x = got[a.ids]
    got[a.ids] = np.where(x > 0, x / a.scale, x * a.scale) + a.bias
    seen = [t for batch in batches for t in batch]
    want = np.array(logits, np.float64)
    for t in set(seen):
        want[t] = want[t] / repetition if want[t] > 0 else want[t] * repetition
        want[t] -= presence + frequency * seen.count(t)
    for t, b in bias.items():
        want[t] += b
    for t in (10, 11):
        want[t] += {0: 0.0, 99: 0.0, 100: 0.0, 150: 2.0, 200: 4.0, 10_000: 4.0}[length]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("asked", "want"),
    [
        ("off", None),
        ("100:200:3", LengthRamp(100, 200, 3.0)),
        ({"start": 1, "stop": 2, "max_bias": 0.5}, LengthRamp(1, 2, 0.5)),
        (LengthRamp(), LengthRamp()),
    ],
)
def test_the_length_ramp_can_be_set_and_turned_off(asked: object, want: LengthRamp | None) -> None:
    assert make_options({}, {"length_ramp": asked}).length_ramp == want


@pytest.mark.parametrize("asked", ["on", "1:2", "2:1:5", "1:2:x", "1:2:3:4", {"start": 1}, 5, "-1:2:3"])
def test_a_senseless_length_ramp_is_refused_by_name(asked: object) -> None:
    with pytest.raises(RequestError, match="length_ramp"):
        make_options({}, {"length_ramp": asked})


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty"])
def test_a_factor_that_float32_can_not_divide_by_is_refused(field: str) -> None:
    for value in (1e-300, 1e-46, 0.009):
        with pytest.raises(RequestError, match=field):
            make_options({}, {field: value})
    assert getattr(make_options({}, {field: 0.01}), field) == 0.01


def test_an_option_that_does_not_act_in_a_mode_is_refused_by_name() -> None:
    values = {"threshold": 0.5, "block_size": 16, "coreset_top_p": 0.5, "align_blocks": True}
    acting = {
        "fill": set(values),
        "autoregressive": set(),
        "self-speculative": {"block_size", "coreset_top_p"},
        "adaptive": {"threshold", "block_size", "coreset_top_p"},
    }
    for mode, acts in acting.items():
        make_options(values | {"align_blocks": False}, {"mode": mode, "align_blocks": False, "threshold": None})
        for name, value in values.items():
            if name in acts:
                assert getattr(make_options({}, {"mode": mode, name: value}), name) == value
                continue
            with pytest.raises(RequestError, match=mode) as refused:
                make_options({}, {"mode": mode, name: value})
            assert refused.value.field == name
