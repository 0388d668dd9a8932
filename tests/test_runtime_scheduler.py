"""The scheduler: batched output equals the output alone, nothing leaks, nobody is left waiting."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_support import WatchedSession, chat_ids, job_for, nano, nano_session, wait_until

from clover.runtime.scheduler.cache import ConversationCache, turn_borders
from clover.runtime.scheduler.scheduler import DrainingError, QueueFullError, Scheduler
from clover.runtime.session import StateSnapshot

LONG = "Repeat: " + " ".join(f"Alder {i} Birch" for i in range(40))
ENDLESS = {
    "max_new_tokens": 1000,
    "threshold": 1.0,
    "logit_bias": {0: -100.0, 2: -100.0},
}  # never an end, one token a step
OPENER = 1  # <|im_start|> of the nano tokenizer


@contextmanager
def scheduled(sequences: int = 3, **options: Any) -> Iterator[tuple[Scheduler, WatchedSession]]:
    session = WatchedSession(nano_session(sequences))
    scheduler = Scheduler(session, turn_opener=OPENER, **options)
    try:
        yield scheduler, session
    finally:
        session.gate.set()
        scheduler.close()


@pytest.fixture(autouse=True)
def no_faults(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The scheduler logs a fault of its own as an error; only tests that cause one may see it."""
    yield
    faults = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not faults or "failing" in request.node.name


def alone(prompt: Sequence[int], **options: Any) -> list[int]:
    return [t.id for t in nano().generate(prompt, **options).tokens]


def test_a_reply_in_a_batch_is_the_reply_alone() -> None:
    engine = nano()
    questions = ["What is the weather in Oslo on 2026-03-05?", "Repeat: Alder 7 Kai", LONG, "Hello", "Repeat: Elm"]
    asked = [
        (chat_ids(engine, question), options)
        for question in questions
        for options in (
            {"max_new_tokens": 70},
            {"max_new_tokens": 40, "mode": "autoregressive"},
            {"max_new_tokens": 50, "block_size": 16, "temperature": 0.8, "seed": 5, "top_k": 20},
            {"max_new_tokens": 45, "presence_penalty": 0.9, "repetition_penalty": 1.2, "logprobs": 3},
            {"max_new_tokens": 40, "mode": "self-speculative", "block_size": 8},
            {"max_new_tokens": 40, "mode": "self-speculative", "temperature": 0.7, "seed": 3},
        )
    ]
    with scheduled(3) as (scheduler, session):
        pairs = [job_for(engine, prompt, **options) for prompt, options in asked]
        scheduler.submit([job for job, _ in pairs])
        got = [owner.wait() for _, owner in pairs]
        assert scheduler.live == scheduler.queued == 0
    assert got == [alone(prompt, **options) for prompt, options in asked]
    assert {owner.outcomes[0] for _, owner in pairs} == {"done"}
    assert max(s for s, _ in session.shapes) == 3
    assert all(longest <= 64 for s, longest in session.shapes if s > 1), "a long prompt held the others up"


def test_alternatives_do_not_depend_on_what_others_ask_for() -> None:
    engine = nano()
    prompt = chat_ids(engine, LONG)
    options = {"max_new_tokens": 40, "logprobs": 3, "presence_penalty": 2.0, "repetition_penalty": 2.0}
    wanted = [[i for i, _ in t.alternatives] for t in engine.generate(prompt, **options).tokens]
    with scheduled(2) as (scheduler, _):
        job, owner = job_for(engine, prompt, **options)
        sampling, other = job_for(engine, prompt, max_new_tokens=60, temperature=1.0, seed=1)  # asks for 768 candidates
        scheduler.submit([job, sampling])
        owner.wait()
        other.wait()
    assert owner.alternatives == wanted


@pytest.mark.parametrize("mode", ["fill", "autoregressive", "self-speculative"])
def test_a_job_knows_what_its_slot_holds(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = nano()
    with scheduled(1) as (scheduler, session):
        blocks = {} if mode == "autoregressive" else {"block_size": 8}
        job, owner = job_for(engine, chat_ids(engine, LONG), max_new_tokens=60, mode=mode, **blocks)
        lengths: list[tuple[int, int]] = []
        push = owner.push

        def compare(events: Any) -> bool:
            lengths.append((len(job.committed), session.position(0)))
            return push(events)

        monkeypatch.setattr(owner, "push", compare)
        scheduler.submit([job])
        owner.wait()
    assert len(lengths) > 5 and all(known == held for known, held in lengths)


def test_a_lone_request_gets_whole_chunks_and_one_row_of_slots() -> None:
    engine = nano()
    prompt = chat_ids(engine, LONG)
    assert len(prompt) > 128
    with scheduled(4) as (scheduler, session):
        job, owner = job_for(engine, prompt, max_new_tokens=20)
        scheduler.submit([job])
        owner.wait()
    assert {s for s, _ in session.shapes} == {1}
    assert max(longest for _, longest in session.shapes) > 128


def test_a_short_reply_is_not_held_up_by_a_long_prompt() -> None:
    engine = nano()
    with scheduled(2, shared_rows=16) as (scheduler, _):
        slow, slow_owner = job_for(engine, chat_ids(engine, LONG * 3), max_new_tokens=8)
        quick, quick_owner = job_for(engine, chat_ids(engine, "Hello"), max_new_tokens=8, block_size=8)
        slow.least_rows = 16
        scheduler.submit([slow, quick])
        quick_owner.wait()
        assert not slow_owner.tokens
        slow_owner.wait()


def test_slots_move_to_the_front_and_keep_their_state() -> None:
    engine = nano()
    short, long = chat_ids(engine, "Hello"), chat_ids(engine, LONG)
    with scheduled(3) as (scheduler, session):
        pairs = [job_for(engine, short, max_new_tokens=3), job_for(engine, short, max_new_tokens=3)]
        pairs.append(job_for(engine, long, max_new_tokens=100, presence_penalty=0.9))
        scheduler.submit([job for job, _ in pairs])
        got = pairs[2][1].wait()
    assert got == alone(long, max_new_tokens=100, presence_penalty=0.9)
    assert session.shapes[0][0] == 3 and session.shapes[-1][0] == 1


def test_a_job_cancelled_in_the_middle_of_its_prompt_ends_within_a_chunk() -> None:
    engine = nano()
    prompt = (chat_ids(engine, LONG) * 20)[:1900]
    with scheduled(1) as (scheduler, session):
        session.gate.clear()
        job, owner = job_for(engine, prompt, max_new_tokens=5)
        scheduler.submit([job])
        wait_until(lambda: scheduler.live == 1)
        scheduler.cancel(job)
        session.gate.set()
        assert owner.wait() == [] and owner.outcomes == ["cancelled"]
        assert len(session.shapes) <= 1, "the rest of the prompt was computed for nobody"
        job, owner = job_for(engine, prompt[:300], max_new_tokens=20)
        scheduler.submit([job])
        assert owner.wait() == alone(prompt[:300], max_new_tokens=20), "half a prompt was left behind"


def test_cancelled_jobs_end_within_a_step_and_free_their_place() -> None:
    engine = nano()
    prompt = chat_ids(engine, LONG)
    with scheduled(1, max_queue=2) as (scheduler, session):
        pairs = [job_for(engine, prompt, **ENDLESS) for _ in range(3)]
        scheduler.submit([job for job, _ in pairs])
        (live, live_owner), (waiting, waiting_owner), (last, _) = pairs
        assert live_owner.started.wait(60)
        session.gate.clear()
        steps = len(session.shapes)
        scheduler.cancel(waiting)
        assert waiting_owner.outcomes == ["cancelled"] and scheduler.queued == 1
        scheduler.cancel(live)
        scheduler.cancel(last)
        session.gate.set()
        assert live_owner.wait() is not None and live_owner.outcomes == ["cancelled"]
        wait_until(lambda: scheduler.live == 0)
        assert len(session.shapes) <= steps + 2
        scheduler.cancel(live)  # ended: nothing happens
        again, owner = job_for(engine, prompt, max_new_tokens=20)
        scheduler.submit([again])
        assert owner.wait() == alone(prompt, max_new_tokens=20)
    assert len(live_owner.outcomes) == 1


def test_the_queue_is_bounded_and_deadlines_hold_in_it() -> None:
    engine = nano()
    prompt = chat_ids(engine, "Hello")
    with scheduled(1, max_queue=2) as (scheduler, session):
        session.gate.clear()
        pairs = [job_for(engine, prompt, max_new_tokens=5) for _ in range(3)]
        scheduler.submit([pairs[0][0]])
        wait_until(lambda: scheduler.live == 1)
        pairs[1][0].deadline = 0.0
        scheduler.submit([job for job, _ in pairs[1:]])
        with pytest.raises(QueueFullError) as full:
            scheduler.submit([job_for(engine, prompt)[0]])
        assert 1 <= full.value.retry_after <= 60
        session.gate.set()
        for _, owner in pairs:
            owner.wait()
    assert [owner.outcomes[0] for _, owner in pairs] == ["done", "deadline", "done"]


def test_draining_lets_the_accepted_finish_and_closing_tells_the_rest() -> None:
    engine = nano()
    prompt = chat_ids(engine, "Hello")
    with scheduled(1) as (scheduler, session):
        pairs = [job_for(engine, prompt, max_new_tokens=5) for _ in range(3)]
        scheduler.submit([job for job, _ in pairs])
        scheduler.drain(60.0)
        with pytest.raises(DrainingError):
            scheduler.submit([job_for(engine, prompt)[0]])
        for _, owner in pairs:
            owner.wait()
        assert not scheduler.ready
    assert [owner.outcomes[0] for _, owner in pairs] == ["done"] * 3
    with scheduled(1) as (scheduler, session):
        session.gate.clear()
        pairs = [job_for(engine, prompt, **ENDLESS) for _ in range(2)]
        scheduler.submit([job for job, _ in pairs])
        wait_until(lambda: scheduler.live == 1)
        scheduler.drain(0.0)
        session.gate.set()
        for _, owner in pairs:
            owner.wait()
    assert [owner.outcomes[0] for _, owner in pairs] == ["shutdown"] * 2


def test_a_failing_step_or_owner_harms_nobody_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = nano()
    prompt = chat_ids(engine, "Hello")
    with scheduled(2) as (scheduler, session):
        session.fail_next = True
        job, owner = job_for(engine, prompt, max_new_tokens=20)
        scheduler.submit([job])
        owner.wait()
        assert owner.outcomes == ["error"]
        (bad, bad_owner), (good, good_owner) = (job_for(engine, prompt, max_new_tokens=20) for _ in range(2))
        monkeypatch.setattr(bad_owner, "push", lambda events: 1 / 0)
        scheduler.submit([bad, good])
        assert good_owner.wait() == alone(prompt, max_new_tokens=20)
        bad_owner.wait()
        assert bad_owner.outcomes == ["error"] and scheduler.ready


def test_a_continued_conversation_gives_the_same_with_and_without_the_cache() -> None:
    engine = nano()
    assert engine.tokenizer is not None
    for options in ({}, {"mode": "autoregressive"}, {"block_size": 8}, {"mode": "self-speculative"}):
        turns = [LONG]
        with scheduled(2, cache_bytes=2**26, cache_least_tokens=16) as (scheduler, _):
            for turn in range(4):
                prompt = chat_ids(engine, *turns)
                job, owner = job_for(engine, prompt, max_new_tokens=48, **options)
                scheduler.submit([job])
                got = owner.wait()
                assert got == alone(prompt, max_new_tokens=48, **options)
                wait_until(lambda: scheduler.live == 0)
                assert (job.cached_tokens > 0) == (turn > 0)
                turns += [engine.tokenizer.decode(got), f"Repeat: Alder {turn}"]
            assert scheduler.cache.counts.hits == 3 and scheduler.cache.counts.misses == 1
            assert 0 < scheduler.cache.nbytes <= 2**26
            whole = sum(kept.state.nbytes for kept in scheduler.cache._kept.values())
            assert scheduler.cache.nbytes < whole, "the states of one conversation must share their keys and values"
            again, owner = job_for(engine, prompt, max_new_tokens=48, **options)
            scheduler.submit([again])
            assert owner.wait() == got


def test_a_shared_first_turn_is_reused_by_another_conversation() -> None:
    engine = nano()
    with scheduled(1, cache_bytes=2**26, cache_least_tokens=16) as (scheduler, _):
        for last in ("Hello", "Repeat: Elm"):
            prompt = chat_ids(engine, LONG, "Alder", last)
            job, owner = job_for(engine, prompt, max_new_tokens=20)
            scheduler.submit([job])
            assert owner.wait() == alone(prompt, max_new_tokens=20)
            wait_until(lambda: scheduler.live == 0)
        assert job.cached_tokens == prompt.index(OPENER, 1)


def test_turn_borders() -> None:
    prompt = [1, 9, 9, 9, 1, 8, 8, 1, 7, 7, 7, 1, 6]
    assert turn_borders(prompt, 1, 1) == (4, 11)
    assert turn_borders(prompt, 1, 5) == (11,)
    assert turn_borders(prompt, None, 1) == ()
    assert turn_borders([1, 5, 5], 1, 1) == ()


class FakeStates:
    """States of made-up conversations: a recurrent part, and keys that are a function of the tokens."""

    @staticmethod
    def of(tokens: list[int]) -> StateSnapshot:
        keys = np.array(tokens, np.float32).reshape(1, -1).repeat(2, axis=0)
        return StateSnapshot(len(tokens), {"recurrent": np.full(5, sum(tokens), np.float32), "keys.0": keys})


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=6)), max_size=40))
def test_the_cache_finds_the_longest_kept_prefix_and_stays_within_its_bytes(
    actions: list[tuple[bool, list[int]]],
) -> None:
    limit = 400
    cache = ConversationCache(limit)
    kept: list[list[int]] = []  # least recently used first
    for keep, tokens in actions:
        if keep:
            prefixes = [k for k in kept if len(k) < len(tokens) and tokens[: len(k)] == k]
            cache.keep(tokens, FakeStates.of(tokens), max(prefixes, key=len, default=[]))
            kept = [*[k for k in kept if k != tokens], tokens][-len(cache) :]
        else:
            found = cache.find(tokens, len(tokens) - 1)
            wanted = max((k for k in kept if len(k) < len(tokens) and tokens[: len(k)] == k), key=len, default=None)
            assert (found.position if found else None) == (len(wanted) if wanted else None)
            if found and wanted:
                kept = [*[k for k in kept if k != wanted], wanted]
                for name, array in FakeStates.of(wanted).tensors.items():
                    assert np.array_equal(found.tensors[name], array), "sharing changed a state"
        assert cache.nbytes <= limit and all(cache.holds(k) for k in kept)
        # no more than every state on its own, no less than the recurrent parts, and the keys of the longest
        alone = sum(FakeStates.of(k).nbytes + 8 * len(k) for k in kept)
        assert 28 * len(kept) <= cache.nbytes <= alone


def test_a_conversations_states_share_their_keys() -> None:
    cache = ConversationCache(10_000)
    tokens: list[int] = []
    for _ in range(10):
        before, tokens = tokens, [*tokens, *range(10)]
        cache.keep(tokens, FakeStates.of(tokens), before)
    recurrent, keys, ids = 10 * 20, 2 * 4 * 100, 8 * sum(range(10, 101, 10))
    assert len(cache) == 10 and cache.nbytes == recurrent + keys + ids
    cache.keep([*tokens[:50], 99], FakeStates.of([*tokens[:50], 99]), tokens[:50])  # another branch
    found = cache.find(tokens, 100)
    assert found is not None and np.array_equal(found.tensors["keys.0"], FakeStates.of(tokens).tensors["keys.0"])
