"""A tool's schema, and JSON values by it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from clover.runtime.text.tool_formats import ParameterSchemas
from clover.runtime.text.tool_formats.json_scanner import JsonError, JsonScanner, is_integer, is_number

MAX_REFERENCES = 16  # followed one behind the other


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
    found: set[str] = set()
    if schema is not None:
        seen: set[int] = set()
        for part in _parts(schema, schema, set(), into_typed=True):
            properties, others = part.get("properties"), part.get("additionalProperties")
            node = properties.get(parameter, others) if isinstance(properties, Mapping) else others
            for option in _parts(node, schema, seen):
                found |= _own_types(option)
    return frozenset(found)


def find_reference(root: Any, reference: str) -> Any:
    """What a `$ref` such as `#/$defs/a` points to; False, the schema that nothing fits, when that is nothing."""
    target = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        target = target.get(part, False) if isinstance(target, Mapping) else False
    return target


def _parts(
    node: Any, root: Mapping[str, Any], seen: set[int], depth: int = 0, *, into_typed: bool = False
) -> Iterator[Mapping[str, Any]]:
    """A schema and those that it is put together from, each once: they may refer to themselves and each other. One that
    has a type is not looked into unless `into_typed`: its parts can only narrow it down."""
    if not isinstance(node, Mapping) or id(node) in seen or depth > MAX_REFERENCES:
        return
    seen.add(id(node))
    yield node
    if "type" in node and not into_typed:
        return
    for key in ("anyOf", "oneOf", "allOf"):
        options = node.get(key)
        for option in options if isinstance(options, list) else ():
            yield from _parts(option, root, seen, depth + 1, into_typed=into_typed)
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        yield from _parts(find_reference(root, reference), root, seen, depth + 1, into_typed=into_typed)


def _own_types(node: Mapping[str, Any]) -> set[str]:
    found: set[str] = {"null"} if node.get("nullable") is True else set()
    declared = node.get("type")
    if isinstance(declared, str):
        return found | {declared}
    if isinstance(declared, list):
        return found | {name for name in declared if isinstance(name, str)}
    constants = node.get("enum", [node["const"]] if "const" in node else [])
    return found | {_type_of(value) for value in constants} if isinstance(constants, list) else found


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
