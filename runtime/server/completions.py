"""OpenAI's text completions: a raw prompt, no chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from clover.runtime.decoder import TokenInfo
from clover.runtime.errors import RequestError
from clover.runtime.server import sse
from clover.runtime.server.chat import step_json, stream_fields, token_limit, usage_json
from clover.runtime.server.errors import ApiError
from clover.runtime.server.fields import Fields, whole_number
from clover.runtime.server.generation import Choice, Ended, Generation, Usage
from clover.runtime.server.parts import new_id
from clover.runtime.server.request import (
    MAX_CHOICES,
    Ask,
    decode_fields,
    logit_bias,
    renamed,
    stop_strings,
    timeout_field,
)
from clover.runtime.server.service import Service
from clover.runtime.text.stream_parser import ContentDelta
from clover.runtime.text.tokenizer import Tokenizer

MAX_PROMPTS = 16


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request."""

    ask: Ask
    model: str
    stream: bool
    include_usage: bool
    logprobs: bool


def parse(body: Any, service: Service) -> CompletionRequest:
    """Raises RequestError or ApiError for the first field that can't be honoured."""
    f = Fields(body)
    model = service.check_model(f)
    given = decode_fields(f)
    given["logit_bias"], given["stop"] = logit_bias(f), stop_strings(f)
    limit_name, given["max_new_tokens"] = token_limit(f, "max_tokens")
    alternatives = f.integer("logprobs", 0, 20)
    given["logprobs"] = alternatives or 0
    stream, include_usage = stream_fields(f)
    steps = f.boolean("stream_denoise")
    if steps and not stream:
        raise f.refuse("stream_denoise", "needs stream: true.")
    choices = f.integer("n", 1, MAX_CHOICES) or 1
    f.only("best_of", choices, why="replies are not ranked.")
    f.only("echo", False, why="the prompt is not repeated.")
    f.only("suffix", "", why="text is not inserted before a suffix.")
    f.labels("user")
    prompts = _prompts(f.need("prompt"), service.tokenizer)
    timeout = timeout_field(f, service.settings.request_timeout)
    use_cache = f.boolean("cache_prompt", True)
    f.close()
    try:
        options = service.engine.options(**given)
    except RequestError as error:
        raise renamed(error, {"max_new_tokens": limit_name}) from None
    ask = Ask(prompts, options, "prompt", choices=choices, steps=steps, timeout=timeout, use_cache=use_cache)
    return CompletionRequest(ask, model, stream, include_usage, alternatives is not None)


def _prompts(given: Any, tokenizer: Tokenizer) -> list[list[int]]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    if isinstance(given, str):
        return [tokenizer.encode(given)]
    if isinstance(given, list) and given:
        if (ids := _ids(given)) is not None:
            return [ids]
        if len(given) > MAX_PROMPTS:
            raise RequestError("prompt", f"prompt holds {len(given)} prompts; send at most {MAX_PROMPTS} at once.")
        if all(isinstance(item, str) for item in given):
            return [tokenizer.encode(item) for item in given]
        lists = [_ids(item) if isinstance(item, list) else None for item in given]
        if all(ids is not None for ids in lists):
            return [ids for ids in lists if ids is not None]
    raise RequestError(
        "prompt", "prompt must be a string, a list of strings, a list of token ids or a list of such lists."
    )


def _ids(given: list[Any]) -> list[int] | None:
    """A list of token ids, or None when it is a list of something else."""
    if not all(type(item) is int for item in given):
        given = [whole_number(item) for item in given]
    return given if all(type(item) is int for item in given) else None


def whole(request: CompletionRequest, choices: Sequence[Choice], usage: Usage, tokenizer: Tokenizer) -> dict[str, Any]:
    """The response object."""
    items = []
    for i, choice in enumerate(choices):
        assert choice.end is not None
        logprobs = _Logprobs(tokenizer).take(choice.tokens) if request.logprobs else None
        items.append(_item(i, choice.parts.joined("text"), choice.end.reason, logprobs))
    return {**_head(request.model), "choices": items, "usage": usage_json(usage)}


def _head(model: str) -> dict[str, Any]:
    return {"id": new_id("cmpl-"), "object": "text_completion", "created": int(time.time()), "model": model}


def _item(index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


async def stream(request: CompletionRequest, generation: Generation, tokenizer: Tokenizer) -> AsyncIterator[bytes]:
    """The response as server-sent events."""
    head = _head(request.model)
    if request.include_usage:
        head["usage"] = None
    logprobs = [_Logprobs(tokenizer) for _ in range(generation.choices)]
    waiting: list[list[TokenInfo]] = [[] for _ in range(generation.choices)]
    try:
        async for item in generation:
            if item is None:
                yield sse.WAITING
                continue
            parts: list[bytes] = []
            text, reason = "", None
            if isinstance(item, Ended):
                reason = item.reason
            else:
                for step in item.steps:
                    denoise = step_json(step, item.choice, tokenizer)
                    parts.append(sse.data({**head, "choices": [], "denoise": denoise}))
                text = "".join(e.text for e in item.events if isinstance(e, ContentDelta))
                waiting[item.choice] += item.tokens if request.logprobs else ()
            if text or reason:
                taken = logprobs[item.choice].take(waiting[item.choice]) if request.logprobs else None
                waiting[item.choice] = []
                parts.append(sse.data({**head, "choices": [_item(item.choice, text, reason, taken)]}))
            yield b"".join(parts)
    except ApiError as error:
        yield sse.data(error.body("openai"))
        return
    if request.include_usage:
        yield sse.data({**head, "choices": [], "usage": usage_json(generation.usage)})
    yield sse.DONE


class _Logprobs:
    """Log-probabilities in the old form: parallel lists. Offsets count characters from the reply's start."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def take(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        texts = [self._text(t.id) for t in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [max(t.logprob, -9999.0) for t in tokens],
            "top_logprobs": [{self._text(i): max(p, -9999.0) for i, p in t.alternatives} for t in tokens],
            "text_offset": offsets,
        }

    def _text(self, id_: int) -> str:
        return self._tokenizer.decode([id_], keep_control_tokens=True)
