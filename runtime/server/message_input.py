"""Anthropic's messages and system prompt as chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clover.runtime.errors import RequestError
from clover.runtime.server.fields import Fields
from clover.runtime.text.messages import checked_json, checked_text


def chat_messages(given: Any, system: Any) -> list[dict[str, Any]]:
    """Chat messages in the form templates expect. Raises RequestError."""
    if not isinstance(given, list) or not given:
        raise RequestError("messages", "messages must be a list of at least one message.")
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": _text(system, "system")})
    for i, item in enumerate(given):
        message = Fields(item, f"messages[{i}]")
        role, content = message.need("role"), message.need("content")
        message.close()
        if role not in ("user", "assistant"):
            raise message.refuse("role", f"is {str(role)[:40]!r}; it must be user or assistant.")
        if isinstance(content, str):
            content = [{"type": "text", "text": checked_text(content, message.path("content"))}]
        if not isinstance(content, list):
            raise message.refuse("content", "must be a string or a list of content blocks.")
        (_user if role == "user" else _assistant)(messages, content, message.path("content"))
    if messages[-1]["role"] == "assistant":
        raise RequestError(
            "messages", "messages must not end with the assistant's; a reply can't be begun for the model."
        )
    return messages


def _user(messages: list[dict[str, Any]], content: list[Any], where: str) -> None:
    """A user's turn: results of tools become messages of their own."""
    text: list[str] = []
    results = 0
    for j, item in enumerate(content):
        block = Fields(item, f"{where}[{j}]")
        kind = block.need("type")
        block.labels("cache_control")
        if kind == "text":
            text.append(_required(block, "text"))
        elif kind == "tool_result":
            result = block.take("content")
            body = "" if result is None else _text(result, block.path("content"))
            if block.boolean("is_error"):
                body = "Error: " + body
            messages.append({"role": "tool", "tool_call_id": _required(block, "tool_use_id"), "content": body})
            results += 1
        else:
            raise block.refuse("type", f"{str(kind)[:40]!r} isn't supported; Clover reads text and tool results.")
        block.close()
    if text or not results:
        messages.append({"role": "user", "content": "".join(text)})


def _assistant(messages: list[dict[str, Any]], content: list[Any], where: str) -> None:
    text, thinking, calls = [], [], []
    for j, item in enumerate(content):
        block = Fields(item, f"{where}[{j}]")
        kind = block.need("type")
        block.labels("cache_control", "citations", "caller")
        if kind == "text":
            text.append(_required(block, "text"))
        elif kind == "thinking":
            thinking.append(_required(block, "thinking"))
            block.labels("signature")
        elif kind == "tool_use":
            arguments = block.need("input")
            if not isinstance(arguments, Mapping):
                raise block.refuse("input", "must be an object.")
            function = {"name": _required(block, "name"), "arguments": checked_json(arguments, block.path("input"))}
            calls.append({"type": "function", "id": _required(block, "id"), "function": function})
        else:
            raise block.refuse(
                "type", f"{str(kind)[:40]!r} isn't supported; Clover reads text, thinking and tool calls."
            )
        block.close()
    message: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
    if thinking:
        message["reasoning_content"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    messages.append(message)


def _required(block: Fields, name: str) -> str:
    return checked_text(block.need(name), block.path(name))


def _text(value: Any, where: str) -> str:
    """A string, or text blocks joined."""
    if isinstance(value, str):
        return checked_text(value, where)
    if not isinstance(value, list):
        raise RequestError(where, f"{where} must be a string or a list of text blocks.")
    texts = []
    for j, item in enumerate(value):
        block = Fields(item, f"{where}[{j}]")
        if block.need("type") != "text":
            raise block.refuse("type", "must be 'text'; Clover reads text only.")
        texts.append(_required(block, "text"))
        block.labels("cache_control", "citations")
        block.close()
    return "".join(texts)
