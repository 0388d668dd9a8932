"""Which tokens spell what: looked up once for a tokenizer, used by every form."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property

from clover.runtime.text.tokenizer import Tokenizer

NUMBER_TEXT = re.compile(r" ?-?[0-9]*\.?[0-9]*\Z")


class Vocabulary:
    """Texts of the tokens that may be chosen."""

    def __init__(self, tokenizer: Tokenizer, size: int, excluded: Iterable[int]) -> None:
        self.tokenizer, self._size, self._excluded = tokenizer, size, frozenset(excluded)
        self._texts: dict[int, str] = {}

    def text(self, id_: int) -> str:
        """What a token spells; empty for control tokens, excluded ones and parts of characters."""
        known = self._texts.get(id_)
        if known is None:
            known = ""
            if id_ not in self._excluded:
                try:
                    known = self.tokenizer.token_bytes(id_).decode()
                except UnicodeDecodeError:
                    known = ""
            self._texts[id_] = known
        return known

    def encode(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token."""
        return self.tokenizer.encode_plain(text)

    @cached_property
    def _by_text(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for id_ in range(self._size):
            if text := self.text(id_):
                found[text].append(id_)
        return found

    @cached_property
    def numbers(self) -> frozenset[int]:
        """Tokens that can be a part of a number, with a space before it perhaps."""
        return frozenset(i for text, ids in self._by_text.items() if NUMBER_TEXT.match(text) for i in ids)

    @cached_property
    def letters(self) -> frozenset[int]:
        """Tokens of one ASCII letter, with a space before it perhaps: something that any text may go on with."""
        single = [t for t in self._by_text if len(t.strip()) == 1 and t.strip().isascii() and t.strip().isalpha()]
        return frozenset(i for text in single for i in self._by_text[text])

    def beginning(self, following: str) -> frozenset[int]:
        """Tokens with which `following` can begin. Behind a delimiter: all that begin with it; else those that spell a
        beginning of `following`, or that it is a beginning of."""
        if is_delimiter(following[:1]):
            return frozenset(i for text, own in self._by_text.items() if text.startswith(following[0]) for i in own)
        ids = [i for n in range(1, len(following) + 1) for i in self._by_text.get(following[:n], ())]
        if len(following) <= 4:
            ids += [i for text, own in self._by_text.items() if text.startswith(following) for i in own]
        return frozenset(ids)


def is_delimiter(character: str) -> bool:
    """Whether a character ends a hole that it follows wherever it stands: all but letters, digits and spaces."""
    return bool(character) and not character.isalnum() and character != " "
