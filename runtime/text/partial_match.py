"""Finding strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable


def held_back_from(text: str, patterns: Iterable[str]) -> int:
    """Index where the longest suffix of `text` that is a proper prefix of a pattern begins; `len(text)` if none does.

    Text before that index can be given out: whatever comes next, no pattern begins there without being complete.
    """
    start = len(text)
    for pattern in patterns:
        for length in range(min(len(pattern) - 1, len(text)), len(text) - start, -1):
            if pattern.startswith(text[-length:]):
                start = len(text) - length
                break
    return start
