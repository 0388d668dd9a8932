"""Hermes's and Qwen3's tool calls: one JSON object, {"name": "…", "arguments": {…}}.

The arguments are given out verbatim, as they come. Members may stand in either order; arguments before the name wait
for it. Absent or null arguments are {}, and a string that itself holds a JSON object (as OpenAI's API writes it)
counts as that object. Other members are passed over: some models add an id.
"""

from __future__ import annotations

import json

from clover.runtime.text.tool_formats import (
    MAX_DEPTH,
    MAX_NAME,
    ArgumentsDelta,
    CallEnded,
    CallEvent,
    CallMalformed,
    CallName,
    ParameterSchemas,
)
from clover.runtime.text.tool_formats.values import parse_json

_SPACE = " \t\n\r"


class _MalformedError(Exception):
    pass


class HermesJsonParser:
    """Incremental parser of one call (see CallParser).

    A scan that knows only strings and brackets finds the name and where the arguments begin and end; a strict parse of
    the whole text at the end decides whether the call is good.
    """

    def __init__(self, schemas: ParameterSchemas) -> None:
        """`schemas` is not used: JSON carries its own types."""
        self._raw: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = False
        self._string: list[str] | None = None  # raw characters of the string being read, if it is a key or the name
        self._member: str | None = None  # the member whose value comes next; None where a key is expected
        self._members: set[str] = set()
        self._name: str | None = None
        self._in_arguments = False
        self._waiting: list[str] = []  # arguments read but not given out
        self._arguments_given = self._object_ended = self._over = False

    def push(self, text: str) -> list[CallEvent]:
        """See CallParser."""
        if self._over:
            return []
        self._raw.append(text)
        named = self._name is not None
        try:
            for character in text:
                self._advance(character)
        except _MalformedError as error:
            self._over = True
            return [CallMalformed(str(error))]
        if self._name is None:
            return []
        events: list[CallEvent] = [] if named else [CallName(self._name)]
        if self._waiting:
            events.append(ArgumentsDelta("".join(self._waiting)))
            self._waiting = []
            self._arguments_given = True
        return events

    def finish(self) -> list[CallEvent]:
        """See CallParser."""
        if self._over:
            return []
        self._over = True
        try:
            call = parse_json("".join(self._raw))
        except (ValueError, RecursionError) as error:
            return [CallMalformed(f"not JSON: {error}")]
        if self._name is None:
            return [CallMalformed("the JSON has no member 'name' that is a string")]
        if self._arguments_given:
            return [CallEnded()]
        text, arguments = "{}", call.get("arguments")
        if isinstance(arguments, str):
            try:
                text, arguments = arguments, parse_json(arguments)
            except (ValueError, RecursionError) as error:
                return [CallMalformed(f"'arguments' is a string that is not JSON: {error}")]
        if arguments is not None and not isinstance(arguments, dict):
            return [CallMalformed("'arguments' is not an object")]
        return [ArgumentsDelta("{}" if arguments is None else text), CallEnded()]

    def _advance(self, character: str) -> None:
        if self._in_arguments:
            self._waiting.append(character)
        if self._in_string:
            self._advance_string(character)
        elif character in _SPACE:
            pass
        elif self._object_ended or (self._depth == 0 and character != "{"):
            raise _MalformedError("a tool call is one JSON object and nothing else")
        elif character == '"':
            self._in_string = True
            if self._depth == 1 and self._member in (None, "name"):
                self._string = []
        elif character in "[{":
            if self._depth == 1 and character == "{" and self._member == "arguments":
                self._in_arguments = True
                self._waiting.append(character)
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise _MalformedError(f"nested deeper than {MAX_DEPTH}")
        elif character in "]}":
            self._depth -= 1
            if self._depth == 1:
                self._in_arguments = False
            self._object_ended = self._depth == 0
        elif character == "," and self._depth == 1:
            self._member = None

    def _advance_string(self, character: str) -> None:
        if character == '"' and not self._escaped:
            self._in_string = False
            if self._string is not None:
                self._end_string("".join(self._string))
                self._string = None
            return
        self._escaped = character == "\\" and not self._escaped
        if self._string is not None:
            self._string.append(character)
            if len(self._string) > MAX_NAME:
                raise _MalformedError("a name is too long")

    def _end_string(self, raw: str) -> None:
        try:
            text = json.loads(f'"{raw}"')
            text.encode()
        except ValueError as error:  # half a surrogate pair too
            raise _MalformedError("a name is not valid JSON text") from error
        if self._member is None:
            if text in self._members:
                raise _MalformedError(f"member {text!r} is given twice")
            self._members.add(text)
            self._member = text
        elif not text:
            raise _MalformedError("the name is empty")
        elif self._name is not None:
            raise _MalformedError("the name is given twice")
        else:
            self._name = text
