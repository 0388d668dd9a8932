"""The NumPy model, whole and layer by layer, against the independent oracle and transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_support import load_oracle, oracle_module, tiny_checkpoint

from clover.exporter.checkpoint import Checkpoint
from clover.exporter.config import ModelConfig
from clover.exporter.reference import ReferenceModel, ReferenceState

Array = np.ndarray[Any, np.dtype[Any]]
MASK = 319  # the tiny checkpoint's mask token


def lengths(*values: int) -> Array:
    return np.array(values, np.int64)


def close(actual: Array, expected: Array, tolerance: float = 1e-11) -> None:
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=tolerance * max(1.0, float(np.abs(expected).max(initial=0)))
    )


def tiny(**kwargs: Any) -> tuple[ReferenceModel, Any]:
    """The same tiny checkpoint as a reference model and as the oracle."""
    directory = tiny_checkpoint(**kwargs)
    oracle = load_oracle(directory)
    return ReferenceModel(ModelConfig.load(directory), oracle.t), oracle


def assert_state(state: ReferenceState, s: int, oracle_state: Any) -> None:
    """Sequence s of `state` is the oracle's state."""
    position = int(state.position[s])
    assert position == oracle_state.position
    for i, layer in enumerate(oracle_state.layers):
        if layer.keys is None:
            close(state.recurrent[i][s], layer.recurrent)
            close(state.conv[i][s], layer.conv)
        else:
            close(state.keys[i][s, :position], layer.keys)
            close(state.values[i][s, :position], layer.values)
            assert not state.keys[i][s, position:].any()


Sequence = tuple[int, int, int]  # tokens committed before, commit rows, preview rows
# The oracle's right convolution can't do a block of two rows; that one has its own test below.
SEQUENCE = st.tuples(st.integers(0, 6), st.integers(0, 7), st.integers(0, 9).filter(lambda rows: rows != 2)).filter(any)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(SEQUENCE, min_size=1, max_size=3),
    st.lists(st.sampled_from([0.5, 0.9, 1.0]), min_size=3, max_size=3),
    st.integers(0, 2**32 - 1),
)
def test_ragged_mixed_step_equals_each_sequence_alone(
    sequences: list[Sequence], top_ps: list[float], seed: int
) -> None:
    model, oracle = tiny()
    top_p = np.array(top_ps[: len(sequences)])  # each sequence its own
    rng = np.random.default_rng(seed)
    width = max(1, max(c + p for _, c, p in sequences)) + 1  # at least one padding row
    state = model.initial_state(len(sequences))
    before = [rng.integers(0, MASK, past) for past, _, _ in sequences]
    # The pasts go in chunk by chunk, so that chunks of different sequences meet in one step.
    chunk = 4
    for start in range(0, max(past for past, _, _ in sequences), chunk):
        ids = np.full((len(sequences), chunk), -1)
        counts = lengths(*(len(tokens[start : start + chunk]) for tokens in before))
        for s, tokens in enumerate(before):
            ids[s, : counts[s]] = tokens[start : start + chunk]
        _, state = model.step(ids, counts, counts, state, top_p)

    ids = np.full((len(sequences), width), -1)  # what padding rows hold must not matter
    for s, (_, c, p) in enumerate(sequences):
        ids[s, : c + p] = np.where(rng.random(c + p) < 0.5, MASK, rng.integers(0, MASK, c + p))
    commit, rows = lengths(*(c for _, c, _ in sequences)), lengths(*(c + p for _, c, p in sequences))
    logits, new = model.step(ids, commit, rows, state, top_p)

    for s, (_, c, p) in enumerate(sequences):
        expected = oracle.initial_state()
        for tokens, out in ((before[s], None), (ids[s, :c], logits[s, :c])):
            if len(tokens):
                oracle_logits, expected = oracle.commit(tokens, expected)
                if out is not None:
                    close(out, oracle_logits)
        if p:
            oracle.coreset_top_p = top_ps[s]
            close(logits[s, c : c + p], oracle.preview(ids[s, c : c + p], expected))
        assert not logits[s, c + p :].any()
        assert_state(new, s, expected)


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_committing_token_by_token_equals_committing_at_once(tokens: int) -> None:
    model, oracle = tiny()
    ids = np.random.default_rng(tokens).integers(0, MASK, (1, tokens))
    at_once, state = model.step(ids, lengths(tokens), lengths(tokens), model.initial_state(), 0.9)
    one_by_one = model.initial_state()
    for t in range(tokens):
        logits, one_by_one = model.step(ids[:, t : t + 1], lengths(1), lengths(1), one_by_one, 0.9)
        close(logits[0, 0], at_once[0, t])
    _, expected = oracle.commit(ids[0], oracle.initial_state())
    assert_state(state, 0, expected)
    assert_state(one_by_one, 0, expected)


def test_a_preview_leaves_the_state_bit_for_bit_alone() -> None:
    model, _ = tiny()
    rng = np.random.default_rng(0)
    _, state = model.step(rng.integers(0, MASK, (2, 9)), lengths(9, 5), lengths(9, 5), model.initial_state(2), 0.9)
    # A negative zero survives only when the state is truly not recomputed.
    for i in model.config.gdn_layers:
        state.recurrent[i][:, 0, 0, 0] = -0.0
    kept = {
        name: {i: a.tobytes() for i, a in getattr(state, name).items()}
        for name in ("recurrent", "conv", "keys", "values")
    }
    _, after = model.step(np.full((2, 8), MASK), lengths(0, 0), lengths(8, 8), state, 0.9)
    for result in (after, state):
        for name, layers in kept.items():
            assert {i: a.tobytes() for i, a in getattr(result, name).items()} == layers
        assert result.position.tolist() == [9, 5]


def record(oracle: Any, method: str, seen: dict[str, Any]) -> None:
    """Keeps what each call of oracle.`method` returns, by the layer prefix among its arguments."""
    original: Callable[..., Any] = getattr(oracle, method)

    def recording(*args: Any) -> Any:
        result = original(*args)
        prefix = next(a for a in args if isinstance(a, str))
        seen[f"{method} {prefix.split('.')[2]}"] = (args[0], result)
        return result

    setattr(oracle, method, recording)


def test_captured_intermediates_are_the_oracles() -> None:
    model, oracle = tiny()
    rng = np.random.default_rng(3)
    prompt, block = rng.integers(0, MASK, 11), rng.integers(0, MASK + 1, 16)
    seen: dict[str, Any] = {}
    for method in ("gdn", "attention", "route", "moe"):
        record(oracle, method, seen)
    capture: dict[str, Array] = {}
    ids = np.concatenate([prompt, block, [0]])[None]
    logits, _ = model.step(ids, lengths(11), lengths(27), model.initial_state(), 0.9, capture)
    _, state = oracle.commit(prompt, oracle.initial_state())
    oracle.preview(block, state)

    layers = range(model.config.num_hidden_layers)
    parts = ("mixer", "router_logits", "experts", "hidden")
    assert set(capture) == {"logits"} | {f"layers.{i}.{part}" for i in layers for part in parts}
    assert capture["logits"] is logits
    rows = slice(11, 27)
    restricted = 0
    hidden = oracle.t["model.embed_tokens.weight"][block]
    for i, kind in enumerate(model.config.layer_types):
        mixer = "gdn" if kind == "linear_attention" else "attention"
        mixed = seen[f"{mixer} {i}"][1][0]
        close(capture[f"layers.{i}.mixer"][0, rows], mixed)
        x, (expert_ids, _, allowed) = seen[f"route {i}"]
        close(capture[f"layers.{i}.router_logits"][0, rows], oracle.linear(x, f"model.layers.{i}.mlp.gate.weight"))
        np.testing.assert_array_equal(capture[f"layers.{i}.experts"][0, rows], np.sort(expert_ids, axis=-1))
        assert (capture[f"layers.{i}.experts"][0, 27:] == -1).all()
        hidden = hidden + mixed + seen[f"moe {i}"][1]
        close(capture[f"layers.{i}.hidden"][0, rows], hidden)
        restricted += int((~allowed).sum())
    assert restricted > 0  # or the coreset was not tested


LAYER_TYPES = ["full_attention", "linear_attention", "linear_attention", "full_attention"]


@pytest.mark.parametrize(
    "options",
    [
        {"config": {"moe_block_coreset": {"enabled": False}}},
        {"config": {"history_readout_scale": 0.7, "block_size": 16}},
        {"num_key_value_heads": 1, "linear_num_key_heads": 1, "linear_value_head_dim": 24},
        {"linear_conv_kernel_dim": 3, "num_experts": 5, "num_experts_per_tok": 2, "layer_types": LAYER_TYPES},
    ],
    ids=["no coreset", "options", "head counts", "kernel, experts, layer types"],
)  # fmt: skip
def test_other_shapes_and_options(options: dict[str, Any]) -> None:
    model, oracle = tiny(**options)
    rng = np.random.default_rng(0)
    prompt, block = rng.integers(0, MASK, 7), rng.integers(0, MASK, 9)
    logits, _ = model.step(np.concatenate([prompt, block])[None], lengths(7), lengths(16), model.initial_state(), 0.9)
    expected, state = oracle.commit(prompt, oracle.initial_state())
    close(logits[0, :7], expected)
    close(logits[0, 7:], oracle.preview(block, state))


def test_tensors_may_come_lazily_from_any_checkpoint_layout() -> None:
    directory = tiny_checkpoint(layout="per_expert", prefix="language_model")
    checkpoint = Checkpoint.open(directory)
    model = ReferenceModel(checkpoint.config, checkpoint.tensors(np.float64))
    block = np.random.default_rng(0).integers(0, MASK, 8)
    logits, _ = model.step(block[None], lengths(0), lengths(8), model.initial_state(), 0.9)
    oracle = load_oracle(directory)
    close(logits[0], oracle.preview(block, oracle.initial_state()))


def test_float32_stays_float32_and_near_float64() -> None:
    exact, oracle = tiny()
    model = ReferenceModel(exact.config, {k: v.astype(np.float32) for k, v in oracle.t.items()}, np.float32)
    ids = np.random.default_rng(0).integers(0, MASK, (1, 24))
    step = (ids, lengths(12), lengths(24))
    logits, state = model.step(*step, model.initial_state(), 1.0)
    expected, _ = exact.step(*step, exact.initial_state(), 1.0)
    assert logits.dtype == np.float32
    for part in (state.recurrent, state.conv, state.keys, state.values):
        assert all(a.dtype == np.float32 for a in part.values())
    close(logits, expected, 1e-4)


def test_tied_head_and_unknown_dtype() -> None:
    model, oracle = tiny()
    tied = ReferenceModel(replace(model.config, tie_word_embeddings=True), oracle.t)
    del oracle.t["lm_head.weight"]
    logits, _ = tied.step(np.array([[5, 6]]), lengths(2), lengths(2), tied.initial_state(), 0.9)
    close(logits[0], oracle.commit([5, 6], oracle.initial_state())[0])
    with pytest.raises(ValueError, match="float16"):
        ReferenceModel(model.config, oracle.t, np.float16)


def test_commit_equals_transformers(tmp_path: Path) -> None:
    import torch

    hf = oracle_module("make_checkpoint").build(tmp_path, seed=4).double()
    hf.set_experts_implementation("eager")
    oracle = load_oracle(tmp_path)
    model = ReferenceModel(ModelConfig.load(tmp_path), oracle.t)
    ids = np.random.default_rng(0).integers(0, MASK, (1, 50))
    logits, _ = model.step(ids, lengths(50), lengths(50), model.initial_state(), 0.9)
    with torch.no_grad():
        expected = hf(torch.from_numpy(ids)).logits.numpy()
    assert np.linalg.norm(logits - expected) < 1e-4 * np.linalg.norm(expected)
