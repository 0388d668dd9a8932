"""From the raw text of a tool call to its name and its arguments as JSON: one file per format.

A parser gets what stands between `<tool_call>` and `</tool_call>` in pieces. It reports the name once, then pieces of
the arguments as soon as they are certain, then `CallEnded`; or, at any point, `CallMalformed`. The last bracket of the
arguments comes with `CallEnded`, so that the pieces join to valid JSON only if the call is whole: half a call can't pass
for a whole one. Joined, the events depend on the text alone, not on how it was split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

# JSON nested deeper than this is refused before any recursive parser sees it.
MAX_DEPTH = 100
# A function or parameter name longer than this is text gone astray.
MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class CallName:
    """The function to call."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the arguments' JSON text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call is whole: the deltas join to a JSON object."""


@dataclass(frozen=True, slots=True)
class CallMalformed:
    """The text is not a call, or no longer one. `reason` says why, in words for a log."""

    reason: str


CallEvent = CallName | ArgumentsDelta | CallEnded | CallMalformed
# function name → JSON schema of its parameters
ParameterSchemas = Mapping[str, Mapping[str, Any]]


class CallParser(Protocol):
    """Parses one call."""

    def push(self, text: str) -> list[CallEvent]:
        """Events that more raw text makes certain."""

    def finish(self) -> list[CallEvent]:
        """The raw text is complete: ends with CallEnded or CallMalformed, unless that was given already."""
