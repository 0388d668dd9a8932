"""JSON schemas as forms: objects, enums, constants, booleans, numbers, bounded strings, arrays of fixed length."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clover.runtime.errors import RequestError
from clover.runtime.forms.template import MAX_CHOICES, MAX_TOKENS, Form, Free, Hole, Number, json_choice, make_form

ANNOTATIONS = frozenset({"title", "description", "$schema", "$id", "$comment", "examples", "default"})
KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
    "integer": {"minimum", "maximum"},
    "number": set(),
    "boolean": set(),
    "null": set(),
}
DEEPEST = 16

Parts = list[str | Hole]
Assemble = Callable[[Mapping[str, Any]], Any]


def form_of_response_format(response_format: Any) -> Form:
    """The form of a request's `response_format` of type json_schema. Raises RequestError."""
    field = "response_format"
    if not isinstance(response_format, Mapping) or response_format.get("type") != "json_schema":
        raise RequestError(field, f"{field} must have the type 'json_schema' to be filled as a form.")
    inner = response_format.get("json_schema")
    if not isinstance(inner, Mapping) or "schema" not in inner:
        raise RequestError(f"{field}.json_schema", f"{field}.json_schema must hold a schema.")
    return form_of_schema(inner["schema"], f"{field}.json_schema.schema")


def form_of_schema(schema: Any, field: str = "schema") -> Form:
    """A form whose text is JSON that follows `schema`; all properties are given, in the schema's order.

    Raises RequestError naming the place and the keyword that a form can't express.
    """
    parts, assemble = _parts(schema, field, "", 0)
    if not any(isinstance(p, Hole) for p in parts):
        raise RequestError(field, f"{field} leaves nothing to fill; give it a property that is no constant.")
    return make_form(parts, field, assemble)


def _parts(schema: Any, field: str, path: str, depth: int) -> tuple[Parts, Assemble]:
    where = field + (f" at {path}" if path else "")
    if not isinstance(schema, Mapping):
        raise RequestError(field, f"{where} must be a JSON object with a type, an enum or a const.")
    if depth > DEEPEST:
        raise RequestError(field, f"{where} is nested deeper than {DEEPEST} levels; flatten it.")
    if "const" in schema:
        _only(schema, {"const", "type"}, field, where)
        constant = schema["const"]
        return [_dump(constant, field, where)], lambda values: constant
    if "enum" in schema:
        _only(schema, {"enum", "type"}, field, where)
        return _enum(schema["enum"], field, where, path)
    kind = schema.get("type")
    if not isinstance(kind, str) or kind not in KEYWORDS:
        given = next((k for k in schema if k not in ANNOTATIONS and k != "type"), "type")
        raise RequestError(field, f"{where}: keyword {given!r} can't be a form; give one type, an enum or a const.")
    _only(schema, KEYWORDS[kind] | {"type"}, field, where)
    if kind == "object":
        return _object(schema, field, where, path, depth)
    if kind == "array":
        return _array(schema, field, where, path, depth)
    if kind == "string":
        return _string(schema, field, where, path)
    if kind == "boolean":
        return _enum([True, False], field, where, path)
    if kind == "null":
        return ["null"], lambda values: None
    if kind == "integer" and ("minimum" in schema or "maximum" in schema):
        return _range(schema, field, where, path)
    return [Hole(path, Number(kind == "integer"))], lambda values: values[path]


def _object(schema: Mapping[str, Any], field: str, where: str, path: str, depth: int) -> tuple[Parts, Assemble]:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties or not all(isinstance(n, str) for n in properties):
        raise RequestError(field, f"{where}: keyword 'properties' must name at least one property.")
    required = schema.get("required", [])
    if not isinstance(required, Sequence) or isinstance(required, str) or not set(required) <= set(properties):
        raise RequestError(field, f"{where}: keyword 'required' must list names of properties.")
    if not isinstance(schema.get("additionalProperties", False), bool):
        raise RequestError(field, f"{where}: keyword 'additionalProperties' can't be a schema in a form.")
    parts: Parts = []
    members: dict[str, Assemble] = {}
    for n, (name, inner) in enumerate(properties.items()):
        own, members[name] = _parts(inner, field, f"{path}.{name}" if path else name, depth + 1)
        parts += ["{" if n == 0 else ", ", _dump(name, field, where) + ": ", *own]
    return [*parts, "}"], lambda values: {name: member(values) for name, member in members.items()}


def _array(schema: Mapping[str, Any], field: str, where: str, path: str, depth: int) -> tuple[Parts, Assemble]:
    least: Any = schema.get("minItems")
    most: Any = schema.get("maxItems")
    if not _is_count(least) or least != most or not 1 <= least <= MAX_CHOICES:
        raise RequestError(
            field,
            f"{where}: keywords 'minItems' and 'maxItems' must be equal, 1 to {MAX_CHOICES}: a form has a fixed length.",
        )
    parts: Parts = []
    items: list[Assemble] = []
    for n in range(least):
        own, member = _parts(schema.get("items"), field, f"{path}[{n}]", depth + 1)
        items.append(member)
        parts += ["[" if n == 0 else ", ", *own]
    return [*parts, "]"], lambda values: [item(values) for item in items]


def _string(schema: Mapping[str, Any], field: str, where: str, path: str) -> tuple[Parts, Assemble]:
    least: Any = schema.get("minLength", 0)
    most: Any = schema.get("maxLength")
    if not _is_count(most) or not 1 <= most <= MAX_TOKENS:
        raise RequestError(
            field, f"{where}: a string in a form needs the keyword 'maxLength', from 1 to {MAX_TOKENS} characters."
        )
    if not _is_count(least) or least > most:
        raise RequestError(field, f"{where}: keyword 'minLength' must be a number from 0 to maxLength.")
    # a character takes four tokens at most
    return ['"', Hole(path, Free(4 * most, least, most, banned='"\\')), '"'], lambda values: values[path]


def _range(schema: Mapping[str, Any], field: str, where: str, path: str) -> tuple[Parts, Assemble]:
    low: Any = schema.get("minimum")
    high: Any = schema.get("maximum")
    if not (_is_integer(low) and _is_integer(high)) or not 0 <= high - low < MAX_CHOICES:
        raise RequestError(
            field,
            f"{where}: keywords 'minimum' and 'maximum' must both be integers with at most {MAX_CHOICES} values between; "
            "leave both out for any integer.",
        )
    return _enum(list(range(low, high + 1)), field, where, path)


def _enum(values: Any, field: str, where: str, path: str) -> tuple[Parts, Assemble]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise RequestError(field, f"{where}: keyword 'enum' must list at least one value.")
    texts = tuple(_dump(v, field, where) for v in values)
    if len(texts) == 1:
        constant = values[0]
        return [texts[0]], lambda filled: constant
    return json_choice(values, field, path), lambda filled: filled[path]


def _only(schema: Mapping[str, Any], known: set[str], field: str, where: str) -> None:
    for keyword in schema:
        if keyword not in known and keyword not in ANNOTATIONS:
            raise RequestError(field, f"{where}: keyword {keyword!r} can't be expressed as a form; remove it.")


def _dump(value: Any, field: str, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise RequestError(field, f"{where} holds a value that is no JSON.") from None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 0
