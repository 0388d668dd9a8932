"""OpenAI's text completions: a raw prompt, no chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from clover.runtime.decoder import TokenInfo
from clover.runtime.errors import RequestError
from clover.runtime.server import sse
from clover.runtime.server.chunks import chunk_stream, logprob_json, token_text, usage_json
from clover.runtime.server.fields import Fields, whole_number
from clover.runtime.server.generation import Choice, Ended, Generation, Piece, Usage
from clover.runtime.server.parts import new_id
from clover.runtime.server.request import (
    Ask,
    CompletionRequest,
    choices_field,
    denoise_field,
    named,
    shared_fields,
    stream_fields,
)
from clover.runtime.server.service import Service
from clover.runtime.text.stream_parser import ContentDelta
from clover.runtime.text.tokenizer import Tokenizer

MAX_PROMPTS = 16


def parse(body: Any, service: Service) -> CompletionRequest:
    """Raises RequestError or ApiError for the first field that can't be honoured."""
    f = Fields(body)
    shared = shared_fields(f, service, "max_tokens")
    alternatives = f.integer("logprobs", 0, 20)
    stream, include_usage = stream_fields(f)
    steps, choices = denoise_field(f, stream), choices_field(f)
    f.only("best_of", choices, why="replies are not ranked.")
    f.only("echo", False, why="the prompt is not repeated.")
    f.only("suffix", "", why="text is not inserted before a suffix.")
    f.labels("user")
    prompts = _prompts(f.need("prompt"), service)
    f.close()
    with named({"max_new_tokens": shared.limit_name}):
        options = service.engine.options(**shared.given, logprobs=alternatives or 0)
    ask = Ask(
        prompts,
        options,
        "prompt",
        choices=choices,
        steps=steps,
        timeout=shared.timeout,
        use_cache=shared.use_cache,
    )
    return CompletionRequest(ask, shared.model, stream, include_usage, alternatives is not None)


def _prompts(given: Any, service: Service) -> list[list[int]]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    if isinstance(given, str):
        return [_tokens(given, service)]
    if isinstance(given, list) and given:
        if (ids := _ids(given)) is not None:
            return [ids]
        if len(given) > MAX_PROMPTS:
            raise RequestError("prompt", f"prompt holds {len(given)} prompts; send at most {MAX_PROMPTS} at once.")
        if all(isinstance(item, str) for item in given):
            return [_tokens(item, service) for item in given]
        lists = [_ids(item) if isinstance(item, list) else None for item in given]
        if all(ids is not None for ids in lists):
            return [ids for ids in lists if ids is not None]
    raise RequestError(
        "prompt", "prompt must be a string, a list of strings, a list of token ids or a list of such lists."
    )


def _tokens(text: str, service: Service) -> list[int]:
    service.check_text(text, "prompt")
    return service.tokenizer.encode(text)


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


def stream(request: CompletionRequest, generation: Generation, tokenizer: Tokenizer) -> AsyncIterator[bytes]:
    """The response as server-sent events."""

    def writer(head: Mapping[str, Any], index: int) -> _Writer:
        return _Writer(head, index, _Logprobs(tokenizer) if request.logprobs else None)

    return chunk_stream(request, generation, _head(request.model), writer, tokenizer)


class _Writer:
    """The chunks of one choice."""

    def __init__(self, head: Mapping[str, Any], index: int, logprobs: _Logprobs | None) -> None:
        self._head, self._index, self._logprobs = head, index, logprobs
        self._waiting: list[TokenInfo] = []  # their log-probabilities go out with the next text

    def begin(self) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        if self._logprobs:
            self._waiting += piece.tokens
        text = "".join(event.text for event in piece.events if isinstance(event, ContentDelta))
        return self._chunk(text, None) if text else b""

    def end(self, end: Ended) -> bytes:
        return self._chunk("", end.reason)

    def _chunk(self, text: str, reason: str | None) -> bytes:
        logprobs = self._logprobs.take(self._waiting) if self._logprobs else None
        self._waiting = []
        return sse.data({**self._head, "choices": [_item(self._index, text, reason, logprobs)]})


class _Logprobs:
    """Log-probabilities in the old form: parallel lists. Offsets count characters from the reply's start."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def take(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        texts = [token_text(t.id, self._tokenizer) for t in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [logprob_json(t.logprob) for t in tokens],
            "top_logprobs": [self._best(t) for t in tokens],
            "text_offset": offsets,
        }

    def _best(self, token: TokenInfo) -> dict[str, float]:
        return {token_text(id_, self._tokenizer): logprob_json(logprob) for id_, logprob in token.alternatives}
