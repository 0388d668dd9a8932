"""The buffers a session keeps for steps to come: bounded in bytes and in number, and of no consequence for results."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve_support import nano_session

from clover.runtime import ort_session
from clover.runtime.ort_session import OrtSession
from clover.runtime.session import Adjustment, SequenceRows

SLOTS, BYTES, KEPT = 3, 60_000, 5


@lru_cache(maxsize=2)
def opened(which: str) -> OrtSession:
    session = nano_session(SLOTS, max_context=512)
    assert isinstance(session, OrtSession), which
    return session


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[SequenceRows], int]:
    """Rows for the first slots, of any shape: chunks, previews, both; with and without adjusted tokens."""
    rows = []
    for slot in range(draw(st.integers(1, SLOTS))):
        length = draw(st.integers(1, 40))
        tokens = np.asarray(draw(st.lists(st.integers(4, 400), min_size=length, max_size=length)), np.int64)
        adjusted = np.arange(draw(st.sampled_from([0, 3, 20])), dtype=np.int64)
        ones = np.ones(len(adjusted), np.float32)
        rows.append(
            SequenceRows(
                slot,
                tokens,
                draw(st.integers(0, min(length, 4))),
                np.arange(draw(st.integers(0, length)), dtype=np.int64),
                Adjustment(adjusted, ones * 1.5, ones * 0.25),
                coreset_top_p=draw(st.sampled_from([0.9, 1.0])),
            )
        )
    return rows, draw(st.sampled_from([1, 8, 300]))


@given(st.lists(steps(), min_size=1, max_size=12))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_kept_buffers_stay_within_their_bounds_and_change_nothing(
    sequence: list[tuple[list[SequenceRows], int]],
) -> None:
    bounded, free = opened("bounded"), opened("free")
    for slot in range(SLOTS):
        bounded.reset(slot)
        free.reset(slot)
    for rows, candidates in sequence:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ort_session, "BINDING_BYTES", BYTES)
            patch.setattr(ort_session, "BINDINGS_KEPT", KEPT)
            got = bounded.step(rows, candidates)
        kept = list(bounded._bindings.values())
        assert bounded.binding_bytes == sum(binding.nbytes for binding in kept)
        assert kept[-1].token_ids.shape == (len(rows), max(len(r.tokens) for r in rows)), "the newest stays"
        assert len(kept) == 1 or (bounded.binding_bytes <= BYTES and len(kept) <= KEPT)
        for mine, theirs in zip(got, free.step(rows, candidates), strict=True):
            np.testing.assert_array_equal(mine.ids, theirs.ids)
            np.testing.assert_array_equal(mine.logprobs, theirs.logprobs)
            np.testing.assert_array_equal(mine.scores, theirs.scores)


def test_the_shapes_of_ordinary_traffic_all_stay() -> None:
    """Greedy and sampling steps of one to three replies, over and over, are bound once each."""
    session = nano_session(SLOTS, max_context=512)
    assert isinstance(session, OrtSession)
    tokens, asked = np.arange(4, 36), np.arange(32)
    shapes = [(count, k) for count in range(1, SLOTS + 1) for k in (1, 500)]
    bound = []
    for _ in range(2):
        for count, k in shapes:
            session.step([SequenceRows(slot, tokens, 0, asked) for slot in range(count)], k)
        bound.append(list(session._bindings.values()))
    assert len(bound[0]) == len(shapes) and all(a is b for a, b in zip(*bound, strict=True))
    session.close()
    assert session.binding_bytes == 0
