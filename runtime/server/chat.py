"""OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clover.runtime.decoder import StepEvent, TokenInfo
from clover.runtime.errors import RequestError
from clover.runtime.server import sse
from clover.runtime.server.errors import ApiError
from clover.runtime.server.fields import Fields
from clover.runtime.server.forms import chat_form
from clover.runtime.server.generation import Choice, Ended, Generation, Piece, Usage
from clover.runtime.server.parts import new_id
from clover.runtime.server.request import (
    MAX_CHOICES,
    Ask,
    decode_fields,
    logit_bias,
    renamed,
    stop_strings,
    thinking_flag,
    timeout_field,
)
from clover.runtime.server.service import Service
from clover.runtime.server.tools import Tools
from clover.runtime.text.function_calls import FunctionArgumentsDelta, FunctionCallEnded, FunctionCallStarted
from clover.runtime.text.reply import ReplyDelta
from clover.runtime.text.stream_parser import ContentDelta, ReasoningDelta
from clover.runtime.text.tokenizer import Tokenizer

LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")


@dataclass(frozen=True)
class ChatRequest:
    """A checked request."""

    ask: Ask
    model: str
    stream: bool
    include_usage: bool
    logprobs: bool


def parse(body: Any, service: Service) -> ChatRequest:
    """Raises RequestError or ApiError for the first field that can't be honoured."""
    f = Fields(body)
    model = service.check_model(f)
    given = decode_fields(f)
    given["logit_bias"], given["stop"] = logit_bias(f), stop_strings(f)
    limit_name, given["max_new_tokens"] = token_limit(f, "max_completion_tokens", "max_tokens")
    logprobs = f.boolean("logprobs")
    top = f.integer("top_logprobs", 0, 20)
    if top is not None and not logprobs:
        raise f.refuse("top_logprobs", "needs logprobs: true.")
    given["logprobs"] = top or 0
    stream, include_usage = stream_fields(f)
    steps = f.boolean("stream_denoise")
    if steps and not stream:
        raise f.refuse("stream_denoise", "needs stream: true.")
    choices = f.integer("n", 1, MAX_CHOICES) or 1
    thinking = thinking_flag(f)
    tools = _tools(f)
    timeout = timeout_field(f, service.settings.request_timeout)
    use_cache = f.boolean("cache_prompt", True)
    messages = f.need("messages")
    form = chat_form(f)
    f.only("store", False, why="nothing is stored.")
    f.only("service_tier", "auto", "default", why="there is one tier.")
    f.only("modalities", ["text"], why="replies are text.")
    f.labels(*LABELS)
    f.close()
    if form is not None and logprobs:
        raise RequestError("logprobs", "logprobs can't be given where the reply follows a JSON schema.")
    try:
        if form is not None:
            filled = service.form_ask(messages, form, given, limit_name, tools, thinking)
            ask = replace(filled, choices=choices, steps=steps, timeout=timeout, use_cache=use_cache)
            return ChatRequest(ask, model, stream, include_usage, logprobs)
        options = service.engine.options(**given)
    except RequestError as error:
        raise renamed(error, {"max_new_tokens": limit_name, "logprobs": "top_logprobs"}) from None
    ids, opens_thinking = service.chat_prompt(messages, tools.shown, thinking)
    ask = Ask(
        [ids],
        options,
        "messages",
        choices=choices,
        tools=tools,
        parse_thinking=True,
        starts_in_thinking=opens_thinking,
        steps=steps,
        timeout=timeout,
        use_cache=use_cache,
    )
    return ChatRequest(ask, model, stream, include_usage, logprobs)


def token_limit(f: Fields, *names: str) -> tuple[str, int | None]:
    """(the name used, the limit) from fields that mean the same. Raises RequestError when two of them differ."""
    given = [(name, value) for name in names if (value := f.integer(name, 1, 2**31)) is not None]
    if len({value for _, value in given}) > 1:
        raise f.refuse(given[1][0], f"differs from {given[0][0]}; give one of them.")
    return given[0] if given else (names[0], None)


def stream_fields(f: Fields) -> tuple[bool, bool]:
    """(stream, include_usage)."""
    stream = f.boolean("stream")
    had_options = f.take("stream_options")
    options = Fields({} if had_options is None else had_options, "stream_options")
    include_usage = options.boolean("include_usage")
    options.only("include_obfuscation", False, why="events are not padded.")
    options.close()
    if had_options is not None and not stream:
        raise f.refuse("stream_options", "needs stream: true.")
    return stream, include_usage


def _tools(f: Fields) -> Tools:
    tools = Tools(one_call=not f.boolean("parallel_tool_calls", True))
    for i, item in enumerate(f.items("tools")):
        tool = Fields(item, f"tools[{i}]")
        tool.need("type")
        function = tool.object("function")
        if not isinstance(item, dict) or item.get("type") != "function":
            raise tool.refuse("type", "must be 'function'; the server runs no tools itself.")
        strict = function.boolean("strict")
        name, description, parameters = (function.take(key) for key in ("name", "description", "parameters"))
        tools.add(name, description, parameters, f"tools[{i}].function", "parameters", strict=strict)
        function.close()
        tool.close()
    return tools if tool_choice(f) else Tools()


def tool_choice(f: Fields) -> bool:
    """Whether the model may call tools. Raises RequestError when a call would have to be forced."""
    choice = f.take("tool_choice")
    if choice not in (None, "auto", "none"):
        raise f.refuse("tool_choice", "can be 'auto' or 'none'; a call can't be forced.")
    return bool(choice != "none")


# -- whole replies -------------------------------------------------------------------------------


def whole(request: ChatRequest, choices: Sequence[Choice], usage: Usage, tokenizer: Tokenizer) -> dict[str, Any]:
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


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage, and what a block-diffusion model adds to it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "blocks": usage.blocks,
        "steps": usage.steps,
        "tokens_per_step": usage.tokens_per_step,
    }


def _logprobs(tokens: Sequence[TokenInfo], tokenizer: Tokenizer) -> dict[str, Any]:
    content = [
        {
            **token_logprob(token.id, token.logprob, tokenizer),
            "top_logprobs": [token_logprob(id_, logprob, tokenizer) for id_, logprob in token.alternatives],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def token_logprob(id_: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token's text, bytes and raw log-probability. -inf is not JSON: -9999 stands for it, as OpenAI does."""
    text = tokenizer.decode([id_], keep_control_tokens=True)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(tokenizer.token_bytes(id_))}


# -- streams -------------------------------------------------------------------------------------


async def stream(request: ChatRequest, generation: Generation, tokenizer: Tokenizer) -> AsyncIterator[bytes]:
    """The response as server-sent events."""
    head = {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": request.model,
    }
    if request.include_usage:
        head["usage"] = None
    writers = [_Writer(head, i, request.logprobs, tokenizer) for i in range(generation.choices)]
    yield b"".join(writer.begin() for writer in writers)
    try:
        async for item in generation:
            if item is None:
                yield sse.WAITING
                continue
            writer = writers[item.choice]
            yield writer.end(item) if isinstance(item, Ended) else writer.piece(item)
    except ApiError as error:
        yield sse.data(error.body("openai"))
        return
    if request.include_usage:
        yield sse.data({**head, "choices": [], "usage": usage_json(generation.usage)})
    yield sse.DONE


class _Writer:
    """The chunks of one choice."""

    def __init__(self, head: dict[str, Any], index: int, logprobs: bool, tokenizer: Tokenizer) -> None:
        self._head, self._index, self._logprobs, self._tokenizer = head, index, logprobs, tokenizer
        self._waiting: list[TokenInfo] = []  # their log-probabilities go out with the next text

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, piece: Piece) -> bytes:
        parts = [sse.data({**self._head, "choices": [], "denoise": self._step(step)}) for step in piece.steps]
        if self._logprobs:
            self._waiting += piece.tokens
        # that a call ended shows in what follows it: this dialect has no event for it
        parts += [self._chunk(_delta(event)) for event in piece.events if not isinstance(event, FunctionCallEnded)]
        return b"".join(parts)

    def end(self, end: Ended) -> bytes:
        return self._chunk({}, end.reason)

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice: dict[str, Any] = {"index": self._index, "delta": delta, "finish_reason": finish_reason}
        if self._logprobs:
            choice["logprobs"] = _logprobs(self._waiting, self._tokenizer) if self._waiting else None
            self._waiting = []
        return sse.data({**self._head, "choices": [choice]})

    def _step(self, step: StepEvent) -> dict[str, Any]:
        return step_json(step, self._index, self._tokenizer)


def step_json(step: StepEvent, choice: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """A denoise step: which positions of the block it filled, with what, and how sure the model was."""
    ids = [step.tokens[position] for position in step.filled]
    return {
        "index": choice,
        "block": step.block,
        "step": step.step,
        "size": len(step.tokens),
        "filled": list(step.filled),
        "tokens": ids,
        "texts": [tokenizer.decode([id_], keep_control_tokens=True) for id_ in ids if id_ is not None],
        "confidence": [round(c, 4) for c in step.confidence],
    }


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
