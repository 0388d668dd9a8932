"""The step graph on ONNX Runtime against the float64 oracle and transformers."""

from __future__ import annotations

import json
import shutil
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_support import logits_of, relative_error, rows, session, state_of
from oracle_support import Layout, Prefix, load_oracle, tiny_checkpoint
from safetensors.numpy import load_file, save_file

TOLERANCE = 2e-5
# some of these random models amplify float32's rounding: transformers' own error reaches 2.5e-5 on them
OTHER_TOLERANCE = 5e-5
NEAR_TIE = 3e-6  # a routing decision closer than float32 can tell
BLOCK_SIZES = (8, 16, 32, 64)
PROMPTS = (0, 1, 31, 32, 33, 100)
SHAPES: dict[str, dict[str, Any]] = {
    "equal heads": {"linear_num_key_heads": 4, "linear_num_value_heads": 4},
    "group of four": {"linear_num_key_heads": 1, "linear_num_value_heads": 4, "num_key_value_heads": 1},
    "kernel 3": {"linear_conv_kernel_dim": 3},
    "8 experts": {"num_experts": 8},
    "64 experts": {"num_experts": 64, "num_experts_per_tok": 8},
    "head_dim 64": {"head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 64},
}


@lru_cache(maxsize=256)
def expected(
    checkpoint: Path, prompt: tuple[int, ...], block: tuple[int, ...]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], float]:
    """The oracle's commit logits of the prompt, its preview logits of the block after it, and the gap of its
    closest routing decision (below float32's rounding, either choice is right)."""
    oracle = load_oracle(checkpoint)
    gaps: list[float] = [1.0]
    route = oracle.route

    def watched(h: Any, p: str, preview: bool) -> Any:
        ids, weights, allowed = route(h, p, preview)
        logits = oracle.linear(h, p + "gate.weight")
        gaps.append(routing_gap(logits, ids.shape[1], allowed, oracle.coreset_top_p))
        return ids, weights, allowed

    oracle.route = watched
    state = oracle.initial_state()
    committed = np.zeros((0, oracle.c["vocab_size"]))
    if prompt:
        committed, state = oracle.commit(np.array(prompt), state)
    return committed, oracle.preview(np.array(block), state), min(gaps)


def routing_gap(logits: npt.NDArray[Any], k: int, allowed: npt.NDArray[Any] | None, top_p: float) -> float:
    """Smallest margin of a layer's routing: each row's k-th against its next expert, and the coreset's border."""
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    best = -np.sort(-probs, axis=-1)  # [rows, E]
    gaps = [float((1 - best[:, k] / best[:, k - 1]).min())] if best.shape[1] > k else []
    if allowed is not None:
        share = -np.sort(-np.where(probs >= best[:, k - 1 : k], probs, 0.0).sum(0))
        share /= share.sum()
        size = int(allowed.sum())
        gaps.append(float(abs(np.cumsum(share) - top_p).min()))
        if size < len(share):
            gaps.append(float(1 - share[size] / share[size - 1]))
        inside = -np.sort(-np.where(allowed[None], probs, 0.0), axis=-1)
        gaps.append(float((1 - inside[:, k] / inside[:, k - 1]).min()) if inside.shape[1] > k else 1.0)
    return min(gaps, default=1.0)


def cases(seed: int, vocab: int = 318) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A prompt of every length with a half-masked block of every size."""
    rng = np.random.default_rng(seed)
    out = []
    for length in PROMPTS:
        for size in BLOCK_SIZES:
            block = np.where(rng.random(size) < 0.5, vocab + 1, rng.integers(0, vocab, size))
            out.append((tuple(rng.integers(0, vocab, length).tolist()), tuple(block.tolist())))
    return out


def check(checkpoint: Path, oracle_checkpoint: Path, seed: int, tolerance: float = TOLERANCE) -> None:
    engine = session(checkpoint)
    ties = 0
    for prompt, block in cases(seed):
        want_commit, want_preview, gap = expected(oracle_checkpoint, prompt, block)
        if gap < NEAR_TIE:
            ties += 1
            continue
        engine.reset(0)
        if prompt:
            got = logits_of(engine.step([rows(prompt, len(prompt))])[0])
            assert relative_error(got, want_commit) <= tolerance
            assert (got.argmax(-1) == want_commit.argmax(-1)).all()
        before = state_of(engine)
        got = logits_of(engine.step([rows(block, 0)])[0])
        assert relative_error(got, want_preview) <= tolerance
        assert (got.argmax(-1) == want_preview.argmax(-1)).all()
        after = state_of(engine)
        assert all(np.array_equal(before[n].view(np.uint32), after[n].view(np.uint32)) for n in before)
    assert ties <= 3, "too many near-ties for the test to mean anything"


@pytest.mark.parametrize("prefix", ["model", "language_model"])
@pytest.mark.parametrize("layout", ["fused", "per_expert"])
@pytest.mark.parametrize("seed", range(8))
def test_commit_and_preview_equal_the_oracle(seed: int, layout: Layout, prefix: Prefix) -> None:
    # the oracle's answer does not depend on how the same weights are stored
    check(tiny_checkpoint(seed, layout, prefix), tiny_checkpoint(seed), seed)


@pytest.mark.parametrize("name", SHAPES)
def test_other_shapes_equal_the_oracle(name: str) -> None:
    checkpoint = tiny_checkpoint(3, **SHAPES[name])
    check(checkpoint, checkpoint, 3, OTHER_TOLERANCE)


def test_a_tied_head_equals_the_oracle(tmp_path: Path) -> None:
    source = tiny_checkpoint(4, config={"tie_word_embeddings": True})
    tied = tmp_path / "tied"
    shutil.copytree(source, tied)
    index = json.loads((tied / "model.safetensors.index.json").read_text())
    shard = tied / index["weight_map"].pop("lm_head.weight")
    kept = {name: tensor for name, tensor in load_file(shard).items() if name != "lm_head.weight"}
    save_file(kept, shard)
    (tied / "model.safetensors.index.json").write_text(json.dumps(index))
    oracle = load_oracle(tied)
    oracle.t["lm_head.weight"] = oracle.t["model.embed_tokens.weight"]
    prompt = np.arange(40) * 7 % 300
    want, _ = oracle.commit(prompt, oracle.initial_state())
    got = logits_of(session(tied).step([rows(prompt, 40)])[0])
    assert relative_error(got, want) <= TOLERANCE


@pytest.mark.parametrize("seed", range(4))
def test_chunks_do_not_matter(seed: int) -> None:
    engine = session(tiny_checkpoint(seed))
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 318, 100)
    whole = logits_of(engine.step([rows(prompt, 100)])[0])
    want = state_of(engine)
    for _ in range(3):
        engine.reset(0)
        cuts = [0, *sorted(rng.choice(np.arange(1, 100), 6, replace=False).tolist()), 100]
        parts = [logits_of(engine.step([rows(prompt[a:b], b - a)])[0]) for a, b in pairwise(cuts)]
        assert relative_error(np.concatenate(parts), whole) <= TOLERANCE
        got = state_of(engine)
        assert engine.position(0) == 100
        assert all(relative_error(got[n], want[n]) <= TOLERANCE for n in want)


@pytest.mark.parametrize("seed", range(4))
def test_sequences_of_different_progress_equal_the_same_alone(seed: int) -> None:
    checkpoint = tiny_checkpoint(seed)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 318, n) for n in (45, 20, 3)]
    blocks = [rng.integers(0, 320, n) for n in (32, 32, 8)]
    # one sequence denoises, one commits a block and previews the next, one prefills
    plans = [(blocks[0], 0), (np.concatenate([blocks[1], blocks[0]]), 32), (blocks[2], 8)]
    alone, states = [], []
    single = session(checkpoint)
    for prompt, (tokens, commit) in zip(prompts, plans, strict=True):
        single.reset(0)
        single.step([rows(prompt, len(prompt))])
        alone.append(logits_of(single.step([rows(tokens, commit)])[0]))
        states.append(state_of(single))
    batched = session(checkpoint, sequences=3)
    batched.step([rows(p, len(p), slot=s) for s, p in enumerate(prompts)])
    together = batched.step([rows(t, c, slot=s) for s, (t, c) in enumerate(plans)])
    for slot, (got, want, state) in enumerate(zip(together, alone, states, strict=True)):
        assert relative_error(logits_of(got), want) <= TOLERANCE
        own = state_of(batched, slot)
        assert all(relative_error(own[n], state[n]) <= TOLERANCE for n in state)


def test_an_idle_slot_keeps_its_state() -> None:
    engine = session(tiny_checkpoint(1), sequences=3)
    engine.step([rows([1, 2, 3], 3, slot=s) for s in range(3)])
    before = state_of(engine, 1)
    engine.step([rows([7, 8, 9, 10], 2, slot=2)])
    after = state_of(engine, 1)
    assert engine.position(1) == 3
    assert all(np.array_equal(before[n], after[n]) for n in before)


def test_commit_and_first_preview_in_one_run_equal_two_runs() -> None:
    engine = session(tiny_checkpoint(2))
    rng = np.random.default_rng(2)
    prompt, full, masked = rng.integers(0, 318, 37), rng.integers(0, 318, 32), np.full(32, 319)
    engine.step([rows(prompt, 37)])
    start = engine.snapshot(0)
    together = logits_of(engine.step([rows(np.concatenate([full, masked]), 32)])[0])
    engine.restore(0, start)
    commit = logits_of(engine.step([rows(full, 32)])[0])
    preview = logits_of(engine.step([rows(masked, 0)])[0])
    assert relative_error(together[:32], commit) <= TOLERANCE
    assert relative_error(together[32:], preview) <= TOLERANCE


def test_commit_equals_transformers() -> None:
    import torch
    from oracle_support import oracle_module

    torch.set_num_threads(1)
    directory = tiny_checkpoint(5)
    model = oracle_module("make_checkpoint").build(directory.parent / "again", seed=5)
    model.set_experts_implementation("eager")
    prompt = np.random.default_rng(5).integers(0, 318, 64)
    with torch.no_grad():
        want = model(input_ids=torch.tensor(prompt[None]), use_cache=False).logits[0].numpy()
    engine = session(directory)
    got = logits_of(engine.step([rows(prompt, 64)])[0])
    assert relative_error(got, want) <= 1e-4
    assert (got.argmax(-1) == want.argmax(-1)).all()


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99, 1.0])
def test_coreset_top_p_is_read_at_run_time(top_p: float) -> None:
    checkpoint = tiny_checkpoint(6, num_experts=64, num_experts_per_tok=4)
    oracle = load_oracle(checkpoint)
    oracle.coreset_top_p = top_p
    rng = np.random.default_rng(6)
    prompt, block = rng.integers(0, 318, 20), rng.integers(0, 320, 32)
    _, state = oracle.commit(prompt, oracle.initial_state())
    engine = session(checkpoint)
    engine.step([rows(prompt, 20)])
    got = logits_of(engine.step([rows(block, 0, top_p=top_p)])[0])
    assert relative_error(got, oracle.preview(block, state)) <= TOLERANCE
