"""Holes in progress: what each may hold, position by position, and what a preview's candidates make of it.

What a hole holds is counted in bytes while it is open, and is whole characters whenever it can close.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from clover.runtime.errors import RequestError
from clover.runtime.forms.template import Choice, Free, Hole, Number
from clover.runtime.forms.vocabulary import Ending, Vocabulary, is_delimiter, missing_bytes, read_utf8

Row = Mapping[int, float]  # candidate id -> raw log-probability, best first
END = -1  # stands for what follows the hole
WHOLE = re.compile(rb"-?(0|[1-9][0-9]*)\Z")
DECIMAL = re.compile(rb"-?(0|[1-9][0-9]*)(\.[0-9]+)?\Z")
WHOLE_BEGUN = re.compile(rb"-?(0|[1-9][0-9]*)?\Z")
DECIMAL_BEGUN = re.compile(rb"-?((0|[1-9][0-9]*)(\.[0-9]*)?)?\Z")


class Slot(ABC):
    """One hole. `tokens` are chosen from the left; `closed` holes hold nothing more."""

    def __init__(self, hole: Hole, vocabulary: Vocabulary, lead: str, following: str, ends: Sequence[int]) -> None:
        """`lead`: a space that stands before the hole and is spelled by its first token. `ends`: ids that end a reply."""
        self.name, self._vocabulary, self.lead = hole.name, vocabulary, lead
        alone = frozenset(ends)
        self._ending = vocabulary.ending(following) if following else Ending(alone, (), alone)
        self.tokens: list[int] = []
        self.closed = False
        self.confidence = 1.0

    @property
    def text(self) -> str:
        """What a closed hole holds, without the lead."""
        return self._written.decode()

    @property
    def _written(self) -> bytes:
        """What is written so far, without the lead."""
        return b"".join(map(self._vocabulary.bytes_of, self.tokens))[len(self.lead) :]

    def _bytes_of(self, token: int) -> bytes | None:
        """What a token would add, without the lead; None for one that adds nothing, or is the first and lacks the lead."""
        data = self._vocabulary.bytes_of(token)
        if self.tokens or not self.lead:
            return data or None
        lead = self.lead.encode()
        return data[len(lead) :] if data.startswith(lead) else None

    @property
    @abstractmethod
    def width(self) -> int:
        """Positions it takes: those of its tokens, and of those it may still get."""

    @property
    def settled(self) -> bool:
        """Its width will not change: what follows stands where it stands."""
        return self.closed

    @property
    @abstractmethod
    def needed(self) -> frozenset[int]:
        """Ids whose probabilities must be among the candidates."""

    @abstractmethod
    def offer(self, rows: Sequence[Row]) -> float:
        """The confidence of the next step. rows: of the open positions that the block shows, from the left."""

    @abstractmethod
    def take(self, rows: Sequence[Row], threshold: float, forced: bool) -> int:
        """Fills what is above the threshold; `forced`: the next step in any case. Returns how many positions."""

    @property
    @abstractmethod
    def value(self) -> Any:
        """What a closed hole holds."""

    def _follows(self, rows: Sequence[Row], at: int) -> tuple[float, float]:
        """Probability that what follows the hole stands at `at`, and the share it takes of the token that may begin it.

        Where its first character takes several tokens, the first of them begins other characters as well: the rows behind,
        as far as they are shown, tell which it is.
        """
        row, ending = rows[at], self._ending
        whole = sum(math.exp(logprob) for token, logprob in row.items() if token in ending.ids)
        if not ending.spelled:
            return whole, 0.0
        share, behind = 1.0, rows[at + 1 : at + len(ending.spelled)]
        for further, token in zip(behind, ending.spelled[1:], strict=False):
            share *= math.exp(further.get(token, -math.inf))
        return whole + share * math.exp(row.get(ending.spelled[0], -math.inf)), share

    def _left(self, token: int, share: float) -> float:
        """The part of a token's probability that is not what follows the hole."""
        return 1.0 - share if self._ending.spelled[:1] == (token,) else 1.0


class _Sequential(Slot):
    """A hole whose tokens are chosen from the left, several in one step as long as they are sure."""

    most_tokens: int

    @property
    def width(self) -> int:
        return len(self.tokens) if self.closed else self.most_tokens

    def offer(self, rows: Sequence[Row]) -> float:
        return self._best(rows, 0)[1]

    def take(self, rows: Sequence[Row], threshold: float, forced: bool) -> int:
        filled = 0
        for at in range(len(rows)):
            token, confidence = self._best(rows, at)
            if confidence <= threshold and not (forced and filled == 0):
                break
            filled += 1
            self.confidence *= confidence
            if token == END:
                self._close()
                break
            self._append(token)
            if len(self.tokens) == self.most_tokens:
                self._close()
                break
        return filled

    def _append(self, token: int) -> None:
        self.tokens.append(token)

    def _close(self) -> None:
        self.closed = True
        if not self.tokens and self.lead:  # nothing was written: the space that was left to the first token remains
            self.tokens = self._vocabulary.encode(self.lead)

    @abstractmethod
    def _best(self, rows: Sequence[Row], at: int) -> tuple[int, float]:
        """The token at `at` or END, and its probability."""


class FreeSlot(_Sequential):
    """Text. Confidence: raw probability."""

    def __init__(self, kind: Free, *common: Any) -> None:
        super().__init__(*common)
        self._kind, self.most_tokens = kind, kind.tokens
        following = common[3]
        self._banned = kind.banned + (following[0] if is_delimiter(following[:1]) else "")
        self._length = 0  # characters, the one that is begun included
        self._begun = b""  # bytes of a character whose other bytes are still to come

    def shorten(self) -> None:
        """No more tokens than characters: for a form that might not fit otherwise."""
        self.most_tokens = min(self.most_tokens, self._kind.most or self.most_tokens)

    @property
    def needed(self) -> frozenset[int]:
        return self._ending.needed | self._vocabulary.letters | self._vocabulary.continuations

    @property
    def value(self) -> str:
        return self.text

    def _append(self, token: int) -> None:
        after = self._after(token)
        assert after is not None
        super()._append(token)
        self._length, self._begun = after

    def _best(self, rows: Sequence[Row], at: int) -> tuple[int, float]:
        best, share = (END, -1.0), 0.0
        if not self._begun:
            follows, share = self._follows(rows, at)
            if self._length >= self._kind.least:
                best = END, follows
        for token, logprob in rows[at].items():
            probability = math.exp(logprob) * self._left(token, share)
            if probability > best[1] and self._after(token) is not None:
                best = token, probability
        return best if best[1] >= 0 else (END, 0.0)

    def _after(self, token: int) -> tuple[int, bytes] | None:
        """Characters and bytes of a begun one behind a token; None when it may not stand here."""
        data = self._bytes_of(token)
        if data is None or (not self._begun and token in self._ending.ids):
            return None
        read = read_utf8(self._begun + data)
        if read is None:
            return None
        text, begun = read
        if any(c in self._banned or ord(c) < 32 or 127 <= ord(c) < 160 for c in text):
            return None
        if begun and not self._vocabulary.continuations:
            return None
        length = self._length - bool(self._begun) + len(text) + bool(begun)
        # what is missing takes a token a byte or a character at most
        left = self.most_tokens - len(self.tokens) - 1
        if missing_bytes(begun) + max(self._kind.least - length, 0) > left:
            return None
        return (length, begun) if self._kind.most is None or length <= self._kind.most else None


class NumberSlot(_Sequential):
    """A number. Confidence: share of the tokens that may stand there."""

    def __init__(self, kind: Number, *common: Any) -> None:
        super().__init__(*common)
        self._kind, self.most_tokens = kind, kind.tokens
        self._complete, self._begun = (WHOLE, WHOLE_BEGUN) if kind.whole else (DECIMAL, DECIMAL_BEGUN)

    @property
    def needed(self) -> frozenset[int]:
        return self._ending.needed | self._vocabulary.numbers

    @property
    def value(self) -> int | float:
        return int(self.text) if self._kind.whole else float(self.text)

    def _best(self, rows: Sequence[Row], at: int) -> tuple[int, float]:
        row, written = rows[at], self._written
        total, best = 0.0, (END, -1.0)
        if self.tokens and self._complete.match(written):
            total, _ = self._follows(rows, at)
            best = END, total
        last = len(self.tokens) + 1 == self.most_tokens
        pattern = self._complete if last else self._begun
        for token in self._vocabulary.numbers:
            data = self._bytes_of(token)
            if token in row and data is not None and pattern.match(written + data):
                probability = math.exp(row[token])
                total += probability
                if probability > best[1]:
                    best = token, probability
        return best[0], best[1] / total if total > 0 else 0.0


class ChoiceSlot(Slot):
    """One of some texts, decided as a whole by what a block shows of it.

    The share of a text is the product, over the places where the texts that begin alike go apart, of its token's
    probability there against those of the others; where one text ends and another goes on, against what follows the hole.
    """

    def __init__(self, kind: Choice, field: str, *common: Any) -> None:
        super().__init__(*common)
        self._kind = kind
        self._options: dict[tuple[int, ...], int] = {}
        for n, text in enumerate(kind.texts):
            ids = tuple(self._vocabulary.encode(self.lead + text))
            if ids in self._options or not self._vocabulary.spells(ids, self.lead + text):
                raise RequestError(field, f"{field}: hole {self.name!r}: choice {text!r} can't be spelled in tokens.")
            self._options[ids] = n
        self._shown = 0

    @property
    def width(self) -> int:
        return len(self.tokens) if self.closed else max(map(len, self._options))

    @property
    def settled(self) -> bool:
        return self.closed or len({len(option) for option in self._options}) == 1

    @property
    def needed(self) -> frozenset[int]:
        return frozenset(i for option in self._options for i in option) | self._ending.needed

    @property
    def value(self) -> Any:
        return self._kind.values[self._options[tuple(self.tokens)]]

    def offer(self, rows: Sequence[Row]) -> float:
        return max(self._shares(rows).values())

    def take(self, rows: Sequence[Row], threshold: float, forced: bool) -> int:
        shares = self._shares(rows)
        best = max(shares, key=lambda shown: shares[shown])  # ties: the first given
        if shares[best] <= threshold and not forced:
            return 0
        self.confidence *= shares[best]
        start, end = len(self.tokens), len(self.tokens) + len(rows)
        self._options = {o: n for o, n in self._options.items() if (*o, END)[start:end] == best}
        if len(self._options) == 1:
            self.tokens, self.closed = list(next(iter(self._options))), True
        else:
            self.tokens += best  # they go apart behind the block: decided there
        return max(1, len(best))

    def _shares(self, rows: Sequence[Row]) -> dict[tuple[int, ...], float]:
        """Probability of each way to fill the positions that are shown."""
        start, end = len(self.tokens), len(self.tokens) + len(rows)
        shares = {(*option, END)[start:end]: 1.0 for option in self._options}
        for at, row in enumerate(rows):
            groups: dict[tuple[int, ...], dict[int, float]] = {}  # by what stands before: what may follow
            for shown in shares:
                if at < len(shown):
                    groups.setdefault(shown[:at], {})[shown[at]] = math.exp(row.get(shown[at], -math.inf))
            for group in groups.values():
                if END in group:
                    group[END], share = self._follows(rows, at)
                    for token in group.keys() - {END}:
                        group[token] *= self._left(token, share)
            for shown in shares:
                if at < len(shown):
                    group = groups[shown[:at]]
                    total = sum(group.values())
                    shares[shown] *= group[shown[at]] / total if total > 0 else 1 / len(group)
        return shares


def open_slot(
    hole: Hole, field: str, vocabulary: Vocabulary, lead: str, following: str, ends: Sequence[int]
) -> FreeSlot | NumberSlot | ChoiceSlot:
    """The slot of a hole. Raises RequestError for a choice that can't be spelled."""
    common = (hole, vocabulary, lead, following, ends)
    if isinstance(hole.kind, Choice):
        return ChoiceSlot(hole.kind, field, *common)
    return NumberSlot(hole.kind, *common) if isinstance(hole.kind, Number) else FreeSlot(hole.kind, *common)
