"""Anthropic's messages API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from clover.runtime.server import sse
from clover.runtime.server.errors import ApiError
from clover.runtime.server.fields import Fields
from clover.runtime.server.generation import Choice, Ended, Generation, Usage
from clover.runtime.server.message_input import chat_messages
from clover.runtime.server.parts import Move, Part, Parts, new_id
from clover.runtime.server.request import Ask, named, shared_fields, thinking_flag
from clover.runtime.server.service import Service
from clover.runtime.server.tools import Tools


@dataclass(frozen=True)
class MessageRequest:
    """A checked request."""

    ask: Ask
    model: str
    stream: bool


def parse(body: Any, service: Service) -> MessageRequest:
    """Raises RequestError or ApiError for the first field that can't be honoured."""
    f = Fields(body)
    shared = shared_fields(f, service, "max_tokens", stop="stop_sequences")
    if shared.given["max_new_tokens"] is None:
        raise f.refuse("max_tokens", "is missing; give the longest reply in tokens.")
    stream = f.boolean("stream")
    f.only("service_tier", "auto", "standard_only", why="there is one tier.")
    f.labels("metadata")
    messages, tools, thinking = _prompt_fields(f)
    with named({"max_new_tokens": "max_tokens", "stop": "stop_sequences"}):
        ask = service.chat_ask(messages, shared.given, tools, thinking)
    ask = replace(ask, timeout=shared.timeout, use_cache=shared.use_cache)
    return MessageRequest(ask, shared.model, stream)


def count_tokens(body: Any, service: Service) -> dict[str, int]:
    """The answer of /v1/messages/count_tokens."""
    f = Fields(body)
    service.check_model(f)
    messages, tools, thinking = _prompt_fields(f)
    ids, _ = service.chat_prompt(messages, tools.shown, thinking)
    return {"input_tokens": len(ids)}


def _prompt_fields(f: Fields) -> tuple[list[dict[str, Any]], Tools, bool | None]:
    """(chat messages, tools, whether to think): what makes the prompt. Refuses every field left."""
    thinking = _thinking(f)
    tools = _tools(f)
    f.labels("cache_control")  # the conversation cache needs no hints
    messages = chat_messages(f.need("messages"), f.take("system"))
    f.close()
    return messages, tools, thinking


def _thinking(f: Fields) -> bool | None:
    """Anthropic's thinking.type, or enable_thinking."""
    own = thinking_flag(f)
    given = f.object("thinking")
    kind = given.text("type")
    given.only("budget_tokens", why="reasoning can't be held to a budget; use {'type': 'adaptive'} and max_tokens.")
    given.close()
    if kind is None:
        return own
    if kind not in ("enabled", "adaptive", "disabled"):
        raise given.refuse("type", f"is {kind[:40]!r}; it must be enabled, adaptive or disabled.")
    if own is not None and own != (kind != "disabled"):
        raise given.refuse("type", f"{kind!r} and enable_thinking contradict each other; give one.")
    return kind != "disabled"


def _tools(f: Fields) -> Tools:
    tools = Tools()
    for i, item in enumerate(f.items("tools")):
        tool = Fields(item, f"tools[{i}]")
        if (tool.text("type") or "custom") != "custom":
            raise tool.refuse("type", "must be 'custom'; the server runs no tools itself.")
        tool.labels("cache_control")
        strict, schema = tool.boolean("strict"), tool.need("input_schema")
        streamed = tool.boolean("eager_input_streaming", True)
        name, description = tool.take("name"), tool.take("description")
        tools.add(name, description, schema, f"tools[{i}]", "input_schema", strict=strict, streamed=streamed)
        tool.close()
    choice = f.object("tool_choice")
    kind = choice.text("type") or "auto"
    tools.one_call = choice.boolean("disable_parallel_tool_use")
    choice.close()
    if kind not in ("auto", "none"):
        raise choice.refuse("type", "can be 'auto' or 'none'; a call can't be forced.")
    return tools if kind == "auto" else Tools()


# -- replies -------------------------------------------------------------------------------------


def whole(request: MessageRequest, choice: Choice, usage: Usage) -> dict[str, Any]:
    """The message object."""
    assert choice.end is not None
    return {
        **_message(request.model),
        "content": [block for part in choice.parts.all if (block := _block(part))],
        **_stop(choice.end),
        "usage": _usage(usage),
    }


def _message(model: str) -> dict[str, Any]:
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}


def _block(part: Part) -> dict[str, Any] | None:
    """None for what is said elsewhere."""
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if part.complete:
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": json.loads(part.text)}
    # An object can't show that it is half of one, so the call stays text: a malformed one stands there already.
    return {"type": "text", "text": part.raw} if part.raw else None


def _stop(end: Ended) -> dict[str, Any]:
    # calls are to be run, also where a stop string ended the text behind them
    if end.reason == "stop" and end.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_string}
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(end.reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts cached tokens apart from the input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "blocks": usage.blocks,
        "steps": usage.steps,
        "tokens_per_step": usage.tokens_per_step,
    }


async def stream(request: MessageRequest, generation: Generation) -> AsyncIterator[bytes]:
    """The message as server-sent events."""
    usage = _usage(Usage(prompt_tokens=len(request.ask.prompts[0]), cached_tokens=generation.cached_tokens))
    start = {**_message(request.model), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield sse.event({"type": "message_start", "message": start}) + sse.event({"type": "ping"})
    parts = Parts()
    try:
        async for item in generation:
            if item is None:
                yield sse.event({"type": "ping"})
                continue
            if not isinstance(item, Ended):
                if item.events:
                    yield b"".join(map(_move, parts.feed(item.events)))
                continue
            last = {"type": "message_delta", "delta": _stop(item), "usage": _usage(generation.usage)}
            yield b"".join(map(_move, parts.finish())) + sse.event(last) + sse.event({"type": "message_stop"})
    except ApiError as error:
        yield sse.event(error.body("anthropic"))


def _move(move: Move) -> bytes:
    part, where = move.part, {"index": move.part.index}
    if move.what == "open":
        block: dict[str, Any] = {"type": "text", "text": ""}
        if part.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif part.kind == "call":
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        return sse.event({"type": "content_block_start", **where, "content_block": block})
    if move.what == "grow":
        delta = {
            "text": {"type": "text_delta", "text": move.text},
            "reasoning": {"type": "thinking_delta", "thinking": move.text},
            "call": {"type": "input_json_delta", "partial_json": move.text},
        }[part.kind]
        return sse.event({"type": "content_block_delta", **where, "delta": delta})
    signature = b""
    if part.kind == "reasoning":
        delta = {"type": "signature_delta", "signature": ""}
        signature = sse.event({"type": "content_block_delta", **where, "delta": delta})
    return signature + sse.event({"type": "content_block_stop", **where})
