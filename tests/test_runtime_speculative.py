"""Self-speculative decoding equals the autoregressive mode, and tentative commits leave no trace."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from decode_support import DRAWN, MASK, PENALTIES, VOCAB, drive, nano_prompts, tiny
from engine_support import bundle, rows, state_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_support import tiny_checkpoint
from serve_support import Owner, job_for, nano, nano_session

from clover.engines.open import open_session
from clover.runtime import speculative
from clover.runtime.autoregressive import AutoregressiveDecoder
from clover.runtime.options import DecodeOptions, LengthRamp
from clover.runtime.scheduler.scheduler import Scheduler
from clover.runtime.session import SequenceRows, StepSession
from clover.runtime.speculative import SpeculativeDecoder


def both(
    session: StepSession,
    prompt: Sequence[int],
    options: DecodeOptions,
    eos: Sequence[int],
    limit: int,
    thinking: tuple[int, int] | None = None,
) -> SpeculativeDecoder:
    """Asserts that both modes give the same reply, token by token; returns the self-speculative decoder."""
    common: dict[str, Any] = {"eos_ids": eos, "vocab_size": VOCAB, "limit": limit, "thinking_ids": thinking}
    plain = AutoregressiveDecoder(prompt, options, **common)
    drafting = SpeculativeDecoder(prompt, options, mask_id=MASK, **common)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative, "LEAST_CHANCE", 0.0)  # these models are sure of nothing: verify all the same
        want, got = drive(session, plain), drive(session, drafting)
    assert [t.id for t in got] == [t.id for t in want]
    assert (drafting.truncated, drafting.counts.response_tokens) == (plain.truncated, plain.counts.response_tokens)
    for a, b in zip(got, want, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
        assert [i for i, _ in a.alternatives] == [i for i, _ in b.alternatives]
    assert drafting.counts.ramp_bias == plain.counts.ramp_bias
    assert drafting.counts.penalised == plain.counts.penalised
    return drafting


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    penalties=PENALTIES,
    drawn=DRAWN,
    seed=st.integers(0, 1000),
    length=st.sampled_from([1, 2, 31, 250, 256, 257, 300]),
    block=st.sampled_from([1, 8, 32]),
    limit=st.integers(1, 40),
    ends=st.booleans(),
    ramp=st.sampled_from([None, LengthRamp(4, 12, 6.0), LengthRamp(2, 3, -3.0)]),
    logprobs=st.sampled_from([0, 3]),
    thinking=st.sampled_from([None, (5, 9), (9, 5)]),
)
def test_random_models_say_the_same(
    penalties: dict[str, Any],
    drawn: dict[str, Any],
    seed: int,
    length: int,
    block: int,
    limit: int,
    ends: bool,
    ramp: LengthRamp | None,
    logprobs: int,
    thinking: tuple[int, int] | None,
) -> None:
    """Drafts of random models are nearly always wrong: every cycle takes its commit back."""
    options = DecodeOptions(
        mode="self-speculative", seed=seed, block_size=block, length_ramp=ramp, logprobs=logprobs, **penalties, **drawn
    )
    prompt = [int(t) for t in np.random.default_rng(seed).integers(0, MASK, length)]
    eos = tuple(range(20, 30)) if ends else ()
    both(tiny(seed % 3), prompt, options, eos, limit, thinking)


def test_drafts_that_repeat_themselves_are_penalised_row_by_row() -> None:
    """A model that is made to like few tokens drafts right, so that penalties of long kept drafts count."""
    kept = 0
    for seed in range(6):
        liked = {int(t): 60.0 for t in np.random.default_rng(seed).integers(0, 300, 3)}
        for more in ({"presence_penalty": 2.0}, {"frequency_penalty": 0.3, "presence_penalty": 0.0}):
            penalties: dict[str, Any] = {"repetition_penalty": 1.1, **more}
            options = DecodeOptions(logit_bias=liked, block_size=8, length_ramp=None, **penalties)
            kept += both(tiny(seed % 3), [seed, 7, 9], options, (), 60).counts.accepted
    assert kept > 100


def test_drafts_that_open_and_close_thinking_are_verified_row_by_row() -> None:
    """What the ramp raises changes within drafts that are kept."""
    kept = turns = 0
    for seed in range(12):
        opens, closes, other = (int(t) for t in np.random.default_rng(seed).choice(300, 3, replace=False))
        for ramp in (LengthRamp(0, 30, 3.0), LengthRamp(0, 1, 2.0), LengthRamp(0, 40, -4.0)):
            # the ramp decides between markers and endings that are liked about equally
            options = DecodeOptions(
                logit_bias={opens: 60.0, closes: 60.0, other: 60.0},
                block_size=8,
                length_ramp=ramp,
                frequency_penalty=(0.0, 0.05)[seed % 2],
                presence_penalty=0.0,
                repetition_penalty=1.0,
            )
            prompt = [7, opens, 9] if seed % 3 else [7, 9]
            decoder = both(tiny(seed % 3), prompt, options, (315,), 40, (opens, closes))
            reply = drive(
                tiny(seed % 3),
                AutoregressiveDecoder(
                    prompt, options, eos_ids=(315,), vocab_size=VOCAB, limit=40, thinking_ids=(opens, closes)
                ),
            )
            kept += decoder.counts.accepted
            turns += sum(t.id == opens and u.id == closes for t, u in itertools.pairwise(reply))
    assert kept > 100 and turns > 20


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "seed": 3, "block_size": 64}, {"presence_penalty": 0.9}])
def test_held_out_prompts_get_the_autoregressive_reply(options: dict[str, Any]) -> None:
    drafted = accepted = 0
    acting = {name: value for name, value in options.items() if name != "block_size"}
    for prompt in nano_prompts(8):
        plain = nano().generate(prompt, mode="autoregressive", max_new_tokens=120, **acting)
        decoder = nano().decoder(prompt, nano().options(mode="self-speculative", max_new_tokens=120, **options))
        assert [t.id for t in drive(nano().session, decoder)] == [t.id for t in plain.tokens]
        drafted, accepted = drafted + decoder.counts.drafted, accepted + decoder.counts.accepted
        assert decoder.counts.steps <= 1.5 * plain.statistics.steps
    assert accepted > 0.2 * drafted > 100


def test_nothing_is_redone_when_all_of_a_draft_was_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of a reply that repeats itself takes one run once drafts come true: its commit previews the next."""
    monkeypatch.setattr(speculative, "LEAST_CHANCE", 0.0)  # a biased token's own probability is low
    options = nano().options(mode="self-speculative", block_size=8, logit_bias={40: 100.0}, max_new_tokens=97)
    decoder = nano().decoder([9, 9, 9], options)
    assert [t.id for t in drive(nano().session, decoder)] == [40] * 97
    assert decoder.counts.accepted == decoder.counts.drafted
    assert decoder.counts.steps == 1 + 96 // 8


def test_streams_stop_where_the_autoregressive_stream_stops() -> None:
    messages = [{"role": "user", "content": "Parse the dispatch: Send UAV7 to Cedar, priority high."}]
    whole = nano().chat(messages, mode="autoregressive").text
    for start in range(0, len(whole) - 5, 7):
        stop = whole[start : start + 4]
        plain, drafted = (nano().chat(messages, mode=m, stop=[stop]) for m in ("autoregressive", "self-speculative"))
        assert (
            (drafted.text, drafted.stop_string) == (plain.text, stop) == (whole[: whole.index(stop)], plain.stop_string)
        )
        assert [t.id for t in drafted.tokens] == [t.id for t in plain.tokens]


def test_speculative_jobs_share_steps_with_others() -> None:
    session = nano_session(3)
    scheduler = Scheduler(session, cache_bytes=2**26)
    prompts = nano_prompts(4)
    wanted: list[tuple[Owner, list[int]]] = []
    for n, prompt in enumerate(prompts):
        for mode in ("self-speculative", ("fill", "autoregressive")[n % 2]):
            job, owner = job_for(nano(), prompt, mode=mode, max_new_tokens=90)
            scheduler.submit([job])
            wanted.append((owner, [t.id for t in nano().generate(prompt, mode=mode, max_new_tokens=90).tokens]))
    for owner, tokens in wanted:
        assert owner.wait() == tokens
    scheduler.close()


# -- taking a commit back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("moved", [False, True])
def test_a_tentative_commit_taken_back_leaves_no_trace(moved: bool) -> None:
    """Bit for bit, in every layer, beside another sequence that goes on, and even if the slot was moved meanwhile."""
    r = np.random.default_rng(1)
    session = open_session(bundle(tiny_checkpoint(1)), sequences=3, max_context=128, threads=1, cache=False)
    plain = open_session(bundle(tiny_checkpoint(1)), sequences=3, max_context=128, threads=1, cache=False)
    prompt, draft, right, beside = (r.integers(0, MASK, n) for n in (11, 8, 5, 8))
    slot = 2 if moved else 0
    for engine, drafts in ((session, True), (plain, False)):
        engine.step([rows(prompt, 11), rows(beside, 8, slot=1)])
        if drafts:
            engine.step([_with(rows(np.concatenate([draft, [MASK] * 8]), 8), tentative=True)])
            assert engine.position(0) == 19
        engine.restore(slot, engine.snapshot(0))
        engine.step([rows(beside, 8, slot=1)])
    got = session.step([_with(rows(right, 5, slot=slot), undo=True)])[0].ids
    np.testing.assert_array_equal(got, plain.step([rows(right, 5, slot=slot)])[0].ids)
    for kept in (slot, 1):
        assert session.position(kept) == plain.position(kept) == 16
        got_state, want_state = state_of(session, kept), state_of(plain, kept)
        for name in want_state:
            np.testing.assert_array_equal(got_state[name], want_state[name], err_msg=name)


def test_only_the_last_tentative_commit_can_be_taken_back() -> None:
    session = tiny(0)
    some = rows([1, 2, 3], 3)
    session.reset(0)
    for before in ([some], [_with(some, tentative=True), some], [_with(some, tentative=True), _with(some, undo=True)]):
        for step in before:
            session.step([step])
        with pytest.raises(ValueError, match="not tentative"):
            session.step([_with(some, undo=True)])
    session.step([_with(some, tentative=True)])
    session.reset(0)
    with pytest.raises(ValueError, match="not tentative"):
        session.step([_with(some, undo=True)])


def _with(given_rows: SequenceRows, *, tentative: bool = False, undo: bool = False) -> SequenceRows:
    return replace(given_rows, tentative=tentative, undo=undo)


# -- the distribution -----------------------------------------------------------------------------------------


def test_sampled_replies_have_the_autoregressive_distribution() -> None:
    """Chi-square of 700 replies of 3 tokens in each mode, with seeds of their own: 8 outcomes, 7 degrees of freedom."""
    counts: list[Counter[tuple[int, ...]]] = []
    for first, mode in ((0, AutoregressiveDecoder), (10_000, SpeculativeDecoder)):
        seen: Counter[tuple[int, ...]] = Counter()
        for seed in range(first, first + 700):
            options = DecodeOptions(temperature=3.0, top_k=2, seed=seed, block_size=8, presence_penalty=0.5)
            more: dict[str, Any] = {"mask_id": MASK} if mode is SpeculativeDecoder else {}
            decoder = mode([3, 1, 4], options, eos_ids=(), vocab_size=VOCAB, limit=3, **more)
            seen[tuple(t.id for t in drive(tiny(2), decoder))] += 1
        counts.append(seen)
    outcomes = set(counts[0]) | set(counts[1])
    assert len(outcomes) == 8
    statistic = sum((counts[0][o] - counts[1][o]) ** 2 / (counts[0][o] + counts[1][o]) for o in outcomes)
    assert statistic < 29.9  # exceeded by one run in 10,000
