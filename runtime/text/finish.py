"""Why a reply ended."""

from __future__ import annotations

from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


def finish_reason(
    *, truncated: bool, cancelled: bool = False, complete_calls: int = 0, incomplete_calls: int = 0
) -> FinishReason:
    """The reply's finish reason, by precedence: length, cancelled, tool_calls, stop.

    `truncated`: the token limit cut the reply, that is, neither an end-of-sequence id nor a stop string stands in the
    tokens that were kept. It wins over everything: a reply that was cut must never pass for a whole one, even if it
    holds well-formed tool calls. The calls are those given out, `incomplete_calls` those that were begun and turned out
    malformed: tool_calls says that every call can be run.
    """
    if truncated:
        return "length"
    if cancelled:
        return "cancelled"
    return "tool_calls" if complete_calls and not incomplete_calls else "stop"
