"""Chooses the format of a tool call by how it begins: `{` is JSON, `<` is XML."""

from __future__ import annotations

from collections.abc import Callable

from clover.runtime.text.tool_formats import CallEvent, CallMalformed, CallParser, ParameterSchemas
from clover.runtime.text.tool_formats.hermes_json import HermesJsonParser
from clover.runtime.text.tool_formats.qwen_xml import QwenXmlParser

_FORMATS: dict[str, Callable[[ParameterSchemas], CallParser]] = {"{": HermesJsonParser, "<": QwenXmlParser}


class AutoParser:
    """A call in whichever format its first character that is not space shows."""

    def __init__(self, schemas: ParameterSchemas) -> None:
        """`schemas`: see `parameter_schemas`; may be empty."""
        self._schemas = schemas
        self._parser: CallParser | None = None
        self._malformed = False

    def push(self, text: str) -> list[CallEvent]:
        """See CallParser."""
        if self._malformed:
            return []
        if self._parser is None:
            text = text.lstrip()
            if not text:
                return []
            if text[0] not in _FORMATS:
                return self._fail("a tool call begins with '{' or '<function='")
            self._parser = _FORMATS[text[0]](self._schemas)
        return self._parser.push(text)

    def finish(self) -> list[CallEvent]:
        """See CallParser."""
        if self._malformed:
            return []
        return self._fail("the tool call is empty") if self._parser is None else self._parser.finish()

    def _fail(self, reason: str) -> list[CallEvent]:
        self._malformed = True
        return [CallMalformed(reason)]
