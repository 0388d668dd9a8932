"""One tool call of a reply: from its raw text to what a client is told of it, as early as that is certain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clover.runtime.text.stream_parser import ContentDelta
from clover.runtime.text.tool_formats import ArgumentsDelta, CallEnded, CallEvent, CallName, ParameterSchemas
from clover.runtime.text.tool_formats.auto import AutoParser
from clover.runtime.text.tool_formats.values import parameter_schemas


@dataclass(frozen=True, slots=True)
class FunctionCallStarted:
    """Function call `index` (from 0) calls `name`."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class FunctionArgumentsDelta:
    """More of the JSON text of call `index`'s arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class FunctionCallEnded:
    """Call `index` got its last delta. The deltas join to a JSON object if it is `complete`, else to no valid JSON.

    `raw`: of a call that the reply's end cut off, all that the model wrote of it. (A call that is incomplete because it
    is malformed stands in the content as well.)
    """

    index: int
    complete: bool
    raw: str = ""


CallOutput = FunctionCallStarted | FunctionArgumentsDelta | FunctionCallEnded | ContentDelta


@dataclass(frozen=True)
class OfferedTools:
    """What a reply's calls are held to. `names`: functions that may be called; None: any.

    `checks`: of functions whose calls are given out only when they are whole and the check accepts their arguments.
    """

    names: frozenset[str] | None = None
    schemas: ParameterSchemas = field(default_factory=dict)
    checks: Mapping[str, Callable[[str], bool]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tools: Iterable[Mapping[str, Any]] | None, checks: Mapping[str, Callable[[str], bool]] | None = None
    ) -> OfferedTools:
        """From tools in OpenAI's form. No tools offer nothing in particular: then any function may be called."""
        schemas = parameter_schemas(tools)
        return cls(frozenset(schemas) or None, schemas, checks or {})


class FunctionCallReader:
    """Reads one call. Call `push` with the raw text between the markers in pieces, then `end` once.

    The call is given out as soon as its name is known, its arguments as they come. What turns out to be no call (not
    well formed, a function that isn't offered, arguments that a check refuses) is content, markers and all, so that
    nothing the model wrote is lost. Of a call that was begun already, that beginning stays, and never becomes valid JSON.
    """

    def __init__(self, tools: OfferedTools, index: int) -> None:
        """`index`: the call's, if it is given out."""
        self._tools, self._index = tools, index
        self._parser = AutoParser(tools.schemas)
        self._raw: list[str] = []
        self._name = ""
        self._check: Callable[[str], bool] | None = None
        self._waiting: list[str] = []  # arguments that the check has yet to see
        self._is_text = False
        self.begun = False  # FunctionCallStarted was given out
        self.complete = False

    def push(self, text: str, *, cut: bool = False) -> list[CallOutput]:
        """What this text makes certain. `cut`: it is what the reply's end left of a character or marker."""
        if self._is_text:
            return [ContentDelta(text)]
        self._raw.append(text)
        return [] if cut else self._take(self._parser.push(text))

    def end(self, *, closed: bool, cut: bool) -> list[CallOutput]:
        """`closed`: by `</tool_call>`. `cut`: the reply ended by the token limit or was cancelled.

        A call that the model ended with its reply instead of `</tool_call>` counts, if nothing of it is missing.
        """
        output: list[CallOutput] = []
        if not self._is_text and (closed or not cut):
            output += self._take(self._parser.finish())
        if not self._is_text and not self.complete:
            if self.begun:
                return [*output, FunctionCallEnded(self._index, complete=False, raw=self._written)]
            output += self._turn_to_text()
        if self._is_text and closed:
            output.append(ContentDelta("</tool_call>"))
        return output

    @property
    def _written(self) -> str:
        return "<tool_call>" + "".join(self._raw)

    def _take(self, events: Iterable[CallEvent]) -> list[CallOutput]:
        output: list[CallOutput] = []
        for event in events:
            if isinstance(event, CallName):
                output += self._begin(event.name)
            elif isinstance(event, ArgumentsDelta):
                if self.begun:
                    output.append(FunctionArgumentsDelta(self._index, event.text))
                else:
                    self._waiting.append(event.text)
            elif isinstance(event, CallEnded):
                output += self._complete()
            else:
                output += self._turn_to_text()
            if self._is_text:
                break
        return output

    def _begin(self, name: str) -> list[CallOutput]:
        if self._tools.names is not None and name not in self._tools.names:
            return self._turn_to_text()
        self._name, self._check = name, self._tools.checks.get(name)
        if self._check is not None:
            return []
        self.begun = True
        return [FunctionCallStarted(self._index, name)]

    def _complete(self) -> list[CallOutput]:
        output: list[CallOutput] = []
        if self._check is not None:
            arguments = "".join(self._waiting)
            if not self._check(arguments):
                return self._turn_to_text()
            self.begun = True
            output += [FunctionCallStarted(self._index, self._name), FunctionArgumentsDelta(self._index, arguments)]
        self.complete = True
        return [*output, FunctionCallEnded(self._index, complete=True)]

    def _turn_to_text(self) -> list[CallOutput]:
        self._is_text = True
        ended: list[CallOutput] = [FunctionCallEnded(self._index, complete=False)] if self.begun else []
        return [*ended, ContentDelta(self._written)]
