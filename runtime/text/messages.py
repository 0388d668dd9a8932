"""Checks chat messages and tools (OpenAI's form) and brings them into the form chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from clover.runtime.errors import RequestError

# role → the role templates know
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = {
    "system": {"name"},
    "user": {"name"},
    "assistant": {"name", "reasoning_content", "tool_calls"},
    "tool": {"name", "tool_call_id"},
}


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with `content` as one string and tool-call arguments as objects.

    Content may be a string or a list of `{"type": "text", "text": …}` parts, which are joined. Raises RequestError,
    naming the field (`messages[2].content`), for anything else; fields that carry nothing (null, empty list) are let
    pass.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages", "messages must be a list of at least one {role, content} message.")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def normalise_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Tools as plain dicts; an empty list for none. Raises RequestError naming `tools[i]…`."""
    if tools is None:
        return []
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise RequestError("tools", "tools must be a list of function definitions.")
    checked: list[dict[str, Any]] = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(function, Mapping):
            raise RequestError(
                f"tools[{i}]", f'tools[{i}] must have the form {{"type": "function", "function": {{…}}}}.'
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(f"tools[{i}].function.name", f"tools[{i}].function.name must be a non-empty string.")
        checked.append(checked_json(tool, f"tools[{i}]"))
    return checked


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(where, f"{where} must be an object with role and content.")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{where}.role", f"{where}.role is {role!r}; it must be one of {', '.join(_ROLES)}.")
    known = _ROLES[role]
    checked: dict[str, Any] = {"role": known}
    calls = message.get("tool_calls")
    if calls and known == "assistant":
        checked["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    content = message.get("content")
    # An assistant message that only calls tools has no content.
    checked["content"] = "" if content is None and "tool_calls" in checked else _content(content, f"{where}.content")
    for field, value in message.items():
        if field in ("role", "content") or value is None or value == []:
            continue
        if field not in _FIELDS[known]:
            raise RequestError(
                f"{where}.{field}", f"{where}.{field} isn't supported in a message of role {role}; remove it."
            )
        if field != "tool_calls":
            checked[field] = checked_text(value, f"{where}.{field}")
    return checked


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return checked_text(content, where)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(where, f"{where} must be a string or a list of text parts.")
    parts: list[str] = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise RequestError(
                where, f"{where}[{j}] has type {kind!r}; Clover reads text only, so every part must be a text part."
            )
        _refuse_others(part, {"type", "text", "cache_control"}, f"{where}[{j}]")
        parts.append(checked_text(part.get("text"), f"{where}[{j}].text"))
    return "".join(parts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise RequestError(where, f"{where} must be a list.")
    checked = []
    for j, call in enumerate(calls):
        here = f"{where}[{j}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RequestError(here, f'{here} must have the form {{"function": {{"name": …, "arguments": …}}}}.')
        if call.get("type") not in (None, "function"):
            raise RequestError(f"{here}.type", f"{here}.type must be 'function'; the model calls nothing else.")
        _refuse_others(call, {"id", "type", "index", "function"}, here)
        # OpenAI's client sends back what it parsed itself
        _refuse_others(function, {"name", "arguments", "parsed_arguments"}, f"{here}.function")
        name = checked_text(function.get("name"), f"{here}.function.name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, Mapping):
            field = f"{here}.function.arguments"
            raise RequestError(
                field, f"{field} must be a JSON object, as an object or as its text; leave a call out that was cut."
            )
        entry: dict[str, Any] = {
            "type": "function",
            "function": {"name": name, "arguments": checked_json(arguments, here)},
        }
        # clients may leave it out, templates may read it
        entry["id"] = f"call_{j}" if call.get("id") is None else checked_text(call["id"], f"{here}.id")
        checked.append(entry)
    return checked


def _refuse_others(value: Mapping[str, Any], known: set[str], where: str) -> None:
    for key, item in value.items():
        if key not in known and item is not None:
            name = f"{where}.{str(key)[:80]}"
            raise RequestError(name, f"{name} isn't supported; remove it.")


def checked_text(value: Any, where: str) -> str:
    """A string of valid Unicode. Raises RequestError naming `where`."""
    if not isinstance(value, str):
        raise RequestError(where, f"{where} must be a string.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(where, f"{where} is not valid Unicode (it holds half of a surrogate pair).") from error
    return str(value)


def checked_json(value: Any, where: str) -> Any:
    """A copy made of dicts, lists, strings, numbers, booleans and None only. Raises RequestError naming `where`."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_mapping_as_dict)
        text.encode()
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(where, f"{where} can't be written as JSON text.") from error


def _mapping_as_dict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError
