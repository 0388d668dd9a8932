"""Hermes's and Qwen3's tool calls: one JSON object, {"name": "…", "arguments": {…}}.

The arguments are given out as they come, as far as they are certain (json_scanner.py), but for their last bracket,
which waits for the whole call. Members may stand in either order; arguments before the name wait for it. Absent or null
arguments are {}, and a string that itself holds a JSON object (as OpenAI's API writes it) counts as that object, once
the call is whole. `parameters` is another name of the arguments. Other members are passed over: some models add an id.
"""

from __future__ import annotations

import json

from clover.runtime.text.tool_formats import (
    MAX_NAME,
    ArgumentsDelta,
    CallEnded,
    CallEvent,
    CallMalformed,
    CallName,
    ParameterSchemas,
)
from clover.runtime.text.tool_formats.json_scanner import JsonError, JsonScanner, JsonToken
from clover.runtime.text.tool_formats.values import object_text


class HermesJsonParser:
    """Incremental parser of one call (see CallParser)."""

    def __init__(self, schemas: ParameterSchemas) -> None:
        """`schemas` is not used: JSON carries its own types."""
        self._scanner = JsonScanner()
        self._member = ""  # the member of the call whose value is being read
        self._name: str | None = None
        self._runs: list[str] = []  # of the string that is the name, or the arguments
        self._waiting: list[str] = []  # arguments read but not given out
        self._arguments_end = "{}"  # what of the arguments only a whole call gives out
        self._has_arguments = self._over = False

    def push(self, text: str) -> list[CallEvent]:
        """See CallParser."""
        if self._over:
            return []
        named = self._name is not None
        fault: list[CallEvent] = []
        try:
            for token in self._scanner.push(text):
                self._take(token)
        except JsonError as error:
            self._over = True
            fault = [CallMalformed(str(error))]
        if self._name is None:
            return fault
        events: list[CallEvent] = [] if named else [CallName(self._name)]
        if self._waiting:
            events.append(ArgumentsDelta("".join(self._waiting)))
            self._waiting = []
        return events + fault

    def finish(self) -> list[CallEvent]:
        """See CallParser."""
        if self._over:
            return []
        self._over = True
        if not self._scanner.whole:
            return [CallMalformed("the tool call is unfinished")]
        if self._name is None:
            return [CallMalformed("the JSON has no member 'name'")]
        return [ArgumentsDelta(self._arguments_end), CallEnded()]

    def _take(self, token: JsonToken) -> None:
        if token.depth == 0:
            if (token.kind, token.text) == ("open", "["):
                raise JsonError("a tool call is one JSON object")
        elif token.depth == 1 and token.kind == "key":
            self._begin_member(json.loads(token.text))
        elif token.depth == 1 and token.kind in ("colon", "comma", "space"):
            pass
        elif self._member == "name":
            self._take_name(token)
        elif self._member == "arguments":
            self._take_arguments(token)

    def _begin_member(self, member: str) -> None:
        if len(member) > MAX_NAME:
            raise JsonError("the name of a member is too long")
        if member in ("arguments", "parameters"):
            if self._has_arguments:
                raise JsonError("the arguments are given twice")
            self._has_arguments, member = True, "arguments"
        self._member = member

    def _take_name(self, token: JsonToken) -> None:
        if token.kind != "string":
            raise JsonError("'name' is not a string")
        self._runs.append(token.text)
        if sum(map(len, self._runs)) > 6 * MAX_NAME:  # of escapes
            raise JsonError("the name is too long")
        if token.ends:
            name = self._end_string()
            if not 0 < len(name) <= MAX_NAME:
                raise JsonError("the name is empty or too long")
            self._name = name

    def _take_arguments(self, token: JsonToken) -> None:
        if token.depth > 1 or (token.kind, token.text) == ("open", "{"):
            self._waiting.append(token.text)
        elif token.kind == "close":
            self._arguments_end = "}"
        elif token.kind == "string":
            self._runs.append(token.text)
            if token.ends:
                self._arguments_end = object_text(self._end_string())
        elif token.text != "null":
            raise JsonError("'arguments' is not an object")

    def _end_string(self) -> str:
        raw, self._runs = "".join(self._runs), []
        return str(json.loads(raw))
