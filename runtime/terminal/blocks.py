"""Draws a block developing in the terminal: masks, then tokens in the order they were filled."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from clover.runtime.decoder import StepEvent

if TYPE_CHECKING:
    from rich.text import Text

MASK = "░"


def confidence_style(confidence: float) -> str:
    """Colour of a token by the confidence it was filled with."""
    if confidence > 0.95:
        return "green"
    return "yellow" if confidence > 0.5 else "red"


class BlockView:
    """Keeps each position's confidence over a block's steps and renders one line a step.

    A token of `ends` closes the line: what is filled behind it belongs to nothing.
    """

    def __init__(self, decode: Callable[[int], str], ends: Collection[int]) -> None:
        self._decode, self._ends = decode, ends
        self._confidence: dict[int, float] = {}

    def render(self, event: StepEvent) -> Text:
        from rich.text import Text

        if event.step == 1:
            self._confidence.clear()
        self._confidence.update(zip(event.filled, event.confidence, strict=True))
        left = sum(t is None for t in event.tokens)
        line = Text(
            f"block {event.block:>3} step {event.step:>2}  {len(event.filled):>2} filled {left:>2} left  ", style="dim"
        )
        for position, token in enumerate(event.tokens):
            if token is None:
                line.append(MASK, style="dim")
                continue
            text = self._decode(token).replace("\n", "⏎") or "·"
            style = confidence_style(self._confidence.get(position, 1.0))
            line.append(text, style=f"bold {style}" if position in event.filled else style)
            if token in self._ends:
                break
        return line
