"""Prompts from a file, for the verbs that run many: a line a prompt, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clover.runtime.clover import Clover
from clover.runtime.errors import CloverError, RequestError

KINDS = ("prompt", "messages", "text", "tokens")


@dataclass(frozen=True)
class Prompt:
    """One prompt: messages of a chat, a raw text, or token ids. `where` says where it stands."""

    where: str
    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None
    tokens: Sequence[int] | None = None

    def encode(self, engine: Clover) -> list[int]:
        """Its token ids. Raises CloverError naming the line when the bundle can't encode it."""
        try:
            if self.tokens is not None:
                return list(self.tokens)
            if engine.tokenizer is None or (self.messages is not None and engine.template is None):
                raise RequestError(
                    "prompts", "this bundle has no tokenizer or chat template, so it takes only `tokens`."
                )
            if self.text is not None:
                return engine.tokenizer.encode(self.text)
            assert engine.template is not None and self.messages is not None
            return engine.tokenizer.encode_prompt(engine.template.render(self.messages))
        except RequestError as error:
            raise CloverError(f"{self.where}: {error}") from None


def user_prompt(text: str, where: str) -> Prompt:
    """A chat of one user turn."""
    return Prompt(where, messages=[{"role": "user", "content": text}])


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from a file: one a line, or, in a .jsonl file, objects with one of `prompt` (a user's turn), `messages`,
    `text` (raw, without chat template) and `tokens`. Raises CloverError naming a line that can't be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise CloverError(f"--prompts {path} is not UTF-8 text; save it as UTF-8.") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"--prompts {path}, line {number}"
            prompts.append(_prompt(line, where) if path.suffix == ".jsonl" else user_prompt(line, where))
    if not prompts:
        raise CloverError(f"--prompts {path} holds no prompts; write one a line.")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CloverError(f"{where} is no JSON ({error}); mend or remove it.") from None
    given = [k for k in KINDS if isinstance(value, dict) and k in value]
    if len(given) == 1:
        content = value[given[0]]
        if given == ["prompt"] and isinstance(content, str):
            return user_prompt(content, where)
        if given == ["text"] and isinstance(content, str):
            return Prompt(where, text=content)
        if given == ["messages"] and isinstance(content, list):
            return Prompt(where, messages=content)
        if given == ["tokens"] and isinstance(content, list) and all(type(t) is int for t in content):
            return Prompt(where, tokens=content)
    raise CloverError(
        f"{where} must be an object with one of a text `prompt` or `text`, a list `messages`, or `tokens`, a list of "
        "ids; mend or remove it."
    )
