"""Which tokens spell what: looked up once for a tokenizer, used by every form.

Tokens are bytes here, not texts: a byte-level tokenizer spells many characters in several tokens, and has tokens that
hold the end of one character or the beginning of the next.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from clover.runtime.text.tokenizer import Tokenizer

NUMBER = re.compile(rb" ?-?[0-9]*\.?[0-9]*\Z")
LETTER = re.compile(rb" ?[A-Za-z]\Z")
ENDINGS = 32  # ids of an ending that are always among the candidates; others count where they are likely


@dataclass(frozen=True)
class Ending:
    """What shows that a hole is over: the ids with which the text behind it can begin.

    `spelled`: its first character, where that takes several tokens; the first of them may begin other characters too.
    `needed`: the ids whose probabilities must be known, `spelled` among them.
    """

    ids: frozenset[int]
    spelled: tuple[int, ...]
    needed: frozenset[int]


class Vocabulary:
    """Bytes of the tokens that may be chosen."""

    def __init__(self, tokenizer: Tokenizer, size: int, excluded: Iterable[int]) -> None:
        """`size`: of the model's vocabulary. `excluded`: ids that must never be chosen; added tokens are none either."""
        added = (tokenizer.find_token_id(name) for name in tokenizer.added_tokens)
        self._tokenizer, self._size = tokenizer, size
        self._excluded = frozenset(excluded) | {id_ for id_ in added if id_ is not None}
        self._endings: dict[str, Ending] = {}

    def bytes_of(self, id_: int) -> bytes:
        """What a token adds to a text; nothing for a control token and for one that is excluded."""
        return b"" if id_ in self._excluded else self._tokenizer.token_bytes(id_)

    def encode(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token and no character is put in another's place."""
        return self._tokenizer.encode_exact(text)

    def spells(self, ids: Iterable[int], text: str) -> bool:
        """Whether tokens are a text's, byte for byte."""
        return b"".join(map(self.bytes_of, ids)) == text.encode()

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        """All tokens in the order of their bytes: (bytes, ids)."""
        pairs = sorted((self.bytes_of(id_), id_) for id_ in range(self._size))
        first = bisect_right(pairs, (b"", self._size))
        return [data for data, _ in pairs[first:]], [id_ for _, id_ in pairs[first:]]

    def _spelling(self, data: bytes) -> list[int]:
        """Tokens of these bytes."""
        keys, ids = self._sorted
        return ids[bisect_left(keys, data) : bisect_right(keys, data)]

    def _beginning_with(self, data: bytes) -> list[int]:
        """Tokens that begin with these bytes, which are UTF-8: their last can be counted up."""
        keys, ids = self._sorted
        return ids[bisect_left(keys, data) : bisect_left(keys, data[:-1] + bytes([data[-1] + 1]))]

    @cached_property
    def numbers(self) -> frozenset[int]:
        """Tokens that can be a part of a number, with a space before it perhaps."""
        return frozenset(id_ for data, id_ in zip(*self._sorted, strict=True) if NUMBER.match(data))

    @cached_property
    def letters(self) -> frozenset[int]:
        """Tokens of one ASCII letter, with a space before it perhaps: something that any text may go on with."""
        return frozenset(id_ for data, id_ in zip(*self._sorted, strict=True) if LETTER.match(data))

    @cached_property
    def continuations(self) -> frozenset[int]:
        """Tokens of one byte that goes on with a character. Empty where some byte has none: then a token that holds only
        the beginning of a character can't be chosen, since the character might stay unfinished."""
        found = [self._spelling(bytes([byte])) for byte in range(0x80, 0xC0)]
        return frozenset(id_ for ids in found for id_ in ids) if all(found) else frozenset()

    def ending(self, following: str) -> Ending:
        """With what `following` can begin. A delimiter: with all tokens that begin with it; another text: with tokens that
        spell a beginning of it, or, where it is short, that it is a beginning of."""
        if is_delimiter(following[0]):
            following = following[0]  # the rest does not matter
        known = self._endings.get(following)
        if known is None:
            if len(self._endings) >= 256:
                self._endings.clear()
            known = self._endings[following] = self._ending(following)
        return known

    def _ending(self, following: str) -> Ending:
        data, character = following.encode(), following[0].encode()
        if is_delimiter(following[0]):
            ids = self._beginning_with(character)
        else:
            ids = [i for n in range(len(character), len(data) + 1) for i in self._spelling(data[:n])]
            if len(following) <= 4:
                ids += self._beginning_with(data)
        first, spelled = self.encode(following), []
        for id_ in first:
            spelled.append(id_)
            if len(b"".join(map(self.bytes_of, spelled))) >= len(character):
                break
        if len(spelled) == 1:  # it is among `ids`
            spelled = []
        short = sorted(ids, key=lambda i: (i not in first[:1], len(self.bytes_of(i)), i))[:ENDINGS]
        return Ending(frozenset(ids), tuple(spelled), frozenset(short) | frozenset(spelled))


def is_delimiter(character: str) -> bool:
    """Whether a character ends a hole that it follows wherever it stands: all but letters, digits and spaces."""
    return bool(character) and not character.isalnum() and character != " "


def read_utf8(data: bytes) -> tuple[str, bytes] | None:
    """The whole characters of `data`, and the beginning of one behind them; None when no text goes on like this."""
    try:
        text, used = codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return None
    begun = data[used:]
    if begun[:1] == b"\xed" and begun[1:2] >= b"\xa0":  # half of a surrogate pair, found out by its last byte only
        return None
    return text, begun


def missing_bytes(begun: bytes) -> int:
    """How many bytes the beginning of a UTF-8 character lacks; 0 when there is none."""
    return (2 if begun[0] < 0xE0 else 3 if begun[0] < 0xF0 else 4) - len(begun) if begun else 0
