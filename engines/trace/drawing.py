"""What the figures are made of: boxes and texts in tones, which a page draws as SVG and a picture pixel by pixel.

Lengths are in hundredths of an inch, y grows downwards. Every scale of tones also reads in grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

Anchor = Literal["start", "middle", "end"]
TEXT_SIZE = 10.0

# Tone -> colour on paper, and on a dark screen, where what is more stands out by being lighter.
TONES: dict[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#14181d"),
    "panel": ("#f5f7f9", "#1d232a"),
    "line": ("#d5dae0", "#39424c"),
    "ink": ("#1b1f24", "#e6eaee"),
    "dim": ("#5b6570", "#9aa5b1"),
    "sure0": ("#d3e3f2", "#20384f"),
    "sure1": ("#a3c6e4", "#2c5881"),
    "sure2": ("#6a9fce", "#4a86bb"),
    "sure3": ("#3471a8", "#86b8e3"),
    "sure4": ("#0d3a66", "#d6eafc"),
    "light": ("#bfd6eb", "#2c5881"),
    "middle": ("#6a9fce", "#6a9fce"),
    "dark": ("#0d3a66", "#d6eafc"),
}
MASK = "mask"  # an empty box


@dataclass(frozen=True)
class Box:
    """A filled rectangle, or with the tone MASK its outline. title: what a pointer over it shows."""

    x: float
    y: float
    width: float
    height: float
    tone: str
    title: str = ""


@dataclass(frozen=True)
class Text:
    """A line of text; y is its baseline. turned: it reads upwards from (x, y)."""

    x: float
    y: float
    text: str
    tone: str = "ink"
    anchor: Anchor = "start"
    turned: bool = False
    size: float = TEXT_SIZE


@dataclass(frozen=True)
class Figure:
    """A drawing of its own. label: what it is, for those who can't see it."""

    width: float
    height: float
    label: str
    items: tuple[Box | Text, ...]


def stylesheet() -> str:
    """CSS of the tones: paper's colours, and a dark screen's where the reader prefers one."""
    light, dark = ("".join(f"--{tone}:{colours[n]};" for tone, colours in TONES.items()) for n in (0, 1))
    fills = "".join(f".{tone}{{fill:var(--{tone})}}" for tone in TONES)
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{dark}}}}}\n"
        f"{fills}.{MASK}{{fill:none;stroke:var(--line)}}"
    )


def draw_svg(figure: Figure) -> str:
    """The figure as an SVG element that is coloured by `stylesheet`."""
    w, h = _number(figure.width), _number(figure.height)
    parts = [f"<svg viewBox='0 0 {w} {h}' width={w} height={h} role=img aria-label='{escape(figure.label)}'>"]
    parts += [_box(i) if isinstance(i, Box) else _text(i) for i in figure.items]
    return "".join(parts) + "</svg>"


def draw_svgs(figures: Sequence[Figure]) -> str:
    return "".join(f"<figure>{draw_svg(f)}</figure>" for f in figures)


def _box(b: Box) -> str:
    inset = 0.5 if b.tone == MASK else 0.0  # an outline is drawn on both sides of its line
    place = f"x={_number(b.x + inset)} y={_number(b.y + inset)}"
    size = f"width={_number(b.width - 2 * inset)} height={_number(b.height - 2 * inset)}"
    if b.title:
        return f"<rect {place} {size} class={b.tone}><title>{escape(b.title)}</title></rect>"
    return f"<rect {place} {size} class={b.tone} />"


def _text(t: Text) -> str:
    anchor = "" if t.anchor == "start" else f" text-anchor={t.anchor}"
    x, y = _number(t.x), _number(t.y)
    place = f"transform='translate({x} {y}) rotate(-90)'" if t.turned else f"x={x} y={y}"
    size = "" if t.size == TEXT_SIZE else f" font-size={_number(t.size)}"
    return f"<text {place} class={t.tone}{anchor}{size}>{escape(t.text)}</text>"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
