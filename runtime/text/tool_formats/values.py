"""A tool's schema, and JSON values by it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from clover.runtime.text.tool_formats import ParameterSchemas
from clover.runtime.text.tool_formats.json_scanner import JsonError, JsonScanner, is_integer, is_number


def container_text(text: str) -> str:
    """The object or array that `text` spells, as JsonScanner gives it out. Raises JsonError if it spells anything else."""
    scanner = JsonScanner()
    scanned = "".join(token.text for token in scanner.push(text.strip()))
    if not scanner.whole:
        raise JsonError("the JSON is unfinished")
    return scanned


def object_text(text: str) -> str:
    """`container_text` of an object."""
    scanned = container_text(text)
    if scanned[0] != "{":
        raise JsonError("it is not an object")
    return scanned


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
    if "integer" in types and is_integer(bare):
        return bare
    if "number" in types and is_number(bare):
        return bare
    if ("object" in types and bare.startswith("{")) or ("array" in types and bare.startswith("[")):
        try:
            return container_text(bare)
        except JsonError:
            pass
    return json.dumps(text, ensure_ascii=False)
