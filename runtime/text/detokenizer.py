"""Token ids to text, a few at a time, never giving out half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from clover.runtime.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental decoder of one sequence.

    The texts returned by all `push` calls and `flush`, joined, equal `tokenizer.decode` of all the ids. A byte-level
    token may hold part of a character, so bytes that could still become one are kept back; bytes that can't become
    U+FFFD. Work per push is proportional to the new tokens. Control tokens give no text, `<think>` and `<tool_call>`
    do.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` make final: it will not change, whatever follows."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def flush(self) -> str:
        """Ends the sequence: an unfinished character becomes U+FFFD. Afterwards a new sequence may begin."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
