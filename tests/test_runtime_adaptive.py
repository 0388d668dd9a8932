"""The adaptive mode mixes validly and costs little more than the better mode; the length ramp ends replies in every mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from decode_support import DRAWN, MASK, NANO_IDS, PENALTIES, TINY_IDS, VOCAB, PricedSession, drive, nano_prompts, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_support import chat_ids, job_for, nano, nano_session

from clover.runtime.adaptive import AdaptiveDecoder, Kind, StepTimesSeen
from clover.runtime.autoregressive import AutoregressiveDecoder
from clover.runtime.decoder import DecodeCounts, Decoder, Progress
from clover.runtime.errors import RequestError
from clover.runtime.fill import FillDecoder
from clover.runtime.options import MODES, DecodeOptions, LengthRamp, Mode
from clover.runtime.scheduler.scheduler import Scheduler
from clover.runtime.speculative import SpeculativeDecoder


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 500),
    limit=st.integers(1, 70),
    drawn=DRAWN,
    penalties=PENALTIES,
    length=st.sampled_from([1, 33, 257]),
)
def test_adaptive_replies_end_where_they_must(
    seed: int, limit: int, drawn: dict[str, Any], penalties: dict[str, Any], length: int
) -> None:
    """Whatever the times, the limit and the options: as many tokens as asked for, steps in order, counts that agree."""
    r = np.random.default_rng(seed)
    ramp = LengthRamp(8, 40, 4.0)
    options = DecodeOptions(
        mode="adaptive", seed=seed, block_size=8, logprobs=2, length_ramp=ramp, **penalties, **drawn
    )
    session = PricedSession(tiny(seed % 3), lambda previews: float(r.uniform(0.1, 4.0 if previews else 2.0)))
    decoder = AdaptiveDecoder(
        [int(t) for t in r.integers(0, MASK, length)],
        options,
        **TINY_IDS,
        limit=limit,
        times=StepTimesSeen(),
        clock=lambda: session.now,
    )
    tokens = drive(session, decoder)
    assert decoder.truncated and len(tokens) == decoder.counts.response_tokens == limit
    assert all(t.id != MASK and t.logprob <= 1e-6 and len(t.alternatives) == 2 for t in tokens)
    assert min(t.step for t in tokens) >= 1 and max(t.step for t in tokens) <= decoder.counts.steps


def adaptive(
    session: PricedSession, prompt: Sequence[int], options: DecodeOptions, times: StepTimesSeen, limit: int, **ids: Any
) -> tuple[list[int], AdaptiveDecoder]:
    decoder = AdaptiveDecoder(prompt, options, **ids, limit=limit, times=times, clock=lambda: session.now)
    return [t.id for t in drive(session, decoder)], decoder


@pytest.mark.parametrize("penalties", [{}, {"presence_penalty": 0.9, "repetition_penalty": 1.2}])
def test_every_adaptive_token_is_either_modes_continuation(
    penalties: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With choices drawn at random, so that the mode changes anywhere, in the midst of blocks too. A random model's
    two passes agree on nothing, so that each token is one mode's alone."""
    r = np.random.default_rng(0)
    monkeypatch.setattr("clover.runtime.adaptive.leaving_pays", lambda *_: r.random() < 0.3)
    monkeypatch.setattr(StepTimesSeen, "allows_fill", lambda *_: r.random() < 0.4)
    given: dict[str, Any] = {"presence_penalty": 0.0, "repetition_penalty": 1.0, **penalties}
    options = DecodeOptions(**given, block_size=8, threshold=0.01)
    session = PricedSession(tiny(1), lambda previews: float(r.uniform(0.1, 4.0 if previews else 2.0)))
    times, changes, causal, filled = StepTimesSeen(), 0, 0, 0
    for prompt in ([5, 9, 2], [7] * 20, list(range(40))):
        reply, decoder = adaptive(session, prompt, options, times, 60, **TINY_IDS)
        changes += decoder.changes
        assert decoder.counts.response_tokens == len(reply) == 60
        for i, token in enumerate(reply):
            if _continuation(prompt, reply[:i], replace(options, mode="autoregressive"), 1) == [token]:
                causal += 1
                continue
            blocks = (
                (b, _continuation(prompt, reply[:b], replace(options, mode="fill"), 8)) for b in range(i, i - 8, -1)
            )
            assert any(b >= 0 and block[: i + 1 - b] == reply[b : i + 1] for b, block in blocks)
            filled += 1
    assert changes >= 15 and causal > 10 and filled > 10


def _continuation(prompt: Sequence[int], reply: Sequence[int], options: DecodeOptions, count: int) -> list[int]:
    """What one mode gives behind a reply so far, by a decoder that knows of no other."""
    so_far = Progress(reply, DecodeCounts(response_tokens=len(reply)), np.random.default_rng(0))
    common: dict[str, Any] = {"eos_ids": (), "vocab_size": VOCAB, "limit": len(reply) + count, "after": so_far}
    whole = [*prompt, *reply]
    if options.mode == "autoregressive":
        return [t.id for t in drive(tiny(1), AutoregressiveDecoder(whole, options, **common))]
    return [t.id for t in drive(tiny(1), FillDecoder(whole, options, mask_id=MASK, **common))]


@pytest.mark.parametrize("price", [1.5, 5.0, 12.0, 40.0])
def test_adaptive_is_hardly_slower_than_the_better_mode(price: float) -> None:
    """In priced steps: a preview costs `price` autoregressive steps. What is lost are a few tries, once it has learnt."""
    prompts, spent = nano_prompts(7), {}
    for mode in ("fill", "autoregressive"):
        session = PricedSession(nano().session, lambda previews: price if previews else 1.0)
        replies = [drive(session, nano().decoder(p, nano().options(mode=mode, max_new_tokens=128))) for p in prompts]
        spent[mode] = session.now / sum(map(len, replies))
    session, times = PricedSession(nano().session, lambda previews: price if previews else 1.0), StepTimesSeen()
    options = nano().options(mode="adaptive", max_new_tokens=128)
    for prompt in prompts[:3]:
        adaptive(session, prompt, options, times, 128, **NANO_IDS)
    session.now = 0.0
    tokens = sum(len(adaptive(session, p, options, times, 128, **NANO_IDS)[0]) for p in prompts)
    assert session.now / tokens < 1.05 * min(spent.values())


def test_fill_is_left_and_taken_up_as_it_pays() -> None:
    """The account: what fill may lose is bounded, whatever it gained before, and a try is paid by a share of the time."""
    times = StepTimesSeen()
    costs: dict[Kind, float] = {"preview": 10.0, "first": 12.0, "autoregressive": 1.0}
    for kind, seconds in costs.items():
        for _ in range(4):
            times.add(kind, seconds)
    for _ in range(50):
        times.note_block(1, 1.0, 32)  # pays: 12 against 32
    assert times.allows_fill(32)
    lost = 0.0
    while times.allows_fill(32):
        assert not times.note_block(1, 0.0, 1)
        lost += 9.0
    assert lost <= 4 * 10.0
    steps = 0
    while not times.allows_fill(32):
        times.add("autoregressive", 1.0)
        steps += 1
    assert 100 < steps < 1000
    assert not times.stale
    for _ in range(129):
        times.add("preview", 10.0)
    assert times.stale, "what the other mode costs is looked at again"
    times.add("autoregressive", 0.5)
    assert not times.stale and times.autoregressive == 0.5


def test_adaptive_begins_where_a_conversation_was_kept() -> None:
    """A scheduler resumes kept states, whichever mode the decoder begins with."""
    scheduler = Scheduler(nano_session(2), cache_bytes=2**26, cache_least_tokens=8, turn_opener=1)
    for question in ("Repeat: Alder Birch Cedar", "Parse the dispatch: Send UAV7 to Cedar, priority high."):
        prompt = chat_ids(nano(), "What is the weather in Oslo?", "Rain and 4 degrees.", question)
        want = [t.id for t in nano().generate(prompt, mode="autoregressive", max_new_tokens=20).tokens]
        for mode in ("adaptive", "self-speculative", "self-speculative"):
            job, owner = job_for(nano(), prompt, mode=mode, max_new_tokens=20)
            scheduler.submit([job])
            assert owner.wait() == want or mode == "adaptive"
    assert scheduler.cache.counts.hits >= 5
    scheduler.close()


def test_adaptive_refuses_aligned_blocks() -> None:
    with pytest.raises(RequestError, match="align_blocks"):
        nano().options(mode="adaptive", align_blocks=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("opened", ["by the template", "by the reply", "never", "in an earlier turn"])
def test_the_length_ramp_closes_thinking_before_it_ends_the_reply(mode: Mode, opened: str) -> None:
    """One `</think>` where thinking is open, then the end; neither comes without the ramp."""
    opens, closes, eos = 5, 9, 20

    def reply(ramp: LengthRamp | None, *unliked: int) -> tuple[list[int], Decoder]:
        prompt = {"by the template": [7, closes, opens, 8], "in an earlier turn": [7, opens, eos, 8]}.get(
            opened, [7, 8]
        )
        options = DecodeOptions(
            mode=mode, block_size=8, length_ramp=ramp, logit_bias=dict.fromkeys(unliked, -100.0), presence_penalty=2.0
        )
        common: dict[str, Any] = {"eos_ids": (eos,), "vocab_size": VOCAB, "limit": 60, "thinking_ids": (opens, closes)}
        session = PricedSession(tiny(0), lambda previews: 1.0)
        decoder: Decoder
        if mode == "autoregressive":
            decoder = AutoregressiveDecoder(prompt, options, **common)
        elif mode == "adaptive":
            times, clock = StepTimesSeen(), lambda: session.now
            decoder = AdaptiveDecoder(prompt, options, mask_id=MASK, times=times, clock=clock, **common)
        else:
            made = FillDecoder if mode == "fill" else SpeculativeDecoder
            decoder = made(prompt, options, mask_id=MASK, **common)
        return [t.id for t in drive(session, decoder)], decoder

    unliked = [closes, eos, opens]
    if opened == "by the reply":
        opens = reply(None, closes, eos)[0][2]  # a token that this model writes is made the marker
        unliked.remove(5)
    plain, decoder = reply(None, *unliked)
    assert decoder.truncated and len(plain) == 60 and closes not in plain
    ended, decoder = reply(LengthRamp(7, 8, 5000.0), *unliked)
    assert not decoder.truncated and 8 <= len(ended) <= 32
    if not opened.startswith("by"):
        assert closes not in ended
        return
    assert ended.count(closes) == 1 and ended.index(closes) >= 8
    assert opened == "by the template" or opens in ended[: ended.index(closes)]
