"""JSON that a model wrote: checked without recursion, and typed by a tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from clover.runtime.text.tool_formats import MAX_DEPTH, ParameterSchemas

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
# The closing quote is optional: an unclosed string is passed over once, not searched again from each quote in it.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)


def parse_json(text: str) -> Any:
    """The value of strict JSON. Raises ValueError if it is not (NaN, nesting deeper than MAX_DEPTH and trailing text
    too)."""
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        if match[0] in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"nested deeper than {MAX_DEPTH}")
        elif match[0] in "]}":
            depth -= 1
    # Numbers stay text: their size is the receiver's business, and int() refuses very long ones.
    return json.loads(text, parse_constant=_refuse_constant, parse_int=str, parse_float=str)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parameter_schemas(tools: Iterable[Mapping[str, Any]] | None) -> ParameterSchemas:
    """Function name → schema of its parameters, from tools in OpenAI's form (`{"type": "function", "function": …}`)."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        schema = function.get("parameters")
        if isinstance(function.get("name"), str):
            schemas[function["name"]] = schema if isinstance(schema, Mapping) else {}
    return schemas


def allowed_types(schema: Mapping[str, Any] | None, parameter: str) -> frozenset[str]:
    """JSON types the schema allows for a parameter; empty when it doesn't say, which means a string."""
    if schema is None:
        return frozenset()
    properties = schema.get("properties")
    node = properties.get(parameter) if isinstance(properties, Mapping) else None
    return frozenset(_types(node, schema, 0))


def _types(node: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(node, Mapping) or depth > 8:  # schemas may refer to themselves
        return set()
    found: set[str] = set()
    if node.get("nullable") is True:
        found.add("null")
    declared = node.get("type")
    if isinstance(declared, str):
        return found | {declared}
    if isinstance(declared, list):
        return found | {name for name in declared if isinstance(name, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        options = node.get(key)
        if isinstance(options, list):
            for option in options:
                found |= _types(option, root, depth + 1)
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        found |= _types(target, root, depth + 1)
    constants = node.get("enum", [node["const"]] if "const" in node else [])
    if isinstance(constants, list):
        found |= {_type_of(value) for value in constants}
    return found


def _type_of(value: Any) -> str:
    names: dict[type, str] = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        dict: "object",
        list: "array",
    }
    return "null" if value is None else names.get(type(value), "string")


def typed_json(text: str, types: frozenset[str]) -> str:
    """JSON for a parameter's text. A text that fits none of its declared types becomes a string, for the caller to
    judge."""
    bare = text.strip()
    lower = bare.lower()
    if "null" in types and lower in ("null", "none"):
        return "null"
    if "boolean" in types and lower in ("true", "false"):
        return lower
    if "integer" in types and _INTEGER.fullmatch(bare):
        return bare
    if "number" in types and _NUMBER.fullmatch(bare):
        return bare
    if ("object" in types and bare.startswith("{")) or ("array" in types and bare.startswith("[")):
        try:
            parse_json(bare)
        except (ValueError, RecursionError):
            pass
        else:
            return bare
    return json.dumps(text, ensure_ascii=False)
