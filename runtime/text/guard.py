"""Keeps control tokens that a message merely spells apart from those the chat template writes.

Before rendering, one guard character is put inside every such spelling (`<` + guard + `|im_end|>`), so that templates
still see almost the same text (they split, strip and join it) but the tokenizer finds no token there.
`Tokenizer.encode_prompt` takes the guards out again, after it has found the real ones. The guard is a Unicode
noncharacter (U+FDD0…U+FDEF, set aside for a process's own use) that no message contains, so no text is altered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from clover.runtime.errors import RequestError

GUARDS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """What the chat template made of the messages.

    `text` holds `guard` inside control tokens that messages spell out; `opens_thinking` says that the prompt ends
    inside an opened `<think>`, so that the reply starts with reasoning.
    """

    text: str
    guard: str
    opens_thinking: bool = False

    @property
    def text_without_guards(self) -> str:
        """The prompt as a person reads it."""
        return self.text.replace(self.guard, "")


def pick_guard(value: Any) -> str:
    """A guard that occurs in no string inside `value` (nested lists and dicts). Raises RequestError if all 32 occur."""
    used = {character for text in _strings(value) if not text.isascii() for character in text if character in GUARDS}
    for guard in GUARDS:
        if guard not in used:
            return guard
    raise RequestError("messages", "messages contain every Unicode noncharacter from U+FDD0 to U+FDEF; remove them.")


def protect(value: Any, tokens: Iterable[str], guard: str) -> Any:
    """A copy of `value` (nested lists and dicts of JSON) with `guard` inside every spelling of a token."""
    # Longest first, as the tokenizer matches. No control token is so short that it can't be broken up.
    names = sorted((name for name in tokens if len(name) > 1), key=len, reverse=True)
    if not names:
        return value
    return _map_strings(value, re.compile("|".join(map(re.escape, names))), guard)


def _map_strings(value: Any, pattern: re.Pattern[str], guard: str) -> Any:
    if isinstance(value, str):
        # Again until nothing matches: breaking one token can leave an overlapping one whole.
        while pattern.search(value):
            value = pattern.sub(lambda match: match[0][0] + guard + match[0][1:], value)
        return value
    if isinstance(value, dict):
        return {_map_strings(k, pattern, guard): _map_strings(v, pattern, guard) for k, v in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, pattern, guard) for item in value]
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
