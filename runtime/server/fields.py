"""Takes fields out of a JSON object by name and kind. What nobody took is refused by name; null counts as absent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from clover.runtime.errors import RequestError


class Fields:
    """One JSON object of a request. `where` is its path for messages (`tools[0]`); empty for the body itself."""

    def __init__(self, value: Any, where: str = "") -> None:
        if not isinstance(value, Mapping):
            raise RequestError(where or "body", f"{where or 'the request body'} must be a JSON object.")
        self._left = {key: item for key, item in value.items() if item is not None}
        self._where = where

    def path(self, name: str) -> str:
        shown = name[:80] or "''"
        return f"{self._where}.{shown}" if self._where else shown

    def refuse(self, name: str, why: str) -> RequestError:
        """An error that names the field."""
        return RequestError(self.path(name), f"{self.path(name)} {why}")

    def take(self, name: str) -> Any:
        """The value as it is, or None."""
        return self._left.pop(name, None)

    def need(self, name: str) -> Any:
        value = self.take(name)
        if value is None:
            raise self.refuse(name, "is missing; give it.")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, f"is {_short(value)}; it must be true or false.")
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.refuse(name, f"is {_short(value)}; it must be a string.")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = whole_number(self.take(name))
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(name, f"is {_short(value)}; it must be an integer from {low} to {high}.")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number in (low, high]."""
        value = self.take(name)
        if value is None:
            return None
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or not low < value <= high:
            raise self.refuse(name, f"is {_short(value)}; it must be a number above {low:g} and at most {high:g}.")
        return float(value)

    def items(self, name: str) -> Sequence[Any]:
        """A list; empty when absent."""
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.refuse(name, f"is {_short(value)}; it must be a list.")
        return value

    def object(self, name: str) -> Fields:
        """A nested object; empty when absent."""
        value = self.take(name)
        return Fields({} if value is None else value, self.path(name))

    def only(self, name: str, *allowed: Any, why: str) -> None:
        """A field of which only values that change nothing can be honoured."""
        value = whole_number(self.take(name))
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            raise self.refuse(name, f"is {_short(value)}, which can't be honoured: {why}")

    def labels(self, *names: str) -> None:
        """Fields that only label a request and ask for nothing."""
        for name in names:
            self._left.pop(name, None)

    def close(self) -> None:
        """Raises RequestError for the first field that nobody took."""
        for name in self._left:
            raise self.refuse(str(name), "isn't supported; remove it.")


def whole_number(value: Any) -> Any:
    """2 for 2.0, anything else as it is: to JSON they are one number, and many clients write every number as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
