"""The block loop on ONNX Runtime against a plain NumPy decode over the float64 oracle, and its own invariants."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import NANO, bundle
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_support import tiny_checkpoint
from plain_decode import logsumexp, plain_decode
from safetensors.numpy import load_file, save_file

from clover.engines.open import open_session
from clover.runtime.decoder import StepEvent, TokensEvent
from clover.runtime.fill import FillDecoder
from clover.runtime.loop import StepTimes, decode
from clover.runtime.options import DecodeOptions
from clover.runtime.select import positions_to_fill
from clover.runtime.session import Candidates, SequenceRows, StepSession

PLAIN = DecodeOptions(presence_penalty=0.0, repetition_penalty=1.0, block_size=8)


@lru_cache(maxsize=8)
def sharp(seed: int, factor: float = 5.0) -> Path:
    """A tiny checkpoint whose head is scaled, so that confidences lie all over (0, 1) as a trained model's do."""
    source = tiny_checkpoint(seed)
    target = source.with_name(f"{source.name}-sharp")
    shutil.copytree(source, target)
    for shard in target.glob("*.safetensors"):
        tensors = load_file(shard)
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"] *= np.float32(factor)
            save_file(tensors, shard)
    return target


@lru_cache(maxsize=8)
def engine(checkpoint: Path) -> StepSession:
    return open_session(bundle(checkpoint), max_context=512, threads=1, cache=False)


@dataclass
class Got:
    tokens: list[int]
    steps: list[StepEvent]
    decoder: FillDecoder
    runs: list[SequenceRows]

    @property
    def steps_per_block(self) -> list[int]:
        return [sum(s.block == b for s in self.steps) for b in range(1, self.decoder.counts.blocks + 1)]


class Recorded:
    """A session that notes what it was asked to run."""

    def __init__(self, inner: Any, max_rows: int | None = None) -> None:
        self._inner = inner
        self.runs: list[SequenceRows] = []
        self.max_rows = max_rows or inner.max_rows

    def step(self, rows: Sequence[SequenceRows], candidates: int = 1) -> list[Candidates]:
        self.runs += rows
        assert all(len(r.tokens) <= self.max_rows for r in rows)
        out: list[Candidates] = self._inner.step(rows, candidates)
        return out


def fill(
    session: Any, prompt: Sequence[int], o: DecodeOptions, *, mask: int, eos: Sequence[int] = (), limit: int = 24,
    vocab: int = 320, max_rows: int | None = None,
) -> Got:  # fmt: skip
    """Runs the runtime's decoder and checks what must hold of every decode."""
    decoder = FillDecoder(prompt, o, mask_id=mask, eos_ids=eos, vocab_size=vocab, limit=limit)
    recorded = Recorded(session, max_rows)
    if hasattr(session, "reset"):
        session.reset(0)
    events = list(decode(recorded, decoder, 0, StepTimes()))  # type: ignore[arg-type]
    steps = [e for e in events if isinstance(e, StepEvent)]
    tokens = [t.id for e in events if isinstance(e, TokensEvent) for t in e.tokens]
    check_steps(steps, o)
    assert decoder.done and decoder.counts.response_tokens == len(tokens)
    assert mask not in tokens and not set(tokens) & set(eos)
    return Got(tokens, steps, decoder, recorded.runs)


def check_steps(steps: Sequence[StepEvent], o: DecodeOptions) -> None:
    """A filled token never changes; every step fills exactly the positions it says, one at least; one if unsure."""
    before: StepEvent | None = None
    for event in steps:
        fresh = before is None or before.block != event.block
        assert event.step == (1 if fresh or before is None else before.step + 1)
        if before is not None and not fresh:
            changed = [i for i, (a, b) in enumerate(zip(before.tokens, event.tokens, strict=True)) if a != b]
            assert all(before.tokens[i] is None for i in changed), "a filled token changed"
            assert tuple(changed) == event.filled
        assert len(event.filled) >= 1 and all(event.tokens[i] is not None for i in event.filled)
        sure = [c > o.threshold for c in event.confidence]
        assert all(sure) or len(sure) == 1
        before = event


def check(
    checkpoint: Path, prompt: Sequence[int], o: DecodeOptions, *, eos: Sequence[int] = (), limit: int = 24
) -> Got:
    """The runtime's decode equals the plain one: tokens, steps of every block, positions of every step."""
    plain = plain_decode(checkpoint)
    want = plain.run(prompt, o, eos, limit)
    assert want.margin > 1e-5, "a near-tie: float32 may decide either way, choose another prompt"
    got = fill(engine(checkpoint), prompt, o, mask=plain.mask, eos=eos, limit=limit)
    assert got.tokens == want.tokens
    assert got.steps_per_block == want.steps_per_block
    assert [list(s.filled) for s in got.steps] == want.fills
    assert got.decoder.truncated == want.truncated
    return got


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng([length, seed]).integers(0, 318, length)]


# -- against the plain decode ---------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.2, 0.95, 1.0])
@pytest.mark.parametrize("length", [1, 7, 8, 45])
def test_fill_equals_the_plain_decode(length: int, threshold: float) -> None:
    got = check(sharp(0), prompt_of(length), replace(PLAIN, threshold=threshold))
    assert got.decoder.counts.blocks == 3 and len(got.tokens) == 24
    if threshold == 1.0:
        assert all(len(s.filled) == 1 for s in got.steps) and len(got.steps) == 24
    if threshold == 0.2:
        assert any(len(s.filled) > 1 for s in got.steps)
    # every block but the first is committed in the run that previews the next one: no run commits only
    assert got.decoder.counts.prefill_steps == 0
    assert [r.commit for r in got.runs if r.commit] == [length, 8, 8]
    assert all(len(r.tokens) == r.commit + 8 for r in got.runs)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_other_block_sizes_equal_the_plain_decode(size: int) -> None:
    check(sharp(1), prompt_of(19), replace(PLAIN, threshold=0.3, block_size=size), limit=size + 5)


PENALTIES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.5},
    "repetition below 1": {"repetition_penalty": 0.7},
    "frequency": {"frequency_penalty": 1.5},
    "all": {"presence_penalty": 0.9, "repetition_penalty": 1.05, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {132: -100.0, 26: -2.5, 200: 4.5, 319: 100.0}},  # 319 is the mask: never chosen
    "bias and penalties": {"logit_bias": {5: 9.0, 6: 8.5}, "presence_penalty": 1.5, "frequency_penalty": 0.7},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_and_biases_equal_the_plain_decode(name: str) -> None:
    o = replace(PLAIN, threshold=0.3, **PENALTIES[name])
    prompt = prompt_of(13)
    got = check(sharp(2), prompt, o, limit=32)
    assert got.tokens != fill(engine(sharp(2)), prompt, replace(PLAIN, threshold=0.3), mask=319, limit=32).tokens


def test_penalties_never_see_the_prompt() -> None:
    free = replace(PLAIN, threshold=0.3)
    tokens = fill(engine(sharp(2)), prompt_of(13), free, mask=319, limit=8).tokens
    prompt = [*tokens, *prompt_of(5)]  # full of what the model likes to say
    check(sharp(2), prompt, replace(free, presence_penalty=2.0, repetition_penalty=2.0), limit=8)
    check(sharp(2), prompt, replace(free, presence_penalty=2.0, repetition_penalty=2.0, align_blocks=True), limit=11)


@pytest.mark.parametrize("length", [3, 8, 21])
def test_aligned_blocks_equal_the_plain_decode(length: int) -> None:
    got = check(sharp(0), prompt_of(length), replace(PLAIN, threshold=0.4, align_blocks=True))
    tail = length % 8
    assert got.runs[0].commit == length - tail
    assert got.steps[0].tokens[:tail] == tuple(prompt_of(length)[length - tail :])
    assert len(got.steps[0].tokens) == 8


@pytest.mark.parametrize("threshold", [0.2, 1.0])
@pytest.mark.parametrize("limit", [1, 5, 7, 8, 9, 16])
def test_the_limit_cuts_in_mid_block_and_at_a_border(limit: int, threshold: float) -> None:
    o = replace(PLAIN, threshold=threshold)
    whole = fill(engine(sharp(3)), prompt_of(9), o, mask=319).tokens
    got = check(sharp(3), prompt_of(9), o, limit=limit)
    assert got.tokens == whole[:limit] and got.decoder.truncated


@pytest.mark.parametrize("threshold", [0.2, 1.0])
@pytest.mark.parametrize("at", [0, 3, 7, 8, 12, 23])
def test_an_end_in_mid_block_lets_nothing_after_it_leak(at: int, threshold: float) -> None:
    """With threshold 1 positions fill one by one in any order, so ends are filled with masks still before them."""
    o = replace(PLAIN, threshold=threshold)
    whole = fill(engine(sharp(4)), prompt_of(11), o, mask=319).tokens
    end = whole[at]
    got = check(sharp(4), prompt_of(11), o, eos=(end, 318))
    assert got.tokens == whole[: whole.index(end)] and not got.decoder.truncated


def test_an_end_with_a_mask_before_it_does_not_end_the_reply() -> None:
    o = replace(PLAIN, threshold=1.0)
    whole = fill(engine(sharp(4)), prompt_of(11), o, mask=319)
    early = next(s for s in whole.steps if s.filled[0] > 0 and None in s.tokens[: s.filled[0]])
    end = early.tokens[early.filled[0]]
    assert end is not None
    got = check(sharp(4), prompt_of(11), o, eos=(end,))
    assert len(got.steps) > early.step, "the reply ended with a mask before its end"


@pytest.mark.parametrize("limit", range(1, 9))
def test_an_end_beyond_the_limit_does_not_make_a_reply_whole(limit: int) -> None:
    """Whether a reply was cut must not depend on the order in which positions were filled."""
    whole = fill(engine(sharp(4)), prompt_of(11), replace(PLAIN, threshold=1.0), mask=319).tokens
    end = whole[limit]
    for threshold in (0.01, 0.2, 1.0):
        o = replace(PLAIN, threshold=threshold)
        tokens = fill(engine(sharp(4)), prompt_of(11), o, mask=319, limit=limit).tokens
        got = check(sharp(4), prompt_of(11), o, eos=(end,), limit=limit)
        assert got.decoder.truncated == (end not in tokens)


@pytest.mark.parametrize("max_rows", [64, 40, 17])
def test_a_long_prompt_is_committed_in_chunks(max_rows: int) -> None:
    o = replace(PLAIN, threshold=0.3)
    whole = check(sharp(5), prompt_of(100), o, limit=10)
    chunks = fill(engine(sharp(5)), prompt_of(100), o, mask=319, limit=10, max_rows=max_rows)
    assert chunks.tokens == whole.tokens and [s.filled for s in chunks.steps] == [s.filled for s in whole.steps]
    assert chunks.decoder.counts.prefill_steps >= 1
    assert sum(r.commit for r in chunks.runs) == 100 + 8 and all(
        not len(r.logit_rows) for r in chunks.runs[: chunks.decoder.counts.prefill_steps]
    )


def test_confidence_is_the_raw_probability_before_penalties_and_temperature() -> None:
    plain = plain_decode(sharp(6))
    prompt = prompt_of(6)
    _, state = plain.oracle.commit(prompt, plain.oracle.initial_state())
    raw = plain.preview(prompt, [None] * 8, state)
    raw[:, 319] = -np.inf
    for o in (
        PLAIN,
        replace(PLAIN, logit_bias={9: 50.0}),
        replace(PLAIN, temperature=2.0, seed=1, logit_bias={9: 2.0}),
    ):
        first = fill(engine(sharp(6)), prompt, replace(o, threshold=0.999999), mask=319, limit=8).steps[0]
        (position,), (confidence,) = first.filled, first.confidence
        token = first.tokens[position]
        assert token is not None
        assert confidence == pytest.approx(np.exp(raw[position, token] - logsumexp(raw[position])), rel=1e-4)


@pytest.mark.parametrize("text", ["Parse the dispatch: Send UAV7 to Cedar, priority high.", "Echo: a b c d e f g"])
@pytest.mark.parametrize("threshold", [0.2, 0.95])
def test_nano_equals_the_plain_decode(text: str, threshold: float) -> None:
    from clover.runtime.text.tokenizer import Tokenizer

    prompt = Tokenizer.load(NANO).encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
    plain = plain_decode(NANO)
    o = replace(PLAIN, threshold=threshold, block_size=32)
    want = plain.run(prompt, o, (2, 0), 64)
    got = fill(engine(NANO), prompt, o, mask=3, eos=(2, 0), limit=64, vocab=768)
    assert got.tokens == want.tokens and got.steps_per_block == want.steps_per_block
    assert got.decoder.truncated == want.truncated


# -- the rule itself ------------------------------------------------------------------------------------------


@given(
    confidence=st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.5000001, 0.95, 1.0]), min_size=1, max_size=64),
    threshold=st.sampled_from([0.2, 0.5, 0.95, 1.0]),
)
def test_forced_progress_and_ties(confidence: list[float], threshold: float) -> None:
    values = np.array(confidence, np.float32)
    got = positions_to_fill(values, threshold).tolist()
    sure = [i for i, c in enumerate(values.tolist()) if c > threshold]
    assert got == (sure or [values.tolist().index(max(values.tolist()))])


class Scripted:
    """A session that answers with tokens and confidences of a hypothesis' choosing."""

    max_rows = 64

    def __init__(self, seed: int, vocab: int, mask: int) -> None:
        self._rng, self._vocab, self._mask = np.random.default_rng(seed), vocab, mask
        self.committed: list[int] = []

    def step(self, rows: Sequence[SequenceRows], candidates: int = 1) -> list[Candidates]:
        (r,) = rows
        self.committed += r.tokens[: r.commit].tolist()
        shape = (len(r.logit_rows), 1)
        assert (r.tokens[r.logit_rows] == self._mask).all(), "logits of a filled position are not needed"
        ids = self._rng.integers(0, self._vocab - 1, shape)
        chance = self._rng.choice(np.array([0.1, 0.5, 0.9, 1.0], np.float32), shape)
        return [Candidates(ids, np.log(chance), np.zeros(shape, np.float32))]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    prompt=st.lists(st.integers(0, 8), min_size=1, max_size=90),
    size=st.sampled_from([8, 16]),
    threshold=st.sampled_from([0.2, 0.5, 0.95, 1.0]),
    limit=st.integers(1, 40),
    align=st.booleans(),
)
def test_a_decode_of_anything_keeps_its_invariants(
    seed: int, prompt: list[int], size: int, threshold: float, limit: int, align: bool
) -> None:
    mask, eos = 9, (0,)
    o = replace(PLAIN, block_size=size, threshold=threshold, align_blocks=align)
    session = Scripted(seed, 10, mask)
    got = fill(session, prompt, o, mask=mask, eos=eos, limit=limit, vocab=10)
    assert len(got.tokens) <= limit and got.decoder.truncated == (len(got.tokens) == limit)
    # what was committed is the prompt and whole blocks of what was shown, never a mask
    blocks = {s.block: s.tokens for s in got.steps}
    tail = len(prompt) % size if align else 0
    shown = [t for b in sorted(blocks) for t in blocks[b]][tail:]
    assert mask not in session.committed
    assert session.committed == [*prompt, *shown][: len(session.committed)]
    assert got.tokens == shown[: len(got.tokens)]
    if threshold == 1.0:
        assert all(len(s.filled) == 1 for s in got.steps)


def test_a_sequence_alone_draws_what_it_draws_among_others() -> None:
    """Sampling is repeatable by its seed, and does not depend on what else the engine runs."""
    o = replace(PLAIN, threshold=0.5, temperature=1.0, seed=7)

    def draw(options: DecodeOptions, others: Mapping[int, int]) -> list[int]:
        session = open_session(bundle(sharp(0)), sequences=3, max_context=256, threads=1, cache=False)
        decoders = {1: FillDecoder(prompt_of(9), options, mask_id=319, eos_ids=(), vocab_size=320, limit=20)}
        for slot, seed in others.items():
            other = replace(o, seed=seed, top_k=5)
            decoders[slot] = FillDecoder(prompt_of(30, slot), other, mask_id=319, eos_ids=(), vocab_size=320, limit=40)
        tokens: list[int] = []
        while not decoders[1].done:
            live = [(slot, d) for slot, d in sorted(decoders.items()) if not d.done]
            rows = [d.plan(slot, session.max_rows) for slot, d in live]
            answers = session.step(rows, max(d.candidates for _, d in live))
            for (slot, d), candidates in zip(live, answers, strict=True):
                for event in d.accept(candidates):
                    if slot == 1 and isinstance(event, TokensEvent):
                        tokens += [t.id for t in event.tokens]
        return tokens

    alone = draw(o, {})
    assert alone == draw(o, {}) == draw(o, {0: 1, 2: 2}) and len(alone) == 20
    assert alone != draw(replace(o, seed=8), {})
