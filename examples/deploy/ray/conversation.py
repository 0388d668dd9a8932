"""Which conversation a request belongs to, so that its next turn can go where its state is cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

HEADER = "x-session-id"  # the name Ray Serve's own routers read
PROMPT_START = 128  # characters of a raw prompt that stand for its conversation
PROMPT_START_IDS = 32


def conversation_key(headers: Mapping[str, str], body: Any) -> str:
    """A key that all turns of one conversation share, and that different ones mostly do not; "" when there is nothing
    to tell by.

    A client that knows its conversations names them in the header x-session-id or in OpenAI's `prompt_cache_key`. For
    the others the conversation is known by how it begins: instructions and everything up to the first message of the
    user, which every later turn repeats. (A shared system prompt alone would send all conversations to one replica.)
    `body`: the request's JSON, unchecked; header names are in lower case.
    """
    if name := headers.get(HEADER):
        return _digest("named", name)
    if not isinstance(body, Mapping):
        return ""
    if isinstance(name := body.get("prompt_cache_key"), str) and name:
        return _digest("named", name)
    head = _head(body)
    return _digest("begins", body.get("system"), body.get("instructions"), head) if head else ""


def _head(body: Mapping[str, Any]) -> Any:
    """What stays the same at the front of a conversation; None when the request has no prompt."""
    turns = body.get("messages", body.get("input"))
    if isinstance(turns, list):
        for i, turn in enumerate(turns):
            if isinstance(turn, Mapping) and turn.get("role") == "user":
                return [_content(item) for item in turns[: i + 1]]
        return turns[:1]
    if isinstance(turns, str):  # `input` as text is the first user message as an item would be
        return [_content({"role": "user", "content": turns})]
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # several prompts: they travel together
    if isinstance(prompt, str):
        return prompt[:PROMPT_START]
    return prompt[:PROMPT_START_IDS] if isinstance(prompt, list) else None


def _content(turn: Any) -> Any:
    """Role and text of a message: clients write the same message as a string at one time and as parts at another."""
    if not isinstance(turn, Mapping):
        return turn
    content = turn.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return [turn.get("role"), content]


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
