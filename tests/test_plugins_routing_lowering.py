"""The coreset routing that the engine really runs (its ONNX lowering) against the oracle: the same sets, ties included."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_support import oracle_module, tiny_checkpoint

from clover.exporter.config import ModelConfig
from clover.exporter.graph.builder import GraphBuilder
from clover.exporter.graph.rows import author_rows
from clover.plugins.moe_coreset_routing.lowering import lower_coreset_routing
from clover.plugins.moe_coreset_routing.spec import EXCLUDED_LOGIT

Floats = npt.NDArray[np.float32]


@lru_cache
def routing_session(experts: int, top_k: int) -> Any:
    """A graph of nothing but the rows and the routing."""
    import onnxruntime as ort

    config = ModelConfig.load(tiny_checkpoint())
    config = dataclasses.replace(config, num_experts=experts, num_experts_per_tok=top_k, coreset_min_experts=top_k)
    b = GraphBuilder({})
    rows = author_rows(b)
    top_p = b.unsqueeze(b.input("coreset_top_p", ["S"]), 1)
    logits = b.input("logits", ["S", "T", experts])
    b.output(lower_coreset_routing(b, config, rows, top_p, logits), "routed", ["S", "T", experts])
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(b.model("routing", {}).SerializeToString(), options)


def routed_sets(logits: Floats, commit: list[int], rows: list[int], top_p: float, top_k: int) -> list[list[set[int]]]:
    """The experts each row uses, as the engine's graph leaves them for the expert products."""
    sequences, length, experts = logits.shape
    session = routing_session(experts, top_k)
    given: dict[str, npt.NDArray[Any]] = {
        "token_ids": np.zeros((sequences, length), np.int64),
        "commit_length": np.array(commit, np.int64),
        "row_length": np.array(rows, np.int64),
        "position": np.zeros(sequences, np.int64),
        "live_length": np.array([length], np.int64),
        "coreset_top_p": np.full(sequences, top_p, np.float32),
        "logits": logits,
    }
    wanted = {value.name for value in session.get_inputs()}
    (out,) = session.run(["routed"], {name: value for name, value in given.items() if name in wanted})
    return [[set(np.flatnonzero(row > EXCLUDED_LOGIT / 2).tolist()) for row in sequence] for sequence in out]


def expected_sets(logits: Floats, commit: int, rows: int, top_p: float, top_k: int) -> list[set[int]]:
    """The oracle's sets for one sequence, decided in float32 as the engine does."""
    oracle = oracle_module("oracle")
    e = np.exp(logits - logits.max(-1, keepdims=True))
    probs = (e / e.sum(-1, keepdims=True)).astype(np.float32)
    scores = probs.copy()
    if rows > commit and top_p < 1.0:
        allowed = oracle.block_coreset(probs[commit:rows], top_k, top_p)
        scores[commit:rows] = np.where(allowed[None], probs[commit:rows], -1.0)
    return [set(np.argsort(-row, kind="stable")[:top_k].tolist()) for row in scores[:rows]]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    experts_and_k=st.sampled_from([(4, 4), (8, 2), (16, 4), (64, 8), (256, 8)]),
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 34)), min_size=1, max_size=3),
    top_p=st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0]),
    levels=st.sampled_from([1, 2, 4, 0]),
)
def test_the_engine_routes_as_the_oracle(
    seed: int, experts_and_k: tuple[int, int], lengths: list[tuple[int, int]], top_p: float, levels: int
) -> None:
    """`levels`: how many different logits occur, so that ties are the rule (1: all equal); 0: any."""
    experts, top_k = experts_and_k
    rng = np.random.default_rng(seed)
    rows = [commit + preview for commit, preview in lengths]
    if max(rows) == 0:
        return
    shape = (len(lengths), max(rows), experts)
    # steps of a quarter of ln 2 keep sums of a few equal probabilities exact enough to be decided alike
    drawn = rng.normal(0, 2, shape) if levels == 0 else rng.integers(0, levels, shape) * np.log(2.0)
    logits = drawn.astype(np.float32)
    got = routed_sets(logits, [c for c, _ in lengths], rows, top_p, top_k)
    for sequence, (commit, _) in enumerate(lengths):
        want = expected_sets(logits[sequence], commit, rows[sequence], top_p, top_k)
        for row, (ours, theirs) in enumerate(zip(got[sequence], want, strict=False)):
            assert len(ours) == top_k
            if ours != theirs:
                assert near_border(logits[sequence], commit, rows[sequence], top_p, top_k), (row, ours ^ theirs)


def near_border(logits: Floats, commit: int, rows: int, top_p: float, top_k: int) -> bool:
    """Whether the coreset's border lies within float32's rounding of a cumulative share, so that either set is right."""
    x = logits[commit:rows].astype(np.float64)
    probs = np.exp(x - x.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    order = np.argsort(-probs, axis=-1, kind="stable")[:, :top_k]
    votes = np.zeros_like(probs)
    np.put_along_axis(votes, order, np.take_along_axis(probs, order, -1), -1)
    share = -np.sort(-votes.sum(0) / votes.sum())
    gaps = np.abs(np.diff(share[share > 0]))
    close_shares = bool(((gaps > 0) & (gaps < 1e-6)).any())
    return close_shares or bool(np.abs(np.cumsum(share) - top_p).min() < 1e-5)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 1.0])
def test_equal_scores_take_the_lowest_experts(top_p: float) -> None:
    logits = np.zeros((1, 8, 256), np.float32)
    (sets,) = routed_sets(logits, [2], [8], top_p, 8)
    assert all(experts == set(range(8)) for experts in sets)


def test_fewer_experts_than_asked_for_are_all_used() -> None:
    logits = np.random.default_rng(0).normal(size=(1, 4, 4)).astype(np.float32)
    (sets,) = routed_sets(logits, [0], [4], 0.1, 4)
    assert all(experts == {0, 1, 2, 3} for experts in sets)
