"""OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from clover.runtime.decoder import TokenInfo
from clover.runtime.errors import RequestError
from clover.runtime.server import sse
from clover.runtime.server.chunks import chunk_stream, logprob_json, token_text, usage_json
from clover.runtime.server.fields import Fields
from clover.runtime.server.forms import chat_form
from clover.runtime.server.generation import Choice, Ended, Generation, Piece, Usage
from clover.runtime.server.parts import new_id
from clover.runtime.server.request import (
    LABELS,
    CompletionRequest,
    choices_field,
    denoise_field,
    named,
    shared_fields,
    stream_fields,
    thinking_flag,
    tool_choice,
)
from clover.runtime.server.service import Service
from clover.runtime.server.tools import Tools
from clover.runtime.text.function_calls import FunctionArgumentsDelta, FunctionCallEnded, FunctionCallStarted
from clover.runtime.text.reply import ReplyDelta
from clover.runtime.text.stream_parser import ContentDelta, ReasoningDelta
from clover.runtime.text.tokenizer import Tokenizer


def parse(body: Any, service: Service) -> CompletionRequest:
    """Raises RequestError or ApiError for the first field that can't be honoured."""
    f = Fields(body)
    shared = shared_fields(f, service, "max_completion_tokens", "max_tokens")
    logprobs = f.boolean("logprobs")
    top = f.integer("top_logprobs", 0, 20)
    if top is not None and not logprobs:
        raise f.refuse("top_logprobs", "needs logprobs: true.")
    given = {**shared.given, "logprobs": top or 0}
    stream, include_usage = stream_fields(f)
    steps, choices = denoise_field(f, stream), choices_field(f)
    thinking, tools = thinking_flag(f), _tools(f)
    messages, form = f.need("messages"), chat_form(f)
    f.only("store", False, why="nothing is stored.")
    f.only("service_tier", "auto", "default", why="there is one tier.")
    f.only("modalities", ["text"], why="replies are text.")
    f.labels(*LABELS, "metadata")
    f.close()
    if form is not None and logprobs:
        raise RequestError("logprobs", "logprobs can't be given where the reply follows a JSON schema.")
    with named({"max_new_tokens": shared.limit_name, "logprobs": "top_logprobs"}):
        if form is not None:
            ask = service.form_ask(messages, form, given, shared.limit_name, tools, thinking)
        else:
            ask = service.chat_ask(messages, given, tools, thinking)
    ask = replace(ask, choices=choices, steps=steps, timeout=shared.timeout, use_cache=shared.use_cache)
    return CompletionRequest(ask, shared.model, stream, include_usage, logprobs)


def _tools(f: Fields) -> Tools:
    tools = Tools(one_call=not f.boolean("parallel_tool_calls", True))
    for i, item in enumerate(f.items("tools")):
        tool = Fields(item, f"tools[{i}]")
        if tool.need("type") != "function":
            raise tool.refuse("type", "must be 'function'; the server runs no tools itself.")
        function = tool.object("function")
        strict = function.boolean("strict")
        name, description, parameters = (function.take(key) for key in ("name", "description", "parameters"))
        tools.add(name, description, parameters, f"tools[{i}].function", "parameters", strict=strict)
        function.close()
        tool.close()
    return tools if tool_choice(f) else Tools()


# -- whole replies -------------------------------------------------------------------------------


def whole(request: CompletionRequest, choices: Sequence[Choice], usage: Usage, tokenizer: Tokenizer) -> dict[str, Any]:
    """The response object."""
    return {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [_choice(i, choice, request.logprobs, tokenizer) for i, choice in enumerate(choices)],
        "usage": usage_json(usage),
    }


def _choice(index: int, choice: Choice, logprobs: bool, tokenizer: Tokenizer) -> dict[str, Any]:
    assert choice.end is not None
    content, reasoning = choice.parts.joined("text"), choice.parts.joined("reasoning")
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not choice.parts.calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if choice.parts.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
            for call in choice.parts.calls
        ]
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(choice.tokens, tokenizer) if logprobs else None,
        "finish_reason": choice.end.reason,
    }


def _logprobs(tokens: Sequence[TokenInfo], tokenizer: Tokenizer) -> dict[str, Any]:
    content = [
        {
            **_token(token.id, token.logprob, tokenizer),
            "top_logprobs": [_token(id_, logprob, tokenizer) for id_, logprob in token.alternatives],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _token(id_: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token's text, bytes and raw log-probability."""
    return {
        "token": token_text(id_, tokenizer),
        "logprob": logprob_json(logprob),
        "bytes": list(tokenizer.token_bytes(id_)),
    }


# -- streams -------------------------------------------------------------------------------------


def stream(request: CompletionRequest, generation: Generation, tokenizer: Tokenizer) -> AsyncIterator[bytes]:
    """The response as server-sent events."""

    def writer(head: Mapping[str, Any], index: int) -> _Writer:
        return _Writer(head, index, request.logprobs, tokenizer)

    head = {"id": new_id("chatcmpl-"), "object": "chat.completion.chunk", "created": int(time.time())}
    return chunk_stream(request, generation, {**head, "model": request.model}, writer, tokenizer)


class _Writer:
    """The chunks of one choice."""

    def __init__(self, head: Mapping[str, Any], index: int, logprobs: bool, tokenizer: Tokenizer) -> None:
        self._head, self._index, self._logprobs, self._tokenizer = head, index, logprobs, tokenizer
        self._waiting: list[TokenInfo] = []  # their log-probabilities go out with the next text

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, piece: Piece) -> bytes:
        if self._logprobs:
            self._waiting += piece.tokens
        # that a call ended shows in what follows it: this dialect has no event for it
        told = [event for event in piece.events if not isinstance(event, FunctionCallEnded)]
        return b"".join(self._chunk(_delta(event)) for event in told)

    def end(self, end: Ended) -> bytes:
        return self._chunk({}, end.reason)

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice: dict[str, Any] = {"index": self._index, "delta": delta, "finish_reason": finish_reason}
        if self._logprobs:
            choice["logprobs"] = _logprobs(self._waiting, self._tokenizer) if self._waiting else None
            self._waiting = []
        return sse.data({**self._head, "choices": [choice]})


def _delta(event: ReplyDelta) -> dict[str, Any]:
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    if isinstance(event, FunctionCallStarted):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": new_id("call_"), "type": "function", "function": function}]}
    assert isinstance(event, FunctionArgumentsDelta)
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
