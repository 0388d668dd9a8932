"""Holes in progress: what each may hold, position by position, and what a preview's candidates make of it."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from clover.runtime.errors import RequestError
from clover.runtime.forms.template import Choice, Free, Hole, Number
from clover.runtime.forms.vocabulary import Vocabulary, is_delimiter

Row = Mapping[int, float]  # candidate id -> raw log-probability, best first
END = -1  # stands for what follows the hole
WHOLE = re.compile(r"-?(0|[1-9][0-9]*)\Z")
DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?\Z")
WHOLE_BEGUN = re.compile(r"-?(0|[1-9][0-9]*)?\Z")
DECIMAL_BEGUN = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?)?\Z")


class Slot(ABC):
    """One hole. `tokens` are chosen from the left; `closed` holes hold nothing more."""

    def __init__(self, hole: Hole, vocabulary: Vocabulary, lead: str, following: str, ends: Sequence[int]) -> None:
        """`lead`: a space that stands before the hole and is spelled by its first token. `ends`: ids that end a reply."""
        self.name, self._vocabulary, self._lead = hole.name, vocabulary, lead
        self._ends = vocabulary.beginning(following) if following else frozenset(ends)
        self.tokens: list[int] = []
        self.closed = False
        self.confidence = 1.0

    @property
    def text(self) -> str:
        """What is written so far, without the lead."""
        return "".join(map(self._vocabulary.text, self.tokens))[len(self._lead) :]

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

    def _end_probability(self, row: Row) -> float:
        return sum(math.exp(row[i]) for i in self._ends if i in row)


class _Sequential(Slot):
    """A hole whose tokens are chosen from the left, several in one step as long as they are sure."""

    most_tokens: int

    @property
    def width(self) -> int:
        return len(self.tokens) if self.closed else self.most_tokens

    def offer(self, rows: Sequence[Row]) -> float:
        return self._best(rows[0])[1]

    def take(self, rows: Sequence[Row], threshold: float, forced: bool) -> int:
        filled = 0
        for row in rows:
            token, confidence = self._best(row)
            if confidence <= threshold and not (forced and filled == 0):
                break
            filled += 1
            self.confidence *= confidence
            if token == END:
                self._close()
                break
            self.tokens.append(token)
            if len(self.tokens) == self.most_tokens:
                self._close()
                break
        return filled

    def _close(self) -> None:
        self.closed = True
        if not self.tokens and self._lead:  # nothing was written: the space that was left to the first token remains
            self.tokens = self._vocabulary.encode(self._lead)

    @abstractmethod
    def _best(self, row: Row) -> tuple[int, float]:
        """The next token or END, and its probability."""


class FreeSlot(_Sequential):
    """Text. Confidence: raw probability."""

    def __init__(self, kind: Free, *common: Any) -> None:
        super().__init__(*common)
        self._kind, self.most_tokens = kind, kind.tokens
        following = common[3]
        self._banned = kind.banned + (following[0] if is_delimiter(following[:1]) else "")

    @property
    def needed(self) -> frozenset[int]:
        return self._ends | self._vocabulary.letters

    @property
    def value(self) -> str:
        return self.text

    def _best(self, row: Row) -> tuple[int, float]:
        best = END, self._end_probability(row) if len(self.text) >= self._kind.least else -1.0
        for token, logprob in row.items():
            if math.exp(logprob) > best[1] and self._allowed(token):
                best = token, math.exp(logprob)
        return best if best[1] >= 0 else (END, 0.0)

    def _allowed(self, token: int) -> bool:
        text = self._vocabulary.text(token)
        if not text or token in self._ends:
            return False
        if not self.tokens and self._lead:
            if not text.startswith(self._lead):
                return False
            text = text[len(self._lead) :]
        if any(c in self._banned or ord(c) < 32 or 127 <= ord(c) < 160 for c in text):
            return False
        length = len(self.text) + len(text) if self.tokens else len(text)
        last = len(self.tokens) + 1 == self.most_tokens
        return (self._kind.most is None or length <= self._kind.most) and not (last and length < self._kind.least)


class NumberSlot(_Sequential):
    """A number. Confidence: share of the tokens that may stand there."""

    def __init__(self, kind: Number, *common: Any) -> None:
        super().__init__(*common)
        self._kind, self.most_tokens = kind, kind.tokens
        self._complete, self._begun = (WHOLE, WHOLE_BEGUN) if kind.whole else (DECIMAL, DECIMAL_BEGUN)

    @property
    def needed(self) -> frozenset[int]:
        return self._ends | self._vocabulary.numbers

    @property
    def value(self) -> int | float:
        return int(self.text) if self._kind.whole else float(self.text)

    def _best(self, row: Row) -> tuple[int, float]:
        total, best = 0.0, (END, -1.0)
        if self.tokens and self._complete.match(self.text):
            total = self._end_probability(row)
            best = END, total
        for token in self._vocabulary.numbers:
            if token in row and self._allowed(token):
                probability = math.exp(row[token])
                total += probability
                if probability > best[1]:
                    best = token, probability
        return best[0], best[1] / total if total > 0 else 0.0

    def _allowed(self, token: int) -> bool:
        text = self._vocabulary.text(token)
        if not self.tokens and self._lead:
            if not text.startswith(self._lead):
                return False
            text = text[len(self._lead) :]
        whole = (self.text if self.tokens else "") + text
        last = len(self.tokens) + 1 == self.most_tokens
        return bool((self._complete if last else self._begun).match(whole))


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
            ids = tuple(self._vocabulary.encode(self._lead + text))
            if ids in self._options or "".join(map(self._vocabulary.text, ids)) != self._lead + text:
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
        return frozenset(i for option in self._options for i in option) | self._ends

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
            groups: dict[tuple[int, ...], dict[int, float]] = {}
            for shown in shares:
                if at < len(shown):
                    token = shown[at]
                    p = self._end_probability(row) if token == END else math.exp(row.get(token, -math.inf))
                    groups.setdefault(shown[:at], {})[token] = p
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
