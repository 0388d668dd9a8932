"""Qwen3.5's and Qwen3-Coder's tool calls.

    <function=name>
    <parameter=key>
    value, perhaps of several lines
    </parameter>
    </function>

One newline after `<parameter=key>` and one before `</parameter>` belong to the layout, the rest to the value. A value
is typed by the tool's JSON schema when there is one, else it is a string. A value that can only be a string is given
out as it comes; others when they are complete, since a text that does not fit its type becomes a string after all. A
value ends at the first `</parameter>`, there is no escape for it; or at the `</function>` that ends the call, since
models forget the `</parameter>` before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from clover.runtime.text.partial_match import held_back_from
from clover.runtime.text.tool_formats import (
    MAX_NAME,
    ArgumentsDelta,
    CallEnded,
    CallEvent,
    CallMalformed,
    CallName,
    ParameterSchemas,
)
from clover.runtime.text.tool_formats.values import allowed_types, typed_json

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_VALUE_ENDS = ("\n" + _END_PARAMETER, _END_PARAMETER, "\n" + _END_FUNCTION, _END_FUNCTION)
_END_OF_CALL = re.compile(
    rf"\n?{_END_FUNCTION}\s{{0,64}}\Z"
)  # bounded, so that a run of spaces isn't searched for ever


class _MalformedError(Exception):
    pass


class QwenXmlParser:
    """Incremental parser of one call (see CallParser)."""

    def __init__(self, schemas: ParameterSchemas) -> None:
        """`schemas`: parameter schemas by function name; may be empty."""
        self._schemas = schemas
        self._schema: Mapping[str, Any] | None = None
        self._buffer = ""
        self._step: Callable[[], bool] = self._read_function
        self._keys: set[str] = set()
        self._types: frozenset[str] = frozenset()
        self._value: list[str] | None = None  # pieces of a value that is not a string, so not given out yet
        self._at_value_start = False
        self._whole = self._over = False
        self._events: list[CallEvent] = []

    def push(self, text: str) -> list[CallEvent]:
        """See CallParser."""
        if self._over:
            return []
        self._buffer += text
        try:
            while self._step():
                pass
        except _MalformedError as error:
            self._over = True
            self._events.append(CallMalformed(str(error)))
        return self._take()

    def finish(self) -> list[CallEvent]:
        """See CallParser."""
        if self._over:
            return []
        self._over = True
        if self._step == self._read_value and (end := _END_OF_CALL.search(self._buffer)):
            self._end_value(self._buffer[: end.start()])
            self._whole = True
        if not self._whole:
            return [CallMalformed("the tool call is unfinished")]
        self._give("}" if self._keys else "{}")
        return [*self._take(), CallEnded()]

    # Each step uses up some of the buffer and returns True, or returns False to wait for more text.

    def _read_function(self) -> bool:
        name = self._read_tag(_FUNCTION)
        if name is None:
            return False
        self._schema = self._schemas.get(name)
        self._events.append(CallName(name))
        self._step = self._read_parameter
        return True

    def _read_parameter(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(_END_FUNCTION):
            self._buffer = self._buffer[len(_END_FUNCTION) :]
            self._whole = True
            self._step = self._read_trailing_space
            return True
        if _END_FUNCTION.startswith(self._buffer):
            return False
        key = self._read_tag(_PARAMETER)
        if key is None:
            return False
        if key in self._keys:
            raise _MalformedError(f"parameter {key!r} is given twice")
        self._give((", " if self._keys else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self._keys.add(key)
        self._types = allowed_types(self._schema, key)
        self._at_value_start = True
        if self._types <= {"string"}:
            self._value = None
            self._give('"')
        else:
            self._value = []
        self._step = self._read_value
        return True

    def _read_value(self) -> bool:
        if self._at_value_start:
            if not self._buffer:
                return False
            self._buffer = self._buffer.removeprefix("\n")
            self._at_value_start = False
        end = self._buffer.find(_END_PARAMETER)
        if end < 0:
            held = _END_OF_CALL.search(self._buffer)
            sure = held.start() if held else held_back_from(self._buffer, _VALUE_ENDS)
            self._give_value(self._buffer[:sure])
            self._buffer = self._buffer[sure:]
            return False
        self._end_value(self._buffer[:end].removesuffix("\n"))
        self._buffer = self._buffer[end + len(_END_PARAMETER) :]
        self._step = self._read_parameter
        return True

    def _read_trailing_space(self) -> bool:
        if self._buffer.strip():
            raise _MalformedError(f"text follows {_END_FUNCTION}")
        self._buffer = ""
        return False

    def _read_tag(self, opening: str) -> str | None:
        """The name in `opening`name`>` at the start of the buffer, or None while it is unfinished."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer.startswith(opening):
            if opening.startswith(self._buffer):
                return None
            raise _MalformedError(f"expected {opening!r}, found {self._buffer[:20]!r}")
        end = self._buffer.find(">", 0, len(opening) + MAX_NAME + 1)
        if end < 0:
            if len(self._buffer) > len(opening) + MAX_NAME:
                raise _MalformedError(f"the name after {opening!r} does not end")
            return None
        name = self._buffer[len(opening) : end].strip()
        if not name or "\n" in name or "<" in name:
            raise _MalformedError(f"the name after {opening!r} is {name!r}")
        self._buffer = self._buffer[end + 1 :]
        return name

    def _end_value(self, rest: str) -> None:
        self._give_value(rest)
        self._give('"' if self._value is None else typed_json("".join(self._value), self._types))

    def _give_value(self, text: str) -> None:
        if self._value is not None:
            self._value.append(text)
        elif text:
            self._give(json.dumps(text, ensure_ascii=False)[1:-1])

    def _give(self, text: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, ArgumentsDelta):
            self._events[-1] = ArgumentsDelta(last.text + text)
        else:
            self._events.append(ArgumentsDelta(text))

    def _take(self) -> list[CallEvent]:
        events, self._events = self._events, []
        return events
