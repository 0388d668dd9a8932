"""A request's tools, and what of a reply's calls a client is given."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clover.runtime.errors import RequestError
from clover.runtime.server.schema import check_schema, text_fits
from clover.runtime.text.finish import FinishReason
from clover.runtime.text.reply import FunctionArgumentsDelta, FunctionCallStarted, ReplyEvent
from clover.runtime.text.stream_parser import ContentDelta

NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass
class Tools:
    """Tools in the form templates expect. `strict`: schemas by name that calls are held to."""

    shown: list[dict[str, Any]] = field(default_factory=list)
    strict: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    one_call: bool = False  # the reply ends behind its first call

    def add(self, name: Any, description: Any, parameters: Any, strict: bool, where: str, schema: str) -> None:
        """Checks and adds a function. `schema` is what the dialect calls its parameters. Raises RequestError."""
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where}.name", f"{where}.name must be a non-empty string.")
        if description is not None and not isinstance(description, str):
            raise RequestError(f"{where}.description", f"{where}.description must be a string.")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RequestError(f"{where}.{schema}", f"{where}.{schema} must be a JSON schema (an object).")
        function: dict[str, Any] = {"name": name}
        if description is not None:
            function["description"] = description
        function["parameters"] = NO_PARAMETERS if parameters is None else parameters
        if strict:
            check_schema(function["parameters"], f"{where}.{schema}")
            self.strict[name] = function["parameters"]
        self.shown.append({"type": "function", "function": function})


class CallFilter:
    """Passes a reply's events on, without the calls that its tools rule out. A call comes whole, in one list of events.

    A call whose arguments do not fit a strict tool's schema stays in the text, as the model wrote it: no client runs it,
    and nothing is lost.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._given = 0
        self.over = False  # the only call that is wanted was given out

    def feed(self, events: Sequence[ReplyEvent]) -> list[ReplyEvent]:
        """What of these events is given out."""
        if not any(isinstance(event, FunctionCallStarted) for event in events):
            return list(events)
        passed: list[ReplyEvent] = []
        rest = list(events)
        while rest and not self.over:
            event = rest.pop(0)
            if not isinstance(event, FunctionCallStarted):
                passed.append(event)
                continue
            arguments = ""
            while rest and isinstance(piece := rest[0], FunctionArgumentsDelta):
                arguments += piece.text
                rest.pop(0)
            passed += self._call(event.name, arguments)
        return passed

    def reason(self, reason: FinishReason) -> FinishReason:
        """Why the reply ended, given what calls were passed on."""
        if self.over:
            return "tool_calls"
        return "stop" if reason == "tool_calls" and not self._given else reason

    def _call(self, name: str, arguments: str) -> Iterable[ReplyEvent]:
        schema = self._tools.strict.get(name)
        if schema is not None and not text_fits(arguments, schema):
            text = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}'
            return [ContentDelta(f"<tool_call>\n{text}\n</tool_call>")]
        index, self._given = self._given, self._given + 1
        self.over = self._tools.one_call
        return [FunctionCallStarted(index, name), FunctionArgumentsDelta(index, arguments)]
