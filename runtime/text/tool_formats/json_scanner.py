"""Strict JSON that arrives in pieces: every token is checked before it is given out.

What was given out can always be continued to a valid text, and no token depends on how the text was split: a string
value comes in runs, everything else (keys, numbers, literals) whole, and no run ends inside an escape.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from clover.runtime.text.tool_formats import MAX_DEPTH

TokenKind = Literal["space", "open", "close", "colon", "comma", "key", "scalar", "string"]

_SPACE = re.compile(r"[ \t\n\r]+")
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_LONGEST_NUMBER = 1000  # characters; readers have limits of their own, Python's is 4300 digits
_STRING_RUN = re.compile(r'[^"\\]+')
# A high half of a surrogate pair counts only together with its low half: alone it is no character.
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})'
)
_LONGEST_ESCAPE = len(r"\ud83d\ude00")
_CONTROL = re.compile(r"[\x00-\x1f]")
_CLOSING = {"{": "}", "[": "]"}


class JsonError(ValueError):
    """The text is not strict JSON."""


def is_number(text: str) -> bool:
    """Whether the text is a JSON number that every reader takes: neither too long nor beyond a float64."""
    return len(text) <= _LONGEST_NUMBER and bool(_NUMBER.fullmatch(text)) and math.isfinite(float(text))


def is_integer(text: str) -> bool:
    """Whether the text is such a number, written as an integer."""
    return bool(_INTEGER.fullmatch(text)) and is_number(text)


@dataclass(frozen=True, slots=True)
class JsonToken:
    """A token, or a run of a string value. `depth`: how many containers it stands in. `ends`: a string's last run.

    Runs include the quotes. Control characters inside strings, which JSON forbids and models write, come as escapes.
    """

    kind: TokenKind
    text: str
    depth: int
    ends: bool = True


class JsonScanner:
    """Scans one object or array."""

    def __init__(self) -> None:
        self._closing: list[str] = []  # the brackets still to come, innermost last
        self._keys: list[set[str]] = []  # names seen in each open object
        self._expected: Literal["value", "value or ]", "key", "key or }", "colon", "comma", "nothing"] = "value"
        self._in_string = False
        self._key: list[str] | None = None  # runs of the key being read
        self._scalar: list[str] = []  # pieces of the number or literal being read
        self._escape = ""  # the beginning of an escape

    @property
    def whole(self) -> bool:
        """Whether the value is complete."""
        return self._expected == "nothing"

    def push(self, text: str) -> Iterator[JsonToken]:
        """Yields the tokens that `text` completes. Raises JsonError where the text stops being JSON."""
        text, self._escape = self._escape + text, ""
        position = 0
        while position < len(text):
            if self._in_string:
                token, position = self._string(text, position)
            elif match := _SPACE.match(text, position):
                yield from self._end_scalar()
                token, position = self._token("space", match[0]), match.end()
            elif match := _SCALAR_RUN.match(text, position):
                if not self._scalar:
                    self._expect_value()
                self._scalar.append(match[0])
                token, position = None, match.end()
            else:
                yield from self._end_scalar()
                token, position = self._mark(text[position]), position + 1
            if token is not None:
                yield token

    def _token(self, kind: TokenKind, text: str, ends: bool = True) -> JsonToken:
        return JsonToken(kind, text, len(self._closing), ends)

    def _end_scalar(self) -> Iterator[JsonToken]:
        if self._scalar:
            text = "".join(self._scalar)
            self._scalar = []
            if text not in ("true", "false", "null") and not is_number(text):
                raise JsonError(f"{text[:20]!r} is not a JSON value")
            self._expected = "comma"
            yield self._token("scalar", text)

    def _mark(self, mark: str) -> JsonToken | None:
        """Takes a quote, bracket, colon or comma."""
        if mark == '"':
            self._in_string = True
            if self._expected in ("key", "key or }"):
                self._key = ['"']
                return None
            self._expect_value()
            return self._token("string", '"', ends=False)
        if mark in _CLOSING:
            return self._open(mark)
        if mark in "]}":
            return self._close(mark)
        if mark == ":" and self._expected == "colon":
            self._expected = "value"
            return self._token("colon", mark)
        if mark == "," and self._expected == "comma":
            self._expected = "key" if self._closing[-1] == "}" else "value"
            return self._token("comma", mark)
        raise JsonError(f"unexpected {mark!r}")

    def _open(self, bracket: str) -> JsonToken:
        if self._closing:
            self._expect_value()
        elif self._expected != "value":
            raise JsonError("text follows the value")
        if len(self._closing) == MAX_DEPTH:
            raise JsonError(f"nested deeper than {MAX_DEPTH}")
        token = self._token("open", bracket)
        self._closing.append(_CLOSING[bracket])
        self._keys.append(set())
        self._expected = "key or }" if bracket == "{" else "value or ]"
        return token

    def _close(self, bracket: str) -> JsonToken:
        empty = f"value or {bracket}" if bracket == "]" else f"key or {bracket}"
        if self._expected not in ("comma", empty) or self._closing[-1] != bracket:
            raise JsonError(f"unexpected {bracket!r}")
        self._closing.pop()
        self._keys.pop()
        self._expected = "comma" if self._closing else "nothing"
        return self._token("close", bracket)

    def _expect_value(self) -> None:
        if not self._closing or self._expected not in ("value", "value or ]"):
            raise JsonError(f"expected {self._expected if self._closing else 'an object or array'}")

    def _string(self, text: str, position: int) -> tuple[JsonToken | None, int]:
        """The run of a string that begins at `position` (None while nothing is certain), and where it ends."""
        start, ended = position, False
        while position < len(text) and not ended:
            if match := _STRING_RUN.match(text, position) or _ESCAPE.match(text, position):
                position = match.end()
            elif text[position] == '"':
                position, ended = position + 1, True
            elif len(text) - position < _LONGEST_ESCAPE:
                self._escape = text[position:]
                break
            elif start == position:
                raise JsonError(f"{text[position : position + 6]!r} is not an escape")
            else:
                break  # what stands before the bad escape is given out first
        run = _CONTROL.sub(lambda control: json.dumps(control[0])[1:-1], text[start:position])
        if self._escape:
            position = len(text)
        self._in_string = not ended
        if self._key is not None:
            self._key.append(run)
            return (self._end_key("".join(self._key)) if ended else None), position
        if ended:
            self._expected = "comma"
        return (self._token("string", run, ended) if run else None), position

    def _end_key(self, raw: str) -> JsonToken:
        key = json.loads(raw)
        if key in self._keys[-1]:
            raise JsonError(f"member {key[:40]!r} is given twice")
        self._keys[-1].add(key)
        self._key = None
        self._expected = "colon"
        return self._token("key", raw)
