"""Whether a JSON value fits a JSON schema, for the part of JSON Schema that strict tools use.

A schema with a keyword that isn't checked here is refused beforehand: nothing is let pass unchecked. `pattern` is
refused too, since a hostile regular expression could hold up the engine's thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from clover.runtime.errors import RequestError
from clover.runtime.text.tool_formats.values import find_reference

Schema = Mapping[str, Any]
MAX_CHECKS = 20_000  # schemas may refer to themselves: one value costs no more than this
_NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions"}
_NOTES |= {"deprecated", "readOnly", "writeOnly", "format"}  # these say nothing about what is valid
_NESTED = {"items", "additionalProperties"}
_LISTS = {"anyOf", "oneOf", "allOf"}
_MAPS = {"properties", "$defs", "definitions"}
_NUMBERS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
_SIZES: dict[str, tuple[type, Callable[[int, int], bool]]] = {
    "minLength": (str, lambda size, bound: size >= bound),
    "maxLength": (str, lambda size, bound: size <= bound),
    "minItems": (list, lambda size, bound: size >= bound),
    "maxItems": (list, lambda size, bound: size <= bound),
    "minProperties": (dict, lambda size, bound: size >= bound),
    "maxProperties": (dict, lambda size, bound: size <= bound),
}
_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: _is_number(v) and math.isfinite(v) and v == int(v),
    "number": lambda v: _is_number(v),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


def check_schema(schema: Any, where: str) -> None:
    """Raises RequestError for a schema that `fits` can't check."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise RequestError(where, f"{where} must be a JSON schema.")
    for key, value in schema.items():
        here = f"{where}.{key[:40]}"
        if key in _NESTED:
            check_schema(value, here)
        elif key in _LISTS and isinstance(value, Sequence) and value:
            for i, item in enumerate(value):
                check_schema(item, f"{here}[{i}]")
        elif key in _MAPS and isinstance(value, Mapping):
            for name, item in value.items():
                check_schema(item, f"{here}.{name[:40]}")
        elif key not in _NOTES and not _is_sound(key, value):
            raise RequestError(here, f"{here} can't be held to in a strict tool; remove it, or strict.")


def _is_sound(key: str, value: Any) -> bool:
    """Whether a keyword is one that `fits` checks, with a value it can use."""
    if key == "type":
        kinds = [value] if isinstance(value, str) else value
        return isinstance(kinds, list) and bool(kinds) and all(isinstance(k, str) and k in _TYPES for k in kinds)
    if key == "required":
        return isinstance(value, list) and all(isinstance(name, str) for name in value)
    if key == "$ref":
        return isinstance(value, str) and value.startswith("#")
    if key in _NUMBERS or key in _SIZES:
        return _is_number(value)
    return key == "const" or (key == "enum" and isinstance(value, list))


def strict_checks(tools: Iterable[Mapping[str, Any]] | None) -> dict[str, Callable[[str], bool]]:
    """By name, what the arguments of strict tools' calls must pass. `tools` in OpenAI's form. Raises RequestError."""
    checks: dict[str, Callable[[str], bool]] = {}
    for i, tool in enumerate(tools or ()):
        function, where = tool["function"], f"tools[{i}].function"
        strict, schema = function.get("strict"), function.get("parameters")
        if not isinstance(strict, bool | None):
            raise RequestError(f"{where}.strict", f"{where}.strict must be true or false.")
        if strict:
            check_schema({} if schema is None else schema, f"{where}.parameters")
            checks[function["name"]] = partial(text_fits, schema={} if schema is None else schema)
    return checks


def fits(value: Any, schema: Any) -> bool:
    """Whether `value` fits a schema that passed `check_schema`. What is too tangled to tell does not fit."""
    budget = [MAX_CHECKS]
    try:
        return _fits(value, schema, schema, budget) and budget[0] >= 0
    except RecursionError:
        return False


def text_fits(text: str, schema: Any) -> bool:
    """`fits` for a value as JSON text."""
    try:
        return fits(json.loads(text), schema)
    except (ValueError, RecursionError):  # a number of thousands of digits
        return False


def _fits(value: Any, schema: Any, root: Any, budget: list[int]) -> bool:
    budget[0] -= 1
    if budget[0] < 0:
        return False
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        return False
    if "$ref" in schema and not _fits(value, find_reference(root, schema["$ref"]), root, budget):
        return False
    kinds = schema.get("type")
    if kinds is not None and not any(_TYPES[k](value) for k in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if "enum" in schema and not any(_same(value, item) for item in schema["enum"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if _is_number(value) and not all(test(value, schema[k]) for k, test in _NUMBERS.items() if k in schema):
        return False
    for key, (kind, test) in _SIZES.items():
        if key in schema and isinstance(value, kind) and not test(len(value), schema[key]):  # type: ignore[arg-type]
            return False
    if not _fits_combined(value, schema, root, budget):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(_fits(item, schema["items"], root, budget) for item in value)
    return not isinstance(value, dict) or _fits_object(value, schema, root, budget)


def _fits_combined(value: Any, schema: Schema, root: Any, budget: list[int]) -> bool:
    for key, test in (("anyOf", any), ("allOf", all), ("oneOf", lambda results: sum(results) == 1)):
        if key in schema and not test(_fits(value, option, root, budget) for option in schema[key]):
            return False
    return True


def _fits_object(value: dict[str, Any], schema: Schema, root: Any, budget: list[int]) -> bool:
    known = schema.get("properties", {})
    if not all(name in value for name in schema.get("required", ())):
        return False
    rest = schema.get("additionalProperties", True)
    return all(_fits(item, known.get(name, rest), root, budget) for name, item in value.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(a: Any, b: Any) -> bool:
    """JSON's equality: 1 is not true."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)
