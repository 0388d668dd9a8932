"""The server through the clients people use: what they get is what the library gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from serve_support import RunningServer, nano, nano_slots

QUESTION = [{"role": "user", "content": "Parse the dispatch: UAV7: move waypoint 3 to 120,455. UAV2 goes to Elm."}]
OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 40},
    {"max_new_tokens": 40, "temperature": 0.7, "top_p": 0.9, "top_k": 30, "seed": 11},
    {"max_new_tokens": 30, "mode": "autoregressive", "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"max_new_tokens": 30, "block_size": 16, "threshold": 0.6, "coreset_top_p": 0.8, "repetition_penalty": 1.2},
    {"max_new_tokens": 30, "logit_bias": {30: -100.0, 31: -100.0}},
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(nano_slots(3), slots=3, cache_mb=16) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as opened:
        yield opened


@pytest.fixture
def anthropic_client(server: RunningServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as opened:
        yield opened


def fields(options: dict[str, Any]) -> dict[str, Any]:
    """Decode options as a request spells them."""
    body = {k: v for k, v in options.items() if k != "max_new_tokens"}
    if "logit_bias" in body:
        body["logit_bias"] = {str(k): v for k, v in body["logit_bias"].items()}
    return {**body, "max_completion_tokens": options["max_new_tokens"]}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o))
def test_a_chat_is_the_librarys_whole_or_streamed(client: Any, options: dict[str, Any]) -> None:
    wanted = nano().chat(QUESTION, **options)
    got = client.chat.completions.create(model="nano", messages=QUESTION, extra_body=fields(options))
    assert got.choices[0].message.content == wanted.text
    assert got.choices[0].finish_reason == wanted.finish_reason
    assert got.usage is not None and got.usage.model_dump() == {
        **got.usage.model_dump(),
        "prompt_tokens": wanted.statistics.prompt_tokens,
        "completion_tokens": wanted.statistics.response_tokens,
        "blocks": wanted.statistics.blocks,
        "steps": wanted.statistics.steps,
        "tokens_per_step": round(wanted.statistics.tokens_per_step, 3),
    }
    chunks = list(
        client.chat.completions.create(
            model="nano",
            messages=QUESTION,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=fields(options),
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage == got.usage
    assert chunks[-2].choices[0].finish_reason == wanted.finish_reason
    assert all(c.choices[0].finish_reason is None and c.usage is None for c in chunks[:-2])
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == wanted.text
    assert len({c.id for c in chunks}) == 1


def test_logprobs_are_those_of_the_step_that_filled_the_position(client: Any) -> None:
    wanted = nano().chat(QUESTION, max_new_tokens=30, logprobs=2)
    asked: dict[str, Any] = {"model": "nano", "messages": QUESTION, "max_tokens": 30, "logprobs": True}
    got = client.chat.completions.create(**asked, top_logprobs=2).choices[0].logprobs
    assert got is not None and got.content is not None
    assert [t.logprob for t in got.content] == pytest.approx([t.logprob for t in wanted.tokens], abs=1e-5)
    assert bytes(b for t in got.content for b in t.bytes or []).decode() == wanted.text
    for token in got.content:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob == max(t.logprob for t in token.top_logprobs)
        assert (token.token, token.logprob) in {(t.token, t.logprob) for t in token.top_logprobs}
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**asked, top_logprobs=2, stream=True):
        found = chunk.choices[0].logprobs
        streamed += found.content or [] if found else []
    assert [(t.token, t.logprob) for t in streamed] == [(t.token, t.logprob) for t in got.content]


def test_stop_strings_end_a_reply_and_nothing_behind_them_leaks(client: Any, anthropic_client: Any) -> None:
    whole = nano().chat(QUESTION, max_new_tokens=40).text
    stop = whole[3:5]
    wanted = whole[: whole.index(stop)]
    got = client.chat.completions.create(model="nano", messages=QUESTION, stop=["\x00", stop], max_tokens=40)
    assert (got.choices[0].message.content, got.choices[0].finish_reason) == (wanted, "stop")
    counted = nano().chat(QUESTION, max_new_tokens=40, stop=[stop]).statistics.response_tokens
    assert got.usage and got.usage.completion_tokens == counted < 10
    deltas = client.chat.completions.create(model="nano", messages=QUESTION, stop=stop, max_tokens=40, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in deltas) == wanted
    message = anthropic_client.messages.create(model="nano", messages=QUESTION, stop_sequences=[stop], max_tokens=40)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert "".join(b.text for b in message.content if b.type == "text") == wanted


def test_choices_differ_by_seed_and_each_is_its_own_run(client: Any) -> None:
    options = {"max_new_tokens": 30, "temperature": 10.0}
    wanted = [nano().chat(QUESTION, seed=7 + i, **options).text for i in range(3)]
    assert len(set(wanted)) == 3
    got = client.chat.completions.create(
        model="nano", messages=QUESTION, n=3, seed=7, temperature=10.0, max_completion_tokens=30
    )
    assert [c.message.content for c in got.choices] == wanted
    texts = [""] * 3
    for chunk in client.chat.completions.create(
        model="nano", messages=QUESTION, n=3, seed=7, temperature=10.0, max_completion_tokens=30, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == wanted


def test_completions_take_text_and_ids_and_several_prompts(client: Any) -> None:
    engine = nano()
    assert engine.tokenizer is not None
    prompts = ["<|im_start|>user\nRepeat: Elm<|im_end|>\n<|im_start|>assistant\n", "The no-fly zone at"]
    wanted = [engine.generate(p, max_new_tokens=20).text for p in prompts]
    got = client.completions.create(model="nano", prompt=prompts, max_tokens=20)
    assert [c.text for c in got.choices] == wanted
    ids = engine.tokenizer.encode(prompts[0])
    one = client.completions.create(model="nano", prompt=ids, max_tokens=20, logprobs=1)
    assert one.choices[0].text == wanted[0]
    logprobs = one.choices[0].logprobs
    assert logprobs is not None and "".join(logprobs.tokens or []) == wanted[0]
    assert logprobs.text_offset == [
        len("".join((logprobs.tokens or [])[:i])) for i in range(len(logprobs.tokens or []))
    ]
    chunks = list(client.completions.create(model="nano", prompt=prompts, max_tokens=20, stream=True))
    assert ["".join(c.choices[0].text for c in chunks if c.choices[0].index == i) for i in range(2)] == wanted


def test_responses_whole_and_streamed(client: Any) -> None:
    wanted = nano().chat(QUESTION, max_new_tokens=200).text
    got = client.responses.create(model="nano", input=QUESTION[0]["content"], max_output_tokens=200)
    assert got.output_text == wanted and got.status == "completed"
    events = list(client.responses.create(model="nano", input=QUESTION, max_output_tokens=200, stream=True))
    kinds = [e.type for e in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[-1].response.output_text == wanted
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == wanted
    cut = client.responses.create(model="nano", input=QUESTION, max_output_tokens=3)
    assert (
        cut.status == "incomplete" and cut.incomplete_details and cut.incomplete_details.reason == "max_output_tokens"
    )


def test_messages_whole_and_streamed(anthropic_client: Any) -> None:
    wanted = nano().chat([{"role": "system", "content": "Be brief."}, *QUESTION], max_new_tokens=200)
    asked: dict[str, Any] = {"model": "nano", "max_tokens": 200, "system": "Be brief.", "messages": QUESTION}
    got = anthropic_client.messages.create(**asked)
    assert [b.text for b in got.content if b.type == "text"] == [wanted.text] and got.stop_reason == "end_turn"
    tokens = anthropic_client.messages.count_tokens(model="nano", system="Be brief.", messages=QUESTION).input_tokens
    cached = got.usage.cache_read_input_tokens or 0
    assert tokens == wanted.statistics.prompt_tokens == got.usage.input_tokens + cached
    with anthropic_client.messages.stream(**asked) as stream:
        kinds = [e.type for e in stream if e.type in RAW_EVENTS]
        final = stream.get_final_message()
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [b.text for b in final.content if b.type == "text"] == [wanted.text]
    assert final.usage.output_tokens == wanted.statistics.response_tokens
    cut = anthropic_client.messages.create(**{**asked, "max_tokens": 2})
    assert cut.stop_reason == "max_tokens"


RAW_EVENTS = {
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
}


def test_denoise_events_tell_every_position_once(server: RunningServer) -> None:
    body = {"messages": QUESTION, "max_tokens": 200, "stream": True, "stream_denoise": True}
    steps, text = [], ""
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if "denoise" in chunk:
                    assert chunk["choices"] == []
                    steps.append(chunk["denoise"])
                else:
                    text += chunk["choices"][0]["delta"].get("content", "")
    blocks: dict[int, dict[int, str]] = {}
    for step in steps:
        block = blocks.setdefault(step["block"], {})
        assert step["size"] == 32 and len(step["filled"]) == len(step["texts"]) == len(step["confidence"]) > 0
        assert not set(step["filled"]) & block.keys(), "a position was filled twice"
        block.update(zip(step["filled"], step["texts"], strict=True))
    joined = "".join(block[p] for _, block in sorted(blocks.items()) for p in sorted(block))
    assert (
        joined.split("<|im_end|>")[0].split("<|endoftext|>")[0]
        == text
        == nano().chat(QUESTION, max_new_tokens=200).text
    )


def test_a_second_turn_continues_from_the_cache_and_says_so(server: RunningServer, client: Any) -> None:
    turns = [{"role": "user", "content": "Repeat: " + "Alder Birch Cedar " * 40}]
    first = client.chat.completions.create(model="nano", messages=turns, max_tokens=40)
    turns += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Repeat: Elm"}]
    server.wait_idle()
    second = client.chat.completions.create(model="nano", messages=turns, max_tokens=40)
    assert second.usage and second.usage.prompt_tokens_details
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 100
    without = client.chat.completions.create(
        model="nano", messages=turns, max_tokens=40, extra_body={"cache_prompt": False}
    )
    assert without.usage and without.usage.prompt_tokens_details
    assert without.usage.prompt_tokens_details.cached_tokens == 0
    assert without.choices[0].message.content == second.choices[0].message.content
    numbers = dict(line.rsplit(" ", 1) for line in server.http.get("/metrics").text.splitlines() if line[0] != "#")
    assert float(numbers["clover_cache_hits_total"]) >= 1
    assert float(numbers["clover_cache_reused_tokens_total"]) > 100
    assert float(numbers['clover_requests_total{route="/v1/chat/completions",status="200"}']) >= 3
    assert float(numbers["clover_running"]) == 0


def test_models_health_and_ready(server: RunningServer, client: Any) -> None:
    assert [m.id for m in client.models.list()] == ["nano"]
    assert client.models.retrieve("nano").id == "nano"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").status_code == 200
