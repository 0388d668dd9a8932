"""What a form is made of, and the template language: text with `{{name:12}}`, `{{ok:true|false}}`, `{{n:int}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clover.runtime.errors import RequestError
from clover.runtime.forms.vocabulary import is_delimiter

HOLE = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]-]*\Z")
NUMBER_TOKENS = 16
MAX_TOKENS = 4096
MAX_CHOICES = 256


@dataclass(frozen=True)
class Free:
    """At most `tokens` tokens of text, of `least` to `most` characters, none of them in `banned` or a control character.

    Where `most` is given, `tokens` may be cut down to it when the context is short.
    """

    tokens: int
    least: int = 1
    most: int | None = None
    banned: str = ""


@dataclass(frozen=True)
class Choice:
    """One of some texts; `values[i]` is what `texts[i]` stands for."""

    texts: tuple[str, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Number:
    """A decimal number without leading zeros; `whole`: an integer."""

    whole: bool
    tokens: int = NUMBER_TOKENS


Kind = Free | Choice | Number


@dataclass(frozen=True)
class Hole:
    """A named hole."""

    name: str
    kind: Kind


@dataclass(frozen=True)
class Form:
    """Texts and holes in turn; `assemble` makes the result of the holes' values (by default the values themselves)."""

    parts: tuple[str | Hole, ...]
    field: str = "template"
    assemble: Callable[[Mapping[str, Any]], Any] = dict

    @property
    def holes(self) -> Iterator[Hole]:
        return (p for p in self.parts if isinstance(p, Hole))


def make_form(parts: Sequence[str | Hole], field: str, assemble: Callable[[Mapping[str, Any]], Any] = dict) -> Form:
    """A form of `parts`, empty texts dropped and neighbouring ones joined.

    Raises RequestError for no holes, two of one name, two that touch, and choices that can't be told apart.
    """
    joined: list[str | Hole] = []
    for text in _texts(parts):
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise RequestError(field, f"{field} is not valid Unicode (it holds half of a surrogate pair); correct it.")
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    holes = [p for p in joined if isinstance(p, Hole)]
    if not holes:
        raise RequestError(field, f"{field} has no holes; write one as {{{{name:12}}}}.")
    names: set[str] = set()
    for hole in holes:
        if hole.name in names:
            raise RequestError(field, f"{field} has two holes named {hole.name!r}; give each its own name.")
        names.add(hole.name)
    for part, following in zip(joined, [*joined[1:], ""], strict=True):
        if not isinstance(part, Hole):
            continue
        if isinstance(following, Hole):
            raise RequestError(
                field, f"{field}: holes {part.name!r} and {following.name!r} touch; put text between them."
            )
        _check_follows(part, following, field)
    return Form(tuple(joined), field, assemble)


def _texts(parts: Sequence[str | Hole]) -> Iterator[str]:
    """Everything that a form may write by itself."""
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part.kind, Choice):
            yield from part.kind.texts


def _check_follows(hole: Hole, following: str, field: str) -> None:
    """Whether what follows a hole can be told from what is in it."""
    if isinstance(hole.kind, Number) and re.match(r"[0-9.]", following):
        raise RequestError(
            field,
            f"{field}: hole {hole.name!r} holds a number and {following[:1]!r} follows it; put other text between.",
        )
    if isinstance(hole.kind, Choice):
        for one in hole.kind.texts:
            for other in hole.kind.texts:
                rest = other[len(one) :]
                if other == one or not other.startswith(one) or not following:
                    continue
                if is_delimiter(following[0]):
                    same = rest[0] == following[0]
                else:
                    same = following.startswith(rest) or rest.startswith(following)
                if same:
                    raise RequestError(
                        field,
                        f"{field}: hole {hole.name!r}: choice {one!r} before {following[:12]!r} looks like choice {other!r}; "
                        "change the text that follows.",
                    )


def parse_template(template: str, field: str = "template") -> Form:
    """Reads a template. Raises RequestError naming the hole that is wrong."""
    if not isinstance(template, str):
        raise RequestError(field, f"{field} must be a text with holes such as {{{{name:12}}}}.")
    parts: list[str | Hole] = []
    end = 0
    for match in HOLE.finditer(template):
        parts += [template[end : match.start()], _parse_hole(match.group(1), field)]
        end = match.end()
    parts.append(template[end:])
    for part in parts:
        if isinstance(part, str) and "{{" in part:
            raise RequestError(field, f"{field} opens a hole with {{{{ and does not close it; add }}}}.")
    return make_form(parts, field)


def _parse_hole(text: str, field: str) -> Hole:
    name, colon, kind = text.partition(":")
    name = name.strip()
    if not colon:
        raise RequestError(
            field,
            f"{field}: hole {{{{{text}}}}} is not name:tokens, name:one|other, name:int or name:number.",
        )
    if not NAME.match(name):
        raise RequestError(
            field,
            f"{field}: hole {{{{{text}}}}} has the name {name!r}; names are ASCII letters, digits and _ . - [ ], "
            "and begin with a letter or _.",
        )
    if "|" in kind:
        return Hole(name, choice(tuple(kind.split("|")), field, name))
    kind = kind.strip()
    if kind in ("int", "number"):
        return Hole(name, Number(kind == "int"))
    if not (kind.isascii() and kind.isdigit()):
        raise RequestError(
            field,
            f"{field}: hole {name!r} asks for {kind!r}; give a number of tokens, choices as one|other, int or number.",
        )
    if not 1 <= int(kind) <= MAX_TOKENS:
        raise RequestError(field, f"{field}: hole {name!r} has {kind} tokens; it must have 1 to {MAX_TOKENS}.")
    return Hole(name, Free(int(kind)))


def choice(texts: tuple[str, ...], field: str, name: str, values: tuple[Any, ...] | None = None) -> Choice:
    """A choice of texts. Raises RequestError for empty or equal ones."""
    if not all(texts):
        raise RequestError(field, f"{field}: hole {name!r} has an empty choice; remove it.")
    if len(set(texts)) < len(texts):
        double = next(t for t in texts if texts.count(t) > 1)
        raise RequestError(field, f"{field}: hole {name!r} has the choice {double!r} twice; remove one.")
    if len(texts) > MAX_CHOICES:
        raise RequestError(
            field, f"{field}: hole {name!r} has {len(texts)} choices; at most {MAX_CHOICES} are possible."
        )
    return Choice(texts, texts if values is None else values)


def json_choice(values: Sequence[Any], field: str, name: str) -> list[str | Hole]:
    """A hole for one of some JSON values; the quotes of texts stand around it. Raises RequestError, ValueError."""
    texts = tuple(json.dumps(v, ensure_ascii=False, allow_nan=False) for v in values)
    if all(isinstance(v, str) and v for v in values):
        return ['"', Hole(name, choice(tuple(t[1:-1] for t in texts), field, name, tuple(values))), '"']
    return [Hole(name, choice(texts, field, name, tuple(values)))]
