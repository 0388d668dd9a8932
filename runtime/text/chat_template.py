"""Renders chat messages with the bundle's Jinja template, in a sandbox.

The environment is the one checkpoints' templates are written for (transformers' `apply_chat_template`): trim_blocks,
lstrip_blocks, loop controls, `raise_exception`, `strftime_now` and a `tojson` that doesn't escape HTML. Messages are
data: Jinja code in them is never evaluated. A template comes with the bundle and is trusted to mean well, but it can't
reach Python through the sandbox, and its ranges and repeated strings are bounded per render.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover.runtime.errors import BundleError, RequestError
from clover.runtime.text.guard import GUARDS, RenderedPrompt, pick_guard, protect
from clover.runtime.text.messages import normalise_messages, normalise_tools
from clover.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2

# Elements of all ranges in one render together, and characters of one repeated string.
MAX_RANGE = 1_000_000
MAX_REPEATED = 1_000_000
MAX_REASON = 200  # characters of a template's complaint that are repeated
# what Python raises beside Jinja's own errors when a template does something it can't with what it was given
_TEMPLATE_FAULTS = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError)


class ChatTemplate:
    """A compiled chat template. Rendering keeps no state, so threads may share one."""

    def __init__(self, source: str, tokenizer: Tokenizer, variables: Mapping[str, str] | None = None) -> None:
        """`variables`: the tokenizer's named tokens that templates read (`eos_token` …). Raises BundleError on bad
        Jinja."""
        import jinja2
        import jinja2.nodes

        self._environment = _environment()
        try:
            tree = self._environment.parse(source)
            self._template = self._environment.from_string(source)
        except jinja2.TemplateError as error:
            raise BundleError(f"the bundle's chat template is not valid Jinja: {error}.") from error
        self._reads = {node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "load"}
        self._variables = dict(variables or {})
        self._control_tokens = tokenizer.control_tokens
        self._added_tokens = tokenizer.added_tokens

    @classmethod
    def load(cls, directory: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """From `directory`'s chat_template.jinja, else from `chat_template` in tokenizer_config.json. Raises
        BundleError."""
        config = _read_config(directory / "tokenizer_config.json")
        path = directory / "chat_template.jinja"
        source = config.get("chat_template")
        try:
            if path.is_file():
                source = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise BundleError(f"{path} can't be read: {error}.") from error
        if isinstance(source, list):  # several named templates
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            raise BundleError(f"{directory} has no chat template; add chat_template.jinja from the checkpoint.")
        variables: dict[str, str] = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                variables[name] = token
        return cls(source, tokenizer, variables)

    @property
    def supports_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        return "tools" in self._reads

    @property
    def supports_thinking(self) -> bool:
        """Whether the template reads `enable_thinking`."""
        return "enable_thinking" in self._reads

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> RenderedPrompt:
        """The prompt for `messages` (see messages.py for their form). `enable_thinking` None leaves it to the template.

        Raises RequestError when a message is refused (by us or by the template's raise_exception) or trips the template,
        or when tools or enable_thinking are given and the template doesn't read them; BundleError when the template fails
        on every request.
        """
        import jinja2

        checked, known_tools = normalise_messages(messages), normalise_tools(tools)
        if known_tools and not self.supports_tools:
            raise RequestError("tools", "this bundle's chat template has no place for tools; leave tools out.")
        if enable_thinking is not None and not self.supports_thinking:
            raise RequestError("enable_thinking", "this bundle's chat template has no enable_thinking; leave it out.")
        guard = pick_guard([checked, known_tools])
        variables: dict[str, Any] = dict(self._variables)
        variables["messages"] = [self._protect_message(message, guard) for message in checked]
        variables["tools"] = protect(known_tools, self._control_tokens, guard) or None
        variables["add_generation_prompt"] = add_generation_prompt
        variables["range"] = _bounded_range()
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        try:
            text = self._template.render(variables)
        except _RefusedError as error:
            raise RequestError(
                "messages", f"the chat template refuses the messages: {str(error)[:MAX_REASON]}"
            ) from error
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            reason = str(error)[:MAX_REASON]
            if known_tools and self._renders({**variables, "tools": None}):
                raise RequestError("tools", f"the chat template can't render these tools: {reason}") from error
            if self._works:
                raise RequestError("messages", f"the chat template can't render these messages: {reason}") from error
            raise BundleError(f"the bundle's chat template fails on every chat: {reason}.") from error
        return RenderedPrompt(text, guard, opens_thinking=add_generation_prompt and text.rstrip().endswith("<think>"))

    @cached_property
    def _works(self) -> bool:
        """Whether the template can render a plain chat: if it can, a failure lies in the messages."""
        plain = {**self._variables, "tools": None, "add_generation_prompt": True}
        return any(self._renders({**plain, "messages": [{"role": r, "content": "a"}]}) for r in ("user", "system"))

    def _renders(self, variables: Mapping[str, Any]) -> bool:
        """Whether the template renders with these variables, or refuses them itself."""
        import jinja2

        try:
            self._template.render({**variables, "range": _bounded_range()})
        except _RefusedError:
            return True
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS):
            return False
        return True

    def _protect_message(self, message: dict[str, Any], guard: str) -> dict[str, Any]:
        # What users and tools write may spell no added token at all: `</tool_response>` in a tool's result would end it
        # early. System and assistant messages keep markers such as <tool_call>, which they show or repeat.
        tokens = self._added_tokens if message["role"] in ("user", "tool") else self._control_tokens
        protected: dict[str, Any] = {
            key: protect(value, tokens, guard) for key, value in message.items() if key != "role"
        }
        return {"role": message["role"], **protected}


class _RefusedError(Exception):
    """The template called raise_exception."""


def _environment() -> jinja2.Environment:
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what a model wrote, for training; rendering only needs what is inside."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            for item, times in ((left, right), (right, left)):
                if isinstance(item, str | list | tuple) and isinstance(times, int) and len(item) * times > MAX_REPEATED:
                    raise SecurityError(f"a repeated value would be longer than {MAX_REPEATED}")
            if operator == "**":
                raise SecurityError("** is not available in chat templates")
            return super().call_binop(context, operator, left, right)

    extensions = ["jinja2.ext.loopcontrols", Generation]
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals.pop("lipsum", None)  # unbounded filler text, of no use here
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _raise_exception(message: str) -> None:
    raise _RefusedError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:  # guards must stay characters, or the tokenizer could not take them out again
        text = re.sub(r"[^\x00-\x7f]", lambda m: m[0] if m[0] in GUARDS else json.dumps(m[0])[1:-1], text)
    return text


def _bounded_range() -> Any:
    used = 0

    def bounded(*arguments: int) -> range:
        nonlocal used
        result = range(*arguments)
        used += len(result)
        if used > MAX_RANGE:
            raise OverflowError(f"its ranges have more than {MAX_RANGE} elements")
        return result

    return bounded


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} can't be read as JSON: {error}.") from error
    if not isinstance(config, dict):
        raise BundleError(f"{path} must hold a JSON object.")
    return config
