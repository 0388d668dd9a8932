"""A comparison as text and as one HTML file without scripts."""

from __future__ import annotations

from html import escape

from clover.engines.bench.ledger import Comparison, ServerResult

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#1b1f24;max-width:860px;margin:24px auto;padding:0 16px}
h1{font-size:20px;margin:0 0 4px}h2{font-size:15px;margin:24px 0 6px}.dim{color:#5b6570;font-size:12.5px}
table{border-collapse:collapse;font-size:13px}th{color:#5b6570;font-weight:normal}td,th{padding:3px 14px 3px 0;text-align:left}
.n{text-align:right;font-variant-numeric:tabular-nums}.bad{color:#a4262c}svg{display:block;max-width:100%;height:auto}
text{font:11px system-ui,sans-serif;fill:#1b1f24}
@media print{body{margin:0;max-width:none;font-size:11px}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
NAMES = ("A", "B")


def render_text(c: Comparison) -> str:
    """A few lines for the terminal."""
    lines = [", ".join(f"{k.replace('_', ' ')} {v}" for k, v in c.conditions.items())]
    for name, s in zip(NAMES, c.servers, strict=True):
        lines.append(
            f"{name}  {s.url}  {s.model or '-'}: {_share(s)}; median {_seconds(s.median_seconds)}, {_per_success(s)}"
        )
        if s.errors:
            lines.append("   errors: " + ", ".join(f"{k} {v} times" for k, v in s.errors.items()))
        if s.unanswered:
            lines.append(f"   {_unanswered(s)}")
    return "\n".join([*lines, _difference(c)])


def _share(s: ServerResult) -> str:
    if s.share is None:
        return "no answers"
    return f"{s.successes} of {s.answers} right, {100 * s.share:.1f} % ({100 * s.low:.1f} to {100 * s.high:.1f} %)"


def _unanswered(s: ServerResult) -> str:
    why = f"the server did not answer ({s.dead})" if s.dead else "no connection"
    return f"{s.unanswered} of {s.answers + s.unanswered} left open: {why}; they count neither as wrong nor as slow"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _per_success(s: ServerResult) -> str:
    return f"{_seconds(s.time_per_success)} per success"


def _difference(c: Comparison) -> str:
    d = c.difference
    if d is None:
        return "no case was answered by both"
    ratio = (
        "" if c.time_ratio is None else f"; where both are right, B takes {c.time_ratio:.2f} times A's time (median)"
    )
    return (
        f"B minus A over {d.pairs} pairs: {100 * d.difference:+.1f} points ({100 * d.low:+.1f} to {100 * d.high:+.1f}), "
        f"only A right {d.only_first}, only B right {d.only_second}, p {d.p:.3g}{ratio}"
    )


def render_html(c: Comparison) -> str:
    """The whole page."""
    conditions = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in c.conditions.items())
    head = "".join(f"<th class=n>{h}" for h in ("right", "answers", "share", "95 %", "median", "per success"))
    rows = ""
    for name, s in zip(NAMES, c.servers, strict=True):
        share = "-" if s.share is None else f"{100 * s.share:.1f} %"
        cells = (
            str(s.successes),
            str(s.answers),
            share,
            f"{100 * s.low:.1f}-{100 * s.high:.1f} %",
            _seconds(s.median_seconds),
            _seconds(s.time_per_success),
        )
        rows += f"<tr><td>{name} <span class=dim>{escape(s.url)} {escape(s.model or '')}</span>" + "".join(
            f"<td class=n>{x}" for x in cells
        )
        for error, count in s.errors.items():
            rows += f"<tr><td class=dim colspan=7>{count} times: {escape(error)}"
        if s.unanswered:
            rows += f"<tr><td class=bad colspan=7>{escape(_unanswered(s))}"
    cases = "".join(
        f"<tr><td>{escape(row['id'])}<td class=dim>{row['check']}"
        + "".join(f"<td class=n>{right} of {of}" for right, of in zip(row["right"], row["of"], strict=True))
        for row in c.cases
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Two servers compared</title><style>{STYLE}</style>"
        f"<h1>Two servers compared</h1><p class=dim>{escape(conditions)}</p>"
        f"<table><tr><th>server{head}{rows}</table><h2>Share of right answers</h2>{_intervals(c)}"
        f"<h2>Difference</h2><p>{escape(_difference(c))}.</p>"
        f"<h2>Cases</h2><table><tr><th>case<th>check<th class=n>A<th class=n>B{cases}</table>"
        "<p class=dim>Shares with Wilson's 95 % interval. Time per success counts the time of wrong answers too. The difference is "
        "of pairs of the same case and run; p is the exact test of those that differ.</p></html>\n"
    )


def _intervals(c: Comparison) -> str:
    left, scale, row = 24, 6.4, 24
    parts = [
        f"<svg viewBox='0 0 700 {2 * row + 22}' width=700 height={2 * row + 22} role=img aria-label='shares with intervals'>"
    ]
    for tick in range(0, 101, 20):
        x = left + scale * tick
        parts.append(
            f"<line x1={x:g} y1=0 x2={x:g} y2={2 * row} stroke='#e3e7eb' /><text x={x:g} y={2 * row + 14} text-anchor=middle>{tick} %</text>"
        )
    for n, (name, s) in enumerate(zip(NAMES, c.servers, strict=True)):
        y = row * n + row / 2
        parts.append(f"<text x=0 y={y + 4:g}>{name}</text>")
        if s.share is not None:
            parts.append(
                f"<line x1={left + scale * 100 * s.low:.1f} y1={y:g} x2={left + scale * 100 * s.high:.1f} y2={y:g} stroke='#5a9bcd' stroke-width=6 />"
                f"<circle cx={left + scale * 100 * s.share:.1f} cy={y:g} r=5 fill='#0d4a83' />"
            )
    return "".join(parts) + "</svg>"
