"""The public API on the nano model: streams, stop strings, statistics, refused requests, threads."""

from __future__ import annotations

import copy
import pickle
import shutil
import threading
from collections.abc import Callable, Generator, Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
from engine_support import NANO, bundle
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_support import tiny_checkpoint

from clover import Clover, CloverError
from clover.runtime.decoder import StepEvent
from clover.runtime.errors import RequestError
from clover.runtime.options import MODES, LengthRamp
from clover.runtime.reply import Reply, ReplyFinished, StreamItem
from clover.runtime.text.stream_parser import ContentDelta

ORDER = (
    "Parse the dispatch: Send UAV7 to Cedar, priority high. UAV3 search radius 450 metres. "
    "The no-fly zone at Oak is lifted at 07:15. Assign relay at Thorn to UAV12."
)
MESSAGES = [{"role": "user", "content": ORDER}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Clover]:
    with Clover.load(bundle(NANO).directory, threads=1, cache=False, max_context=1024) as loaded:
        yield loaded


def collect(stream: Iterator[StreamItem]) -> tuple[str, Reply, list[StepEvent]]:
    """The deltas joined, the reply, the steps."""
    items = list(stream)
    assert isinstance(items[-1], ReplyFinished) and not any(isinstance(i, ReplyFinished) for i in items[:-1])
    text = "".join(i.text for i in items if isinstance(i, ContentDelta))
    return text, items[-1].reply, [i for i in items if isinstance(i, StepEvent)]


@pytest.mark.parametrize(("mode", "block_size"), [("fill", 8), ("fill", 32), ("autoregressive", None)])
def test_a_stream_is_its_reply_and_its_statistics_add_up(engine: Clover, mode: str, block_size: int | None) -> None:
    text, reply, steps = collect(engine.stream(MESSAGES, mode=mode, block_size=block_size, steps=True))
    assert text == reply.text and reply.finish_reason == "stop" and reply.stop_string is None
    assert '"op"' in text and len(reply.tokens) > 32, "too short to cross a block's border"
    assert engine.tokenizer is not None and engine.template is not None
    assert text == engine.tokenizer.decode([t.id for t in reply.tokens])
    s = reply.statistics
    assert s.mode == mode
    assert s.prompt_tokens == len(engine.tokenizer.encode_prompt(engine.template.render(MESSAGES)))
    assert s.response_tokens == len(reply.tokens)
    assert s.tokens_per_step == s.response_tokens / s.steps
    assert s.time_to_first_token is not None
    assert 0 < s.time_to_first_token <= s.total_time and 0 < s.engine_time <= s.total_time
    assert s.tokens_per_second == pytest.approx(s.response_tokens / s.total_time)
    numbers = [t.step for t in reply.tokens]
    assert min(numbers) >= 1 and max(numbers) <= s.steps
    if block_size:
        assert len(steps) == s.steps and len({e.block for e in steps}) == s.blocks
        assert s.blocks == s.response_tokens // block_size + 1  # the end stands in the last block
        assert s.tokens_per_step > 1
        confidence = {(e.block, p): c for e in steps for p, c in zip(e.filled, e.confidence, strict=True)}
        for n, token in enumerate(reply.tokens):
            assert confidence[1 + n // block_size, n % block_size] == pytest.approx(2.718281828**token.logprob)
    else:
        assert not steps and s.steps == s.response_tokens + 1 and s.blocks == 0
    assert engine.chat(MESSAGES, mode=mode, block_size=block_size).tokens == reply.tokens


@pytest.mark.parametrize("options", [{"mode": "fill"}, {"mode": "fill", "block_size": 8}, {"mode": "autoregressive"}])
def test_every_stop_string_ends_the_reply_where_it_begins(engine: Clover, options: dict[str, Any]) -> None:
    """Substrings of what the model says, at every place: inside a token, across tokens, across blocks."""
    whole = engine.chat(MESSAGES, **options)
    assert engine.tokenizer is not None
    stops = {whole.text[i : i + n] for n in (1, 4, 13) for i in range(0, len(whole.text) - n, 9)}
    for stop in sorted(stops):
        text, reply, _ = collect(engine.stream(MESSAGES, stop=["\x00never", stop], **options))
        assert text == reply.text == whole.text[: whole.text.index(stop)]
        assert reply.stop_string == stop and reply.finish_reason == "stop"
        # the tokens are those up to the one that completes the stop string
        ids = [t.id for t in reply.tokens]
        assert reply.tokens == whole.tokens[: len(ids)] and reply.statistics.response_tokens == len(ids)
        assert stop in engine.tokenizer.decode(ids) and stop not in engine.tokenizer.decode(ids[:-1])


def test_a_stop_string_that_never_comes_changes_nothing(engine: Clover) -> None:
    whole = engine.chat(MESSAGES)
    assert engine.chat(MESSAGES, stop=[whole.text + "!", '"op"!', "]]"]).text == whole.text


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.integers(1, 70), mode=st.sampled_from(["fill", "autoregressive"]))
def test_deltas_join_to_the_decoded_tokens_even_in_broken_utf8(
    engine: Clover, seed: int, limit: int, mode: str
) -> None:
    """At a high temperature the bytes are nonsense, and characters break across tokens and blocks."""
    hot: dict[str, Any] = {"temperature": 10.0, "seed": seed, "max_new_tokens": limit, "mode": mode}
    hot |= {"block_size": 8, "threshold": 0.01} if mode == "fill" else {}
    text, reply, _ = collect(engine.stream_prompt("ü", **hot))
    assert engine.tokenizer is not None
    assert text == reply.text == engine.tokenizer.decode([t.id for t in reply.tokens])
    assert (reply.finish_reason == "length") == (len(reply.tokens) == limit)
    assert engine.generate("ü", **hot).tokens == reply.tokens


def test_a_raw_prompt_may_be_text_or_ids(engine: Clover) -> None:
    assert engine.tokenizer is not None
    text = f"<|im_start|>user\n{ORDER}<|im_end|>\n<|im_start|>assistant\n"
    want = engine.chat(MESSAGES).tokens
    assert engine.generate(text).tokens == want
    assert engine.generate(tuple(engine.tokenizer.encode(text))).tokens == want


def test_alternatives_hold_the_chosen_token(engine: Clover) -> None:
    for token in engine.chat(MESSAGES, logprobs=3).tokens:
        assert len(token.alternatives) == 3
        assert token.alternatives[0] == (token.id, token.logprob)
        assert [p for _, p in token.alternatives] == sorted((p for _, p in token.alternatives), reverse=True)


def test_the_context_bounds_the_reply(engine: Clover) -> None:
    prompt = [10] * 1000
    reply = engine.generate(prompt, logit_bias={2: -100.0, 0: -100.0}, max_new_tokens=100)
    assert len(reply.tokens) == 24 and reply.finish_reason == "length"
    assert len(engine.generate([10] * 1023, logit_bias={2: -100.0, 0: -100.0}, mode="autoregressive").tokens) == 1


# -- what is refused ------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any]]] = [
    *(("block_size", {"block_size": value}) for value in (0, 33, 64.0, -8, "32", True)),
    *(("threshold", {"threshold": value}) for value in (0, 0.0, 1.5, -0.1, float("nan"), "high", True, 10**400)),
    *(("coreset_top_p", {"coreset_top_p": value}) for value in (0, 1.01)),
    *(("max_new_tokens", {"max_new_tokens": value}) for value in (0, -1, 1.5)),
    *(("temperature", {"temperature": value}) for value in (-1, 11, float("inf"))),
    *(("top_p", {"top_p": value}) for value in (0, 2)),
    *(("top_k", {"top_k": value}) for value in (-1, 1025, 2.5)),
    *(("seed", {"seed": value}) for value in (-1, 2**64, "a")),
    *(("presence_penalty", {"presence_penalty": value}) for value in (3, -3)),
    *(("frequency_penalty", {"frequency_penalty": value}) for value in (3, -3)),
    *(("repetition_penalty", {"repetition_penalty": value}) for value in (0, -1, 11)),
    *(("logprobs", {"logprobs": value}) for value in (-1, 21)),
    *(("stop", {"stop": value}) for value in ([""], ["a"] * 17, [1], 5, b"x")),
    *(("logit_bias", {"logit_bias": value}) for value in ({768: 1.0}, {-1: 1.0}, {1: 101}, {1: "x"}, {"1": 1}, [1])),
    *(("align_blocks", {"align_blocks": value}) for value in (1, "yes")),
    *(("length_ramp", {"length_ramp": value}) for value in ({"start": 1}, {"start": inf, "stop": 2, "max_bias": 1})),
    *(("mode", {"mode": value}) for value in ("greedy", 1, "")),
    ("temperatur", {"temperatur": 1.0}),
    ("beams", {"beams": 4}),
]


@pytest.mark.parametrize(("field", "options"), REFUSED, ids=lambda value: str(value)[:40])
def test_an_option_that_cannot_be_honoured_is_refused_by_name(
    engine: Clover, field: str, options: dict[str, Any]
) -> None:
    for call in (
        lambda: engine.chat(MESSAGES, **options),
        lambda: engine.stream(MESSAGES, **options),  # before anything is read from it
        lambda: engine.generate("a", **options),
    ):
        with pytest.raises(RequestError) as refused:
            call()
        assert refused.value.field == field and field in str(refused.value)
        assert str(refused.value).endswith(".") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "prompt",
    ["", b"abc", {5: 6}, [], "a<|mask|>b", [5, 3], [5] * 1024, [768], [-1], [1.5], ["a"], [None], 7, None, "\udc80"],
    ids=repr,
)
def test_a_prompt_that_cannot_be_decoded_is_refused(engine: Clover, prompt: Any) -> None:
    if isinstance(prompt, str) and "mask" in prompt:
        assert engine.tokenizer is not None
        mask = next(n for n in engine.tokenizer.control_tokens if engine.tokenizer.find_token_id(n) == 3)
        prompt = prompt.replace("<|mask|>", mask)
    with pytest.raises(RequestError) as refused:
        engine.generate(prompt)
    assert refused.value.field == "prompt"


def test_messages_that_cannot_be_decoded_are_refused(engine: Clover) -> None:
    for messages in ([], [{"role": "user", "content": "a " * 2000}], [{"role": "user"}], "hello", None):
        with pytest.raises(RequestError) as refused:
            engine.chat(messages)  # type: ignore[arg-type]
        assert refused.value.field.startswith("messages")


def test_the_mask_token_in_a_message_is_only_letters(engine: Clover) -> None:
    assert engine.tokenizer is not None
    mask = next(n for n in engine.tokenizer.control_tokens if engine.tokenizer.find_token_id(n) == 3)
    assert engine.chat([{"role": "user", "content": f"Echo: {mask}"}], max_new_tokens=3).statistics.steps


def test_options_of_none_are_options_not_given(engine: Clover) -> None:
    nothing = {"threshold": None, "seed": None, "stop": None, "logit_bias": None, "length_ramp": None}
    assert engine.chat(MESSAGES, **nothing).tokens == engine.chat(MESSAGES).tokens


def test_the_length_ramp_ends_a_reply(engine: Clover) -> None:
    never = {0: -50.0, 2: -50.0}
    assert engine.generate("a", logit_bias=never, max_new_tokens=96, repetition_penalty=1.0).finish_reason == "length"
    ramp = LengthRamp(start=32, stop=64, max_bias=90.0)
    reply = engine.generate("a", logit_bias=never, max_new_tokens=96, length_ramp=ramp)
    assert reply.finish_reason == "stop" and reply.statistics.length_ramp_bias > 0


def test_statistics_tell_what_acted(engine: Clover) -> None:
    for mode in MODES:
        plain = engine.chat(MESSAGES, mode=mode, presence_penalty=0.0, repetition_penalty=1.0).statistics
        assert plain.penalised_tokens == plain.length_ramp_bias == 0
        assert 0 <= plain.accepted_tokens <= plain.drafted_tokens
        assert (plain.drafted_tokens > 0) == (mode == "self-speculative")
        reply = engine.chat(MESSAGES, mode=mode, presence_penalty=0.9)
        assert 0 < reply.statistics.penalised_tokens <= len({t.id for t in reply.tokens})


@pytest.mark.parametrize("mode", MODES)
def test_the_length_ramp_closes_thinking_first(engine: Clover, mode: str) -> None:
    assert engine.tokenizer is not None
    opens, closes = engine.tokenizer.token_id("<think>"), engine.tokenizer.token_id("</think>")
    never = {0: -50.0, 2: -50.0, opens: -50.0, closes: -50.0}
    ramp = LengthRamp(start=31, stop=32, max_bias=1000.0)
    for prompt, count in (("a<think>b", 1), ("a<think>b</think>c", 0)):
        reply = engine.generate(prompt, mode=mode, logit_bias=never, max_new_tokens=160, length_ramp=ramp)
        assert reply.finish_reason == "stop" and [t.id for t in reply.tokens].count(closes) == count


# -- one engine, many callers ---------------------------------------------------------------------------------


def test_a_stream_closed_early_leaves_the_engine_usable(engine: Clover) -> None:
    want = engine.chat(MESSAGES).tokens
    for items in range(4):
        stream = engine.stream(MESSAGES, block_size=8, steps=True)
        assert isinstance(stream, Generator)
        for _ in range(items):
            next(stream)
        stream.close()
        assert engine.chat(MESSAGES).tokens == want
    for item in engine.stream(MESSAGES):  # dropped, not closed
        if isinstance(item, ContentDelta):
            break
    del item
    assert engine.chat(MESSAGES).tokens == want


def test_a_second_stream_behind_an_open_one_is_refused_not_hung(engine: Clover) -> None:
    stream = engine.stream(MESSAGES, steps=True)
    next(stream)
    with pytest.raises(CloverError, match="still open"):
        engine.chat(MESSAGES)
    rest, reply, _ = collect(stream)
    assert rest == reply.text == engine.chat(MESSAGES).text


def test_threads_take_turns(engine: Clover) -> None:
    texts = [f"Parse the dispatch: Send UAV{n} to Cedar, priority high." for n in range(6)]
    want = [engine.chat([{"role": "user", "content": t}]).tokens for t in texts]
    got: dict[int, Any] = {}

    def ask(n: int) -> None:
        got[n] = engine.chat([{"role": "user", "content": texts[n]}]).tokens

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[n] for n in range(6)] == want


def test_a_closed_engine_says_so() -> None:
    loaded = Clover.load(bundle(NANO).directory, threads=1, cache=False, max_context=64)
    loaded.close()
    loaded.close()
    with pytest.raises(CloverError, match="closed"):
        loaded.chat(MESSAGES)


def test_a_reply_whose_engine_is_closed_says_so() -> None:
    """Wherever the close comes from: behind an item, in a form's step, in another thread, before a stream begins."""

    def load() -> Clover:
        return Clover.load(bundle(NANO).directory, threads=1, cache=False, max_context=128)

    def closed_between_items(loaded: Clover) -> None:
        stream = loaded.stream(MESSAGES, threshold=1.0)
        next(stream)
        loaded.close()
        list(stream)

    def closed_before_the_first(loaded: Clover) -> None:
        stream = loaded.stream(MESSAGES)
        loaded.close()
        list(stream)

    def closed_in_a_step(loaded: Clover) -> None:
        loaded.fill(MESSAGES, "{{a:8}} {{b:9}}", on_event=lambda event: loaded.close())

    def closed_elsewhere(loaded: Clover) -> None:
        stream = loaded.stream(MESSAGES, threshold=1.0)
        next(stream)
        closer = threading.Thread(target=loaded.close)
        closer.start()
        closer.join(60)
        assert not loaded._turns.freed  # a step might be running
        list(stream)

    for case in (closed_between_items, closed_before_the_first, closed_in_a_step, closed_elsewhere):
        loaded = load()
        with pytest.raises(CloverError, match="closed"):
            case(loaded)
        assert loaded._turns.freed
        loaded.close()


def test_flags_and_paths_of_another_type_are_refused_by_name(engine: Clover) -> None:
    wrong: Any = "no"
    paths: list[Any] = [5, None, b"x"]
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("enable_thinking", lambda: engine.chat(MESSAGES, enable_thinking=wrong)),
        ("enable_thinking", lambda: engine.fill(MESSAGES, "{{a:2}}", enable_thinking=wrong)),
        ("steps", lambda: engine.stream(MESSAGES, steps=wrong)),
        ("steps", lambda: engine.stream_prompt("a", steps=wrong)),
        ("together", lambda: engine.decide("d", {"a": [1, 2]}, together=wrong)),
        ("on_event", lambda: engine.fill(MESSAGES, "{{a:2}}", on_event=wrong)),
        ("verify", lambda: Clover.load("x", verify=wrong)),
        ("cache", lambda: Clover.load("x", cache=wrong)),
        *(("directory", partial(Clover.load, path)) for path in paths),
    ]
    for field, call in calls:
        with pytest.raises(RequestError) as refused:
            call()
        assert refused.value.field == field and field in str(refused.value)


def test_errors_cross_processes_and_engines_do_not(engine: Clover) -> None:
    with pytest.raises(RequestError) as refused:
        engine.chat(MESSAGES, threshold=2)
    for again in (pickle.loads(pickle.dumps(refused.value)), copy.copy(refused.value)):
        assert (type(again), again.field, str(again)) == (RequestError, "threshold", str(refused.value))
    for take in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"Clover\.load"):
            take(engine)


# -- bundles with less in them --------------------------------------------------------------------------------


def test_a_bundle_without_tokenizer_takes_ids() -> None:
    with Clover.load(bundle(tiny_checkpoint(0)).directory, threads=1, cache=False, max_context=128) as bare:
        reply = bare.generate([1, 2, 3], max_new_tokens=5, logit_bias={318: -100.0})
        assert (reply.text, len(reply.tokens), reply.finish_reason) == ("", 5, "length")
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("messages", lambda: bare.chat(MESSAGES)),
            ("prompt", lambda: bare.generate("text")),
            ("stop", lambda: bare.generate([1], stop=["x"])),
        ]
        for field, call in calls:
            with pytest.raises(RequestError) as refused:
                call()
            assert refused.value.field == field


def test_a_bundle_without_chat_template_takes_raw_prompts(tmp_path: Path) -> None:
    source = tmp_path / "nano"
    shutil.copytree(NANO, source, ignore=shutil.ignore_patterns("*.py", "chat_template.jinja", ".*", "__*"))
    (source / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    with Clover.load(bundle(source).directory, threads=1, cache=False, max_context=64) as raw:
        assert len(raw.generate("a", max_new_tokens=2).tokens) <= 2
        with pytest.raises(RequestError) as refused:
            raw.chat(MESSAGES)
        assert refused.value.field == "messages"
