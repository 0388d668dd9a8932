"""A request's tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from clover.runtime.errors import RequestError
from clover.runtime.text.json_schema import check_schema, text_fits
from clover.runtime.text.tool_formats import MAX_NAME

NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass
class Tools:
    """Tools in the form templates expect. `checks`: by name, of those whose calls are given out only when they are whole
    and the check accepts their arguments."""

    shown: list[dict[str, Any]] = field(default_factory=list)
    checks: dict[str, Callable[[str], bool]] = field(default_factory=dict)
    one_call: bool = False  # the reply ends behind its first call
    _names: set[str] = field(default_factory=set)

    def add(
        self,
        name: Any,
        description: Any,
        parameters: Any,
        where: str,
        schema: str,
        *,
        strict: bool,
        streamed: bool = True,
    ) -> None:
        """Checks and adds a function. `schema` is what the dialect calls its parameters. `strict`: its calls must fit them,
        which only whole ones can be held to; not `streamed`: its calls come whole anyhow. Raises RequestError."""
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where}.name", f"{where}.name must be a non-empty string.")
        if len(name) > MAX_NAME:
            raise RequestError(f"{where}.name", f"{where}.name has {len(name)} characters; give at most {MAX_NAME}.")
        if name in self._names:
            raise RequestError(f"{where}.name", f"{where}.name {name[:60]!r} is given twice; each tool needs its own.")
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
            self.checks[name] = partial(text_fits, schema=function["parameters"])
        elif not streamed:
            self.checks[name] = lambda _: True
        self._names.add(name)
        self.shown.append({"type": "function", "function": function})
