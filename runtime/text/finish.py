"""Why a reply ended."""

from __future__ import annotations

from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


def finish_reason(*, truncated: bool, cancelled: bool = False, tool_calls: int = 0) -> FinishReason:
    """The reply's finish reason, by precedence: length, cancelled, tool_calls, stop.

    `truncated`: the token limit cut the reply, that is, neither an end-of-sequence id nor a stop string stands in the
    tokens that were kept. It wins over everything: a reply that was cut must never pass for a whole one, even
    if it holds well-formed tool calls. `tool_calls` counts well-formed calls.
    """
    if truncated:
        return "length"
    if cancelled:
        return "cancelled"
    return "tool_calls" if tool_calls else "stop"
