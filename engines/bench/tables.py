"""What was measured, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def render(result: Mapping[str, Any]) -> RenderableType:
    """Conditions, speed, steps, and what the roofline of cards allows."""
    conditions, settings = result["conditions"], result["settings"]
    parts: list[RenderableType] = [Text(describe_conditions(conditions)), _speed(settings), _steps(settings)]
    if "roofline" in conditions:
        parts.append(Text(_roofline_note(conditions), style="dim"))
        known = list(settings[0]["roofline_tokens_per_second"])
        if known:
            parts += [
                _cards(settings, [(name, conditions["cards"][name]) for name in known]),
                Text(CARDS_NOTE, style="dim"),
            ]
        parts += [Text(f"{name}: {why}", style="dim") for name, why in conditions["cards"].items() if name not in known]
    return Group(*parts)


CARDS_NOTE = (
    "The same steps, with the same experts, at the card's peak speeds and nothing lost between kernels: never more than "
    "this, and a small model comes nowhere near."
)


def describe_conditions(conditions: Mapping[str, Any]) -> str:
    """One line of what belongs to every number."""
    apart = ("roofline", "cards", "experts")
    return ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in conditions.items() if k not in apart)


def _speed(settings: Sequence[Mapping[str, Any]]) -> Table:
    columns = (("tokens/s", "tokens_per_second", None), ("first token ms", "first_token_ms", 1), ("ratio", "ratio", 2))
    table = _table("Speed: medians and quartiles over runs", [heading for heading, _, _ in columns])
    for s in settings:
        table.add_row(s["name"], *(_spread(s[key], digits) for _, key, digits in columns))
    table.caption = f"ratio: tokens/s of the same prompt and round against {settings[0]['name']}"
    return table


def _steps(settings: Sequence[Mapping[str, Any]]) -> Table:
    columns = [
        ("tokens per step", "tokens_per_step_spread", 1),
        ("steps per block", "steps_per_block_spread", 2),
        ("experts per layer", "experts_per_layer", 1),
        ("% of roofline", "roofline_percent", 1),
    ]
    columns = [column for column in columns if column[1] in settings[0]]
    table = _table("Steps: medians and quartiles over runs", [heading for heading, _, _ in columns])
    for s in settings:
        table.add_row(s["name"], *(_spread(s[key], digits) for _, key, digits in columns))
    return table


def _cards(settings: Sequence[Mapping[str, Any]], cards: Sequence[tuple[str, str]]) -> Table:
    table = _table("Roofline: tokens/s at most", [title for _, title in cards])
    for s in settings:
        table.add_row(s["name"], *(f"{s['roofline_tokens_per_second'][name]:,.0f}" for name, _ in cards))
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", caption_style="dim")
    table.add_column("setting", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _roofline_note(conditions: Mapping[str, Any]) -> str:
    here = conditions["roofline"]
    told = f"experts per layer: of {conditions['experts']}, counted in an untimed run of the same steps. "
    if here is None:
        return told + "The card that ran this is not known, so there is no share of its roofline."
    return f"{told}Roofline of {here['machine']}: {here['read_gbs']:g} GB/s, {here['peak_gflops']:g} GFLOP/s, {here['source']}."


def _spread(spread: Mapping[str, float] | None, digits: int | None) -> str:
    """Median and quartiles, with so many decimals; None: three figures of the median, whole numbers in full."""
    if spread is None:
        return "-"
    if digits is None:
        digits = max(0, 2 - int(f"{spread['median']:e}".partition("e")[2]))
    return f"{spread['median']:,.{digits}f} ({spread['quarter']:,.{digits}f}–{spread['three_quarters']:,.{digits}f})"
