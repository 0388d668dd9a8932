"""The items of a responses request as chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from clover.runtime.errors import RequestError
from clover.runtime.server.fields import Fields
from clover.runtime.text.messages import checked_json, checked_text

_TEXT_TYPES = ("input_text", "output_text", "text")


def input_messages(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Chat messages from `input` (a string or a list of items), `instructions` first. Raises RequestError."""
    messages: list[dict[str, Any]] = []
    if isinstance(given, str):
        messages.append({"role": "user", "content": checked_text(given, "input")})
    elif isinstance(given, list) and given:
        for i, item in enumerate(given):
            _add(messages, Fields(item, f"input[{i}]"))
    else:
        raise RequestError("input", "input must be a string or a list of at least one item.")
    if instructions:
        if messages and messages[0]["role"] in ("system", "developer"):  # templates allow one system message
            messages[0]["content"] = instructions + "\n\n" + messages[0]["content"]
        else:
            messages.insert(0, {"role": "system", "content": instructions})
    return messages


def _add(messages: list[dict[str, Any]], item: Fields) -> None:
    kind = item.text("type") or "message"
    item.labels("id", "status")
    if kind == "message":
        role = item.need("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise item.refuse("role", f"is {str(role)[:40]!r}; it must be system, developer, user or assistant.")
        content = _text(item.need("content"), item.path("content"), _TEXT_TYPES)
        item.labels("phase")
        if role == "assistant":
            message = _assistant(messages)
            message["content"] += content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "reasoning":
        item.only("encrypted_content", why="reasoning is plain text here.")
        item.only("summary", [], why="send the reasoning itself, as content.")
        text = _text(item.items("content"), item.path("content"), ("reasoning_text",))
        message = _assistant(messages)
        message["reasoning_content"] = message.get("reasoning_content", "") + text
    elif kind == "function_call":
        function = {"name": _required(item, "name"), "arguments": _arguments(item)}
        call = {"type": "function", "id": _required(item, "call_id"), "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _text(item.need("output"), item.path("output"), _TEXT_TYPES)
        messages.append({"role": "tool", "tool_call_id": _required(item, "call_id"), "content": output})
    else:
        raise item.refuse(
            "type", f"{kind[:40]!r} isn't supported; Clover reads messages, reasoning and function calls."
        )
    item.close()


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant message that the items of one turn build up together."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _required(item: Fields, name: str) -> str:
    return checked_text(item.need(name), item.path(name))


def _arguments(item: Fields) -> Any:
    """A call's arguments, as an object. Checked here, where the item's place is known."""
    value = item.need("arguments")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping):
        raise item.refuse("arguments", "must be the text of a JSON object; leave a call out that was cut.")
    return checked_json(value, item.path("arguments"))


def _text(value: Any, where: str, kinds: tuple[str, ...]) -> str:
    if isinstance(value, str):
        return checked_text(value, where)
    if not isinstance(value, list):
        raise RequestError(where, f"{where} must be a string or a list of text parts.")
    texts = []
    for j, part in enumerate(value):
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if kind not in kinds or not isinstance(text, str):
            raise RequestError(f"{where}[{j}]", f"{where}[{j}] must be a text part; Clover reads text only.")
        fields = Fields(part, f"{where}[{j}]")
        fields.labels("type", "text", "annotations", "logprobs")  # replies have the last two
        fields.close()
        texts.append(checked_text(text, fields.path("text")))
    return "".join(texts)
