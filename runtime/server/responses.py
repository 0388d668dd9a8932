"""OpenAI's responses API: typed items in, typed items out. Nothing is stored between requests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from clover.runtime.errors import RequestError
from clover.runtime.server import sse
from clover.runtime.server.errors import ApiError
from clover.runtime.server.fields import Fields
from clover.runtime.server.forms import response_form
from clover.runtime.server.generation import Ended, Generation, Usage
from clover.runtime.server.parts import Move, Part, Parts, new_id
from clover.runtime.server.request import (
    LABELS,
    Ask,
    named,
    shared_fields,
    stream_fields,
    thinking_flag,
    tool_choice,
)
from clover.runtime.server.response_input import input_messages
from clover.runtime.server.service import Service
from clover.runtime.server.tools import Tools
from clover.runtime.text.messages import checked_text


@dataclass(frozen=True)
class ResponseRequest:
    """A checked request. `echo`: what the response object repeats of it."""

    ask: Ask
    model: str
    stream: bool
    echo: dict[str, Any] = field(default_factory=dict)


def parse(body: Any, service: Service) -> ResponseRequest:
    """Raises RequestError or ApiError for the first field that can't be honoured."""
    f = Fields(body)
    shared = shared_fields(f, service, "max_output_tokens")
    stream, include_usage = stream_fields(f)
    if include_usage:
        raise f.refuse("stream_options", "has no include_usage here; the last event always holds the usage.")
    thinking, effort = _thinking(f)
    tools_given = f.take("tools")
    tools = _tools(tools_given, f)
    may_call = tool_choice(f)
    tools.one_call = not f.boolean("parallel_tool_calls", True)
    instructions = f.text("instructions")
    if instructions is not None:
        checked_text(instructions, "instructions")
    messages = input_messages(f.need("input"), instructions)
    metadata = f.take("metadata")  # repeated in the response, so clients must be able to read it back
    if not isinstance(metadata, dict | None):
        raise f.refuse("metadata", "must be an object.")
    text_given = f.take("text")
    text = Fields({} if text_given is None else text_given, "text")
    form = response_form(text)
    text.only("verbosity", "medium", why="verbosity can't be set.")
    text.close()
    _refuse_the_rest(f)
    called = tools if may_call else Tools()
    with named({"max_new_tokens": shared.limit_name, "messages": "input"}):
        if form is not None:
            ask = service.form_ask(messages, form, shared.given, shared.limit_name, called, thinking, "input")
        else:
            ask = service.chat_ask(messages, shared.given, called, thinking, "input")
    ask = replace(ask, timeout=shared.timeout, use_cache=shared.use_cache)
    echo = {
        "instructions": instructions,
        "metadata": metadata or {},
        "text": {"format": (text_given or {}).get("format") or {"type": "text"}},
        "tools": tools_given or [],
        "tool_choice": "auto" if may_call else "none",
        "parallel_tool_calls": not tools.one_call,
        "temperature": ask.options.temperature,
        "top_p": ask.options.top_p,
        "max_output_tokens": shared.given["max_new_tokens"],
        "reasoning": {"effort": effort, "summary": None},
    }
    return ResponseRequest(ask, shared.model, stream, echo)


def _refuse_the_rest(f: Fields) -> None:
    f.only("previous_response_id", why="nothing is stored; send the whole conversation in input.")
    f.only("store", False, why="nothing is stored.")
    f.only("background", False, why="replies are not made in the background.")
    f.only("truncation", "disabled", why="a conversation that is too long is refused, not shortened.")
    f.only("service_tier", "auto", "default", why="there is one tier.")
    f.only("include", [], why="nothing more can be included.")
    f.labels(*LABELS)
    f.close()


def _thinking(f: Fields) -> tuple[bool | None, str | None]:
    """(enable_thinking, reasoning.effort): effort "none" means the same as false."""
    reasoning = f.object("reasoning")
    effort = reasoning.text("effort")
    reasoning.only("summary", why="reasoning is given out whole, not summed up.")
    reasoning.close()
    thinking = thinking_flag(f)
    if effort not in (None, "none"):
        raise RequestError("reasoning.effort", f"reasoning.effort {effort!r} can't be honoured; use enable_thinking.")
    if effort == "none" and thinking:
        raise RequestError("reasoning.effort", "reasoning.effort 'none' and enable_thinking contradict each other.")
    return (False if effort == "none" else thinking), effort


def _tools(given: Any, f: Fields) -> Tools:
    if given is not None and not isinstance(given, list):
        raise f.refuse("tools", "must be a list.")
    tools = Tools()
    for i, item in enumerate(given or ()):
        tool = Fields(item, f"tools[{i}]")
        if tool.need("type") != "function":
            raise tool.refuse("type", "must be 'function'; the server runs no tools itself.")
        strict = tool.boolean("strict")
        name, description, parameters = (tool.take(key) for key in ("name", "description", "parameters"))
        tools.add(name, description, parameters, f"tools[{i}]", "parameters", strict=strict)
        tool.close()
    return tools


# -- the response --------------------------------------------------------------------------------


class ResponseBuilder:
    """Builds the response object, and the events that tell of its growth."""

    def __init__(self, request: ResponseRequest) -> None:
        self._parts = Parts()
        self._ids: list[str] = []  # of the output items
        self._number = 0
        self.response: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": request.model,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **request.echo,
        }

    def begin(self) -> list[dict[str, Any]]:
        return [self._of_response("response.created"), self._of_response("response.in_progress")]

    def feed(self, events: Any) -> list[dict[str, Any]]:
        """The events of more reply events."""
        return [e for move in self._parts.feed(events) for e in self._move(move, "completed")]

    def end(self, end: Ended, usage: Usage) -> list[dict[str, Any]]:
        """The last events. The response object is whole afterwards."""
        complete = end.reason != "length"
        status = "completed" if complete else "incomplete"
        events = [e for move in self._parts.finish() for e in self._move(move, status)]
        self.response["status"] = status
        if not complete:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "blocks": usage.blocks,
            "steps": usage.steps,
            "tokens_per_step": usage.tokens_per_step,
        }
        return [*events, self._of_response(f"response.{status}")]

    def fail(self, error: ApiError) -> list[dict[str, Any]]:
        """The last event of a response that broke off."""
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": error.message}
        return [self._of_response("response.failed")]

    def _of_response(self, kind: str) -> dict[str, Any]:
        return self._event(kind, response={**self.response, "output": list(self.response["output"])})

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _move(self, move: Move, status: str) -> list[dict[str, Any]]:
        part = move.part
        if move.what == "open":
            self._ids.append(new_id({"text": "msg_", "reasoning": "rs_", "call": "fc_"}[part.kind]))
        where: dict[str, Any] = {"item_id": self._ids[part.index], "output_index": part.index}
        if part.kind == "call":
            return self._move_call(move, where)
        kind = "output_text" if part.kind == "text" else "reasoning_text"
        where["content_index"] = 0
        logprobs: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        if move.what == "open":
            return [
                self._event(
                    "response.output_item.added", output_index=part.index, item=self._item(part, "in_progress")
                ),
                self._event("response.content_part.added", **where, part=_content(part.kind, "")),
            ]
        if move.what == "grow":
            return [self._event(f"response.{kind}.delta", **where, delta=move.text, **logprobs)]
        return [
            self._event(f"response.{kind}.done", **where, text=part.text, **logprobs),
            self._event("response.content_part.done", **where, part=_content(part.kind, part.text)),
            self._done(part, status),
        ]

    def _move_call(self, move: Move, where: dict[str, Any]) -> list[dict[str, Any]]:
        part = move.part
        if move.what == "open":
            item = self._item(part, "in_progress")
            return [self._event("response.output_item.added", output_index=part.index, item=item)]
        kind = "response.function_call_arguments."
        if move.what == "grow":
            return [self._event(kind + "delta", **where, delta=move.text)]
        if not part.complete:  # no `done`: clients run a call when they see it
            return [self._done(part, "incomplete")]
        return [self._event(kind + "done", **where, name=part.name, arguments=part.text), self._done(part, "completed")]

    def _done(self, part: Part, status: str) -> dict[str, Any]:
        item = self._item(part, status)
        self.response["output"].append(item)
        return self._event("response.output_item.done", output_index=part.index, item=item)

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        id_ = self._ids[part.index]
        begun = status == "in_progress"
        content = [] if begun else [_content(part.kind, part.text)]
        if part.kind == "text":
            return {"id": id_, "type": "message", "status": status, "role": "assistant", "content": content}
        if part.kind == "reasoning":
            return {"id": id_, "type": "reasoning", "status": status, "summary": [], "content": content}
        item = {"id": id_, "type": "function_call", "status": status, "call_id": part.id, "name": part.name}
        return {**item, "arguments": "" if begun else part.text}


def _content(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def whole(request: ResponseRequest, generation: Generation) -> dict[str, Any]:
    """The response object. Raises ApiError when the reply breaks off."""
    builder = ResponseBuilder(request)
    async for item in generation:
        if isinstance(item, Ended):
            builder.end(item, generation.usage)
        elif item is not None:
            builder.feed(item.events)
    return builder.response


async def stream(request: ResponseRequest, generation: Generation) -> AsyncIterator[bytes]:
    """The response as server-sent events."""
    builder = ResponseBuilder(request)
    yield _events(builder.begin())
    try:
        async for item in generation:
            if item is None:
                yield sse.WAITING
            elif isinstance(item, Ended):
                yield _events(builder.end(item, generation.usage))
            elif item.events:
                yield _events(builder.feed(item.events))
    except ApiError as error:
        yield _events(builder.fail(error))


def _events(events: list[dict[str, Any]]) -> bytes:
    return b"".join(map(sse.event, events))
