"""A comparison for the terminal, and as one HTML file without scripts."""

from __future__ import annotations

from html import escape

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text as Words

from clover.engines.bench.ledger import Comparison, ServerResult
from clover.engines.bench.statistics import Interval
from clover.engines.trace.drawing import Box, Figure, Text, draw_svgs, stylesheet

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:860px;margin:24px auto;padding:0 16px}
h1{font-size:20px;margin:0 0 4px}h2{font-size:15px;margin:26px 0 6px;border-bottom:1px solid var(--line);padding-bottom:3px}
p{margin:6px 0}p.dim,td.dim,span.dim{color:var(--dim)}p.dim{font-size:12.5px;overflow-wrap:anywhere}
div,figure{margin:0;overflow-x:auto}table{border-collapse:collapse;font-size:13px}th{color:var(--dim);font-weight:normal}
td,th{padding:3px 18px 3px 0;text-align:left;vertical-align:top}.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
tr.case td{border-top:1px solid var(--line)}td.wrong{font-size:12px;max-width:420px;overflow-wrap:anywhere;white-space:pre-wrap}
svg{display:block;margin:6px 0}text{font:11px system-ui,sans-serif}
@media print{body{margin:0;max-width:none;font-size:11px}h2{break-after:avoid}tr,figure{break-inside:avoid}svg{max-width:100%;height:auto}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
NAMES = ("A", "B")
HEADINGS = ("right", "share (95 %)", "median", "per success (95 %)")
SHOWN = 300  # characters of a wrong answer
HOW_TO_READ = (
    "Intervals are over cases: what other cases like these would give. Shares: Wilson's interval, trials divided by the design "
    "effect, since answers to one case are alike. Median: of all answers, right or wrong. Time per success: all seconds, those "
    "of wrong answers and errors too, over right answers; cases drawn anew. The difference is of pairs of the same case and run; "
    "p is the exact sign test of the cases in which one was right more often."
)


def render_terminal(c: Comparison) -> RenderableType:
    """Conditions, both servers, what went wrong, and the difference."""
    table = Table()
    table.add_column("server", overflow="fold")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for name, s in zip(NAMES, c.servers, strict=True):
        table.add_row(f"{name}  {s.url}  {_what(s)}", *_cells(s))
    parts: list[RenderableType] = [Words(_conditions(c)), table]
    for name, s in zip(NAMES, c.servers, strict=True):
        parts += [Words(f"{name}: {line}", style="red") for line in _trouble(s)]
    return Group(*parts, Words(_difference(c)), Words(_times(c)))


def _conditions(c: Comparison) -> str:
    return ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in c.conditions.items())


def _what(s: ServerResult) -> str:
    """Its model and what was asked of it in particular."""
    return " ".join([s.model or "-", *(f"{k}={v}" for k, v in s.fields.items())])


def _cells(s: ServerResult) -> tuple[str, ...]:
    """As HEADINGS."""
    if s.share is None:
        return "no answers", "-", "-", "-"
    share = f"{100 * s.share:.1f} % ({100 * s.low:.1f}–{100 * s.high:.1f})"
    per = "-"
    if s.time_per_success is not None and s.time_per_success_interval is not None:
        per = f"{s.time_per_success:.3f} s {_interval(s.time_per_success_interval, 3)}"
    median = "-" if s.median_seconds is None else f"{s.median_seconds:.3f} s"
    return f"{s.successes} of {s.answers}", share, median, per


def _interval(i: Interval, digits: int) -> str:
    return f"({i.low:.{digits}f} or more)" if i.high is None else f"({i.low:.{digits}f}–{i.high:.{digits}f})"


def _trouble(s: ServerResult) -> list[str]:
    """What a reader must know before believing the numbers."""
    found = [f"{count} of {s.answers} answers were errors, {error}" for error, count in s.errors.items()]
    if s.unanswered:
        why = f"the server did not answer ({s.dead})" if s.dead else "no connection"
        found.append(
            f"{s.unanswered} of {s.answers + s.unanswered} left open: {why}; they count neither as wrong nor as slow, and the "
            "same command asks them again"
        )
    return found


def _difference(c: Comparison) -> str:
    d = c.difference
    if d is None:
        return "No case was answered by both."
    only = (
        "they were right and wrong in the same pairs"
        if not d.only_first + d.only_second
        else f"in {d.only_first} only A was right, in {d.only_second} only B; p = {d.p:.2g}"
    )
    return (
        f"Share of right answers, B minus A: {100 * d.difference:+.1f} points (95 %: {100 * d.low:+.1f} to {100 * d.high:+.1f}), of "
        f"{d.pairs} pairs; {only}."
    )


def _times(c: Comparison) -> str:
    if c.time_ratio is None:
        return "Times are compared where both are right, and there is no such pair."
    interval = ", too few cases for an interval"
    if c.time_ratio_interval is not None and c.time_ratio_interval.high is not None:
        interval = f" (95 %: {c.time_ratio_interval.low:.2f} to {c.time_ratio_interval.high:.2f})"
    return f"Time where both are right: B takes {c.time_ratio:.2f} times A's{interval}, median over cases."


def render_html(c: Comparison) -> str:
    """The whole page."""
    head = "".join(f"<th class=n>{heading}" for heading in HEADINGS)
    rows = ""
    for name, s in zip(NAMES, c.servers, strict=True):
        rows += f"<tr><td>{name} <span class=dim>{escape(s.url)} {escape(_what(s))}</span>"
        rows += "".join(f"<td class=n>{cell}" for cell in _cells(s))
    trouble = "".join(
        f"<p><strong>{name}:</strong> {escape(line)}.</p>"
        for name, s in zip(NAMES, c.servers, strict=True)
        for line in _trouble(s)
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Two servers compared</title><style>{stylesheet()}{STYLE}</style>"
        f"<h1>Two servers compared</h1><p class=dim>{escape(_conditions(c))}</p>"
        f"<div><table><tr><th>server{head}{rows}</table></div>{trouble}"
        f"<h2>Share of right answers</h2>{draw_svgs([_shares(c)])}"
        f"<h2>Difference</h2><p>{escape(_difference(c))}</p><p>{escape(_times(c))}</p>"
        f"<h2>Cases</h2>{_cases(c)}<p class=dim>{escape(HOW_TO_READ)}</p></html>\n"
    )


def _cases(c: Comparison) -> str:
    """Every case; below those that were not always right, each server's first wrong answer."""
    found = ""
    for row in c.cases:
        found += f"<tr class=case><td>{escape(row['id'])}<td class=dim>{row['check']}"
        found += "".join(f"<td class=n>{right} of {of}" for right, of in zip(row["right"], row["of"], strict=True))
        for name, wrong in zip(NAMES, row["wrong"], strict=True):
            if wrong is not None:
                shown = wrong if len(wrong) <= SHOWN else wrong[: SHOWN - 1] + "…"
                found += f"<tr><td class=dim>{name} answered<td class=wrong colspan=3>{escape(shown) or '(nothing)'}"
    return f"<div><table><tr><th>case<th>check<th class=n>A<th class=n>B{found}</table></div>"


def _shares(c: Comparison) -> Figure:
    """Each server's share as a mark on its interval."""
    left, scale, row = 24.0, 3.0, 24.0
    items: list[Box | Text] = []
    for tick in range(0, 101, 20):
        x = left + scale * tick
        items += [Box(x, 0, 1, 2 * row, "line"), Text(x, 2 * row + 14, f"{tick} %", "dim", "middle")]
    for n, (name, s) in enumerate(zip(NAMES, c.servers, strict=True)):
        y = row * n + row / 2
        items.append(Text(0, y + 4, name))
        if s.share is not None:
            low, high, share = (left + scale * 100 * value for value in (s.low, s.high, s.share))
            title = f"{100 * s.share:.1f} %, {100 * s.low:.1f} to {100 * s.high:.1f} %"
            items += [Box(low, y - 3, high - low, 6, "middle", title), Box(share - 2, y - 7, 4, 14, "dark", title)]
    return Figure(left + 100 * scale + 24, 2 * row + 20, "shares with their intervals", tuple(items))
