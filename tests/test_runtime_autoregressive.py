"""Plain autoregressive decoding against the oracle's causal pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import NANO, bundle
from oracle_support import load_oracle, tiny_checkpoint

from clover.engines.open import open_session
from clover.runtime.autoregressive import AutoregressiveDecoder
from clover.runtime.decoder import TokensEvent
from clover.runtime.loop import StepTimes, decode
from clover.runtime.options import DecodeOptions
from clover.runtime.session import StepSession

GREEDY = DecodeOptions(mode="autoregressive", presence_penalty=0.0, repetition_penalty=1.0)


@lru_cache(maxsize=4)
def engine(checkpoint: Path) -> StepSession:
    return open_session(bundle(checkpoint), max_context=512, threads=1, cache=False)


def generate(
    checkpoint: Path, prompt: Sequence[int], o: DecodeOptions, *, eos: Sequence[int] = (), limit: int = 16
) -> tuple[list[int], AutoregressiveDecoder]:
    session = engine(checkpoint)
    session.reset(0)
    vocab = 768 if checkpoint == NANO else 320
    decoder = AutoregressiveDecoder(prompt, o, eos_ids=eos, vocab_size=vocab, limit=limit)
    events = list(decode(session, decoder, 0, StepTimes()))
    return [t.id for e in events if isinstance(e, TokensEvent) for t in e.tokens], decoder


def oracle_greedy(checkpoint: Path, prompt: Sequence[int], o: DecodeOptions, count: int, mask: int) -> list[int]:
    """The causal arg max, one token at a time."""
    oracle = load_oracle(checkpoint)
    logits, state = oracle.commit(list(prompt), oracle.initial_state())
    out: list[int] = []
    for _ in range(count):
        row = logits[-1].copy()
        row[mask] = -np.inf
        for token in set(out):
            row[token] *= o.repetition_penalty if row[token] < 0 else 1 / o.repetition_penalty
            row[token] -= o.presence_penalty + o.frequency_penalty * out.count(token)
        out.append(int(row.argmax()))
        logits, state = oracle.commit(out[-1:], state)
    return out


def prompt_of(length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(length).integers(0, 318, length)]


@pytest.mark.parametrize(
    "penalties", [{}, {"presence_penalty": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4}]
)
@pytest.mark.parametrize("length", [1, 32, 300])
def test_greedy_equals_the_oracle(length: int, penalties: dict[str, Any]) -> None:
    o = replace(GREEDY, **penalties)  # 300: the prompt takes two steps
    got, decoder = generate(tiny_checkpoint(7), prompt_of(length), o)
    assert got == oracle_greedy(tiny_checkpoint(7), prompt_of(length), o, 16, mask=319)
    assert decoder.truncated and decoder.counts.steps == 16
    assert decoder.counts.prefill_steps == (1 if length == 300 else 0)


def test_nano_equals_the_oracle_and_stops_at_its_end() -> None:
    from clover.runtime.text.tokenizer import Tokenizer

    text = "<|im_start|>user\nParse the dispatch: Send UAV7 to Cedar, priority high.<|im_end|>\n<|im_start|>assistant\n"
    prompt = Tokenizer.load(NANO).encode(text)
    got, decoder = generate(NANO, prompt, GREEDY, eos=(2, 0), limit=100)
    assert not decoder.truncated and 0 < len(got) < 100
    want = oracle_greedy(NANO, prompt, GREEDY, len(got) + 1, mask=3)
    assert got == want[:-1] and want[-1] in (2, 0)


def test_an_end_is_not_part_of_the_reply() -> None:
    whole, _ = generate(tiny_checkpoint(7), prompt_of(5), replace(GREEDY, frequency_penalty=2.0))
    got, decoder = generate(tiny_checkpoint(7), prompt_of(5), replace(GREEDY, frequency_penalty=2.0), eos=(whole[6],))
    assert got == whole[: whole.index(whole[6])] and not decoder.truncated


def test_sampling_repeats_with_its_seed() -> None:
    hot = replace(GREEDY, temperature=1.0, seed=3)
    first, _ = generate(tiny_checkpoint(7), prompt_of(5), hot)
    assert generate(tiny_checkpoint(7), prompt_of(5), hot)[0] == first
    assert generate(tiny_checkpoint(7), prompt_of(5), replace(hot, seed=4))[0] != first
    assert generate(tiny_checkpoint(7), prompt_of(5), replace(hot, top_k=1))[0] == generate(
        tiny_checkpoint(7), prompt_of(5), GREEDY
    )[0]  # fmt: skip
