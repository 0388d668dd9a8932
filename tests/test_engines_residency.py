"""Expert residency: the state machine's invariants, no thrashing, and the simulator against brute force."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover.engines.residency import ResidencyPolicy, ResidencySettings, touched_mask
from clover.engines.residency_simulator import (
    Outcome,
    SyntheticSettings,
    Trace,
    read_trace,
    simulate,
    synthetic_trace,
    write_trace,
)
from clover.runtime.errors import CloverError

LAYERS, EXPERTS = 3, 8
STEPS = st.lists(st.lists(st.booleans(), min_size=24, max_size=24), min_size=1, max_size=20)


def masks(steps: list[list[bool]]) -> list[Any]:
    return [np.array(s).reshape(LAYERS, EXPERTS) for s in steps]


def trace_of(steps: list[Any], per_block: int = 2) -> Trace:
    layers, experts = steps[0].shape
    return Trace(layers, experts, tuple(steps), tuple(i // per_block for i in range(len(steps))))


def by_name(outcomes: list[Outcome]) -> dict[str, Outcome]:
    return {o.name: o for o in outcomes}


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 30), st.integers(0, 6))
def test_invariants(steps: list[list[bool]], capacity: int, max_moves: int) -> None:
    policy = ResidencyPolicy(capacity, LAYERS, EXPERTS, ResidencySettings(4, 8, 1.1))
    capacity = min(capacity, LAYERS * EXPERTS)
    for mask in masks(steps):
        before, slots = policy.resident, policy.slots
        assert policy.observe(mask) == int((mask & ~before).sum())
        assert (policy.resident == before).all()  # nothing moves during a step
        moves = policy.plan_moves(max_moves)
        assert moves == policy.plan_moves(max_moves) and (policy.slots == slots).all()  # planning changes nothing
        assert len(moves) <= max_moves
        use = policy.use
        for move in moves:
            assert not before[move.expert_in] and before[move.expert_out]
            assert use[move.expert_in] > use[move.expert_out]
            assert (slots[move.expert_out], slots[move.expert_in]) == (move.card_slot, move.host_slot)
        policy.apply(moves)
        resident, slots = policy.resident, policy.slots
        assert resident.sum() == capacity
        assert sorted(slots[resident]) == list(range(capacity))  # one expert a slot, on either side
        assert sorted(slots[~resident]) == list(range(LAYERS * EXPERTS - capacity))
        if moves:
            with pytest.raises(ValueError, match="present state"):
                policy.apply(moves)


def test_bytes_follow_the_moves() -> None:
    """Two memories swapped as the moves say always hold what the policy says they hold."""
    rng = np.random.default_rng(1)
    policy = ResidencyPolicy(10, LAYERS, EXPERTS, ResidencySettings(4, 8, 1.1))
    card, host = np.empty(10, dtype=int), np.empty(14, dtype=int)
    names = np.arange(24).reshape(LAYERS, EXPERTS)
    card[policy.slots[policy.resident]] = names[policy.resident]
    host[policy.slots[~policy.resident]] = names[~policy.resident]
    moved = 0
    for _ in range(40):
        policy.observe(rng.random((LAYERS, EXPERTS)) < 0.3)
        moves = policy.plan_moves(4)
        for m in moves:
            card[m.card_slot], host[m.host_slot] = host[m.host_slot], card[m.card_slot]
        policy.apply(moves)
        moved += len(moves)
        assert (card[policy.slots[policy.resident]] == names[policy.resident]).all()
        assert (host[policy.slots[~policy.resident]] == names[~policy.resident]).all()
    assert moved > 10


def test_layers_start_with_equal_shares_or_with_the_saved_use() -> None:
    policy = ResidencyPolicy(10, LAYERS, EXPERTS)
    assert policy.resident.sum(1).tolist() == [4, 3, 3] and policy.resident[:, :3].all()
    use = np.zeros((LAYERS, EXPERTS))
    use[2, 4:] = 5
    warm = ResidencyPolicy(4, LAYERS, EXPERTS, initial_use=use)
    assert warm.resident[2, 4:].all() and warm.resident.sum() == 4
    with pytest.raises(CloverError, match="shape"):
        ResidencyPolicy(4, LAYERS, EXPERTS, initial_use=use.T)
    with pytest.raises(CloverError, match="can't be"):
        ResidencyPolicy(-1, LAYERS, EXPERTS)
    with pytest.raises(CloverError, match="margin"):
        ResidencySettings(margin=0.5)


def test_hot_experts_come_in_and_old_favourites_leave() -> None:
    policy = ResidencyPolicy(2, 1, 4)
    for favourite in (3, 2):  # expert 3 is hot for long, then expert 2
        for _ in range(200):
            policy.observe(touched_mask([[favourite]], 4))
            policy.apply(policy.plan_moves(1))
        assert policy.resident[0, favourite]
    policy = ResidencyPolicy(1, 1, 2)
    for _ in range(200):
        policy.observe(touched_mask([[1]], 2))
    policy.apply(policy.plan_moves(1))
    for _ in range(200):
        policy.observe(touched_mask([[0]], 2))
    assert [m.expert_in for m in policy.plan_moves(1)] == [(0, 0)]  # fame fades


def test_experts_used_alike_do_not_change_places() -> None:
    """Twice as many equally used experts as slots: a policy without hysteresis would swap at every block."""
    rng = np.random.default_rng(0)
    policy = ResidencyPolicy(8, 1, 16)
    moves = 0
    for _ in range(500):
        policy.observe(rng.random((1, 16)) < 0.5)
        planned = policy.plan_moves(8)
        policy.apply(planned)
        moves += len(planned)
    assert moves < 25  # of 4,000 possible
    eager = ResidencyPolicy(8, 1, 16, ResidencySettings(half_life=2, payback=100, margin=1))
    for _ in range(500):
        eager.observe(rng.random((1, 16)) < 0.5)
        planned = eager.plan_moves(8)
        eager.apply(planned)
        moves += len(planned)
    assert moves > 500


def test_a_move_must_pay_for_itself() -> None:
    policy = ResidencyPolicy(1, 1, 2)  # expert 0 is on the card and never used
    policy.observe(touched_mask([[1]], 2))
    assert policy.plan_moves(1) == []  # one touch is not worth the bytes
    for _ in range(5):
        policy.observe(touched_mask([[1]], 2))
    assert len(policy.plan_moves(1)) == 1


def test_a_wrong_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        ResidencyPolicy(2, LAYERS, EXPERTS).observe(np.zeros((EXPERTS, LAYERS), dtype=bool))


# -- simulator -------------------------------------------------------------------------------------


def fewest_misses(steps: list[Any], capacity: int, start: frozenset[int]) -> int:
    """Brute force: every set the card could hold after every step, of what it held and what the step read."""
    cost = {start: 0}
    for mask in steps:
        touched = frozenset(np.flatnonzero(mask).tolist())
        after: dict[frozenset[int], int] = {}
        for held, misses in cost.items():
            total = misses + len(touched - held)
            pool = sorted(held | touched)
            for kept in itertools.combinations(pool, min(capacity, len(pool))):
                key = frozenset(kept)
                after[key] = min(after.get(key, 10**9), total)
        cost = after
    return min(cost.values())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=7), st.integers(0, 4))
def test_ideal_is_what_brute_force_finds(rows: list[list[bool]], capacity: int) -> None:
    steps = [np.array(r).reshape(1, 6) for r in rows]
    touched = sum(int(s.sum()) for s in steps)
    ideal = by_name(simulate(trace_of(steps), capacity, 1, 1))["ideal"]
    start = frozenset(np.flatnonzero(ResidencyPolicy(capacity, 1, 6).resident).tolist())
    assert round(ideal.read_bytes * len(steps)) == fewest_misses(steps, capacity, start)
    assert ideal.touched * len(steps) == pytest.approx(touched)


@settings(max_examples=40, deadline=None)
@given(STEPS, st.integers(0, 24))
def test_nothing_beats_ideal_and_full_capacity_never_misses(steps: list[list[bool]], capacity: int) -> None:
    outcomes = by_name(simulate(trace_of(masks(steps)), capacity, 100, 3))
    best_start = outcomes.pop("best static")  # it starts from another set, chosen with hindsight
    for o in outcomes.values():
        assert outcomes["ideal"].read_bytes <= o.read_bytes and 0 <= o.hit_rate <= 1
    assert best_start.read_bytes <= outcomes["static"].read_bytes
    if capacity == 24:
        assert all(o.link_bytes == 0 and o.hit_rate == 1 for o in outcomes.values())


def test_lru_by_hand() -> None:
    steps = [touched_mask([[e]], 4) for e in (0, 2, 1, 0, 3)]  # starts with {0, 1}; hits: 0
    lru = by_name(simulate(trace_of(steps), 2, 10, 0))["lru"]
    # 0 hit; 2 replaces 1; 1 replaces 0; 0 replaces 2; 3 replaces 1
    assert lru.hit_rate == pytest.approx(1 / 5) and lru.read_bytes == pytest.approx(4 * 10 / 5)


def test_policy_helps_where_routing_has_structure_and_does_no_harm_where_it_has_none() -> None:
    small = SyntheticSettings(layers=4, experts=64, top_k=4, block_size=8, blocks=60, steps_per_block=4)
    structured = by_name(simulate(synthetic_trace(small), 4 * 40, 1000, 16))
    assert structured["policy"].link_bytes < 0.6 * structured["static"].link_bytes
    assert structured["ideal"].read_bytes < structured["policy"].read_bytes
    noise = synthetic_trace(SyntheticSettings(**{**small.__dict__, "skew": 0.0, "topic": 0.0}))
    random = by_name(simulate(noise, 4 * 40, 1000, 16))
    assert random["policy"].link_bytes < 1.05 * random["static"].link_bytes


def test_traces_round_trip_and_damage_is_named(tmp_path: Path) -> None:
    trace = synthetic_trace(SyntheticSettings(layers=2, experts=16, top_k=4, block_size=4, blocks=3, steps_per_block=2))
    path = tmp_path / "trace.jsonl"
    write_trace(path, trace)
    again = read_trace(path)
    assert again.block == trace.block and all((a == b).all() for a, b in zip(again.steps, trace.steps, strict=True))
    lines = path.read_text().splitlines()
    for damaged, message in (
        ([lines[0], '{"block": 0, "experts": [[1], [99]]}'], "line 2.*below 16"),
        ([lines[0], '{"block": 0}'], "line 2"),
        ([lines[0], lines[-1], lines[1]], "line 3: blocks go backwards"),
        (["[]"], "line 1"),
        ([lines[0]], "no steps"),
    ):
        path.write_text("\n".join(damaged))
        with pytest.raises(CloverError, match=message):
            read_trace(path)
    with pytest.raises(CloverError, match="can't be read"):
        read_trace(tmp_path / "missing.jsonl")


def test_benchmark_prints_json_and_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "residency.py"
    spec = importlib.util.spec_from_file_location("benchmark_residency", script)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tiny = ["--layers", "2", "--experts", "32", "--blocks", "6", "--steps-per-block", "2", "--block-size", "8"]
    saved = tmp_path / "t.jsonl"
    assert module.main([*tiny, "--json", "--save-trace", str(saved)]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [o["name"] for o in made["outcomes"]] == ["policy", "lru", "static", "best static", "ideal"]
    assert 0 < made["capacity"] < 64
    assert module.main(["--trace", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcomes"] == made["outcomes"]
    assert module.main(["--trace", str(saved)]) == 0
    assert "hit rate" in capsys.readouterr().out
    assert module.main(["--gpu", "nothing"]) == 2
    assert "no known target" in capsys.readouterr().err
