"""A trace as one HTML file: no scripts, nothing fetched, good on paper."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from clover.engines.trace.record import Trace, TracedBlock, TracedExperts, TracedStep

CELL, ROW, LABELS = 25, 15, 96
CONFIDENCE = ((0.5, "#c9ddf0"), (0.8, "#94bfe0"), (0.95, "#5a9bcd"), (0.99, "#2c72ae"), (2.0, "#0d4a83"))
CONFIDENCE_NAMES = ("≤ 0.5", "≤ 0.8", "≤ 0.95", "≤ 0.99", "> 0.99")

STYLE = """
:root{color-scheme:light}
body{font:14px/1.45 system-ui,sans-serif;color:#1b1f24;background:#fff;max-width:900px;margin:24px auto;padding:0 16px}
h1{font-size:20px;margin:0 0 4px}h2{font-size:15px;margin:26px 0 6px;border-bottom:1px solid #d5dae0;padding-bottom:3px}
p{margin:6px 0}.dim{color:#5b6570;font-size:12.5px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f5f7f9;border:1px solid #e3e7eb;border-radius:4px;padding:8px 10px;
margin:6px 0;font:12.5px/1.5 ui-monospace,monospace}
svg{display:block;max-width:100%;height:auto;margin:6px 0 14px}text{font:10px ui-monospace,monospace;fill:#1b1f24}
.lab{fill:#5b6570}.hid{fill:#eef1f4}.line{stroke:#fff;stroke-width:1}.key{display:inline-block;width:12px;height:12px;
vertical-align:-2px;margin:0 4px 0 12px;border-radius:2px}
table{border-collapse:collapse;font-size:12.5px}td,th{padding:2px 10px 2px 0;text-align:left;font-weight:normal}th{color:#5b6570}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
figure{margin:0;break-inside:avoid}
@media print{body{margin:0;max-width:none;font-size:11px}h2{break-after:avoid}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""


def render_page(trace: Trace) -> str:
    """The whole page."""
    c = trace.conditions
    drawn = "".join(_block(b) for b in trace.blocks)
    none = "<p class=dim>This mode develops no blocks.</p>"
    conditions = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in c.items() if v is not None)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Trace of a reply</title><style>{STYLE}</style>"
        f"<h1>How a reply came to be</h1><p class=dim>{escape(conditions)}</p>"
        f"<h2>Prompt</h2><pre>{escape(trace.prompt)}</pre><h2>Reply</h2><pre>{escape(trace.text)}</pre>"
        f"<h2>Blocks</h2>{_legend() + drawn if drawn else none}"
        f"<h2>Time</h2>{_times(trace.steps)}"
        f"<h2>Experts</h2>{_experts(trace.experts, trace.experts_in_all, trace.experts_per_token)}</html>\n"
    )


def _legend() -> str:
    keys = "".join(
        f"<span class=key style='background:{colour}'></span>{name}"
        for (_, colour), name in zip(CONFIDENCE, CONFIDENCE_NAMES, strict=True)
    )
    return (
        "<p class=dim>Columns are positions, rows are steps. A whole cell is a token filled in that step, in the colour "
        f"of its confidence; a line keeps it from then on; grey is still a mask.{keys}</p>"
    )


def colour_of(confidence: float) -> str:
    return next(colour for most, colour in CONFIDENCE if confidence <= most)


def _block(b: TracedBlock) -> str:
    left, width = 48, 48 + CELL * len(b.texts) + 2
    height = LABELS + ROW * b.steps + 4
    parts = [
        f"<svg viewBox='0 0 {width} {height}' width={width} height={height} role=img aria-label='block {b.block}'>"
    ]
    parts.append(f"<text x=0 y=12 class=lab>block {b.block}</text>")
    for n, text in enumerate(b.texts):
        x = left + CELL * n + CELL / 2 + 3
        shown = text.replace("\n", "⏎").replace(" ", "·")
        shown = shown if len(shown) <= 14 else shown[:13] + "…"
        parts.append(f"<text transform='translate({x:g} {LABELS - 5}) rotate(-90)'>{escape(shown)}</text>")
    for step in range(1, b.steps + 1):
        y = LABELS + ROW * (step - 1)
        parts.append(f"<text x=0 y={y + 11} class=lab>step{step:>3}</text>")
        for n, (at, confidence) in enumerate(zip(b.filled_at, b.confidence, strict=True)):
            x, colour = left + CELL * n, colour_of(confidence)
            if at == step:
                title = f"<title>{escape(b.texts[n])} at {confidence:.3f}</title>"
                parts.append(f"<rect x={x} y={y} width={CELL - 1} height={ROW - 1} fill='{colour}'>{title}</rect>")
            elif 0 < at < step:
                parts.append(f"<rect x={x} y={y + ROW // 2 - 2} width={CELL - 1} height=3 fill='{colour}'/>")
            else:
                parts.append(f"<rect x={x} y={y} width={CELL - 1} height={ROW - 1} class=hid />")
    return f"<figure>{''.join(parts)}</svg></figure>"


def _kind(s: TracedStep) -> str:
    if not s.preview:
        return "commit"
    return "commit and preview" if s.commit else "preview"


KIND_COLOURS = {"commit": "#b58a3c", "commit and preview": "#4f7f5b", "preview": "#5a9bcd"}


def _times(steps: Sequence[TracedStep]) -> str:
    if not steps:
        return "<p class=dim>No steps.</p>"
    engine, python = sum(s.engine_ms for s in steps), sum(s.python_ms for s in steps)
    rows = []
    for kind in KIND_COLOURS:
        own = [s for s in steps if _kind(s) == kind]
        if own:
            spent = sum(s.engine_ms for s in own)
            mean_rows = sum(s.commit + s.preview for s in own) / len(own)
            rows.append(
                f"<tr><td><span class=key style='margin-left:0;background:{KIND_COLOURS[kind]}'></span>{kind}<td class=n>{len(own)}"
                f"<td class=n>{mean_rows:.0f}<td class=n>{spent:.1f}<td class=n>{100 * spent / (engine + python):.0f} %"
            )
    rows.append(
        f"<tr><td>between the steps (Python)<td class=n>{len(steps)}<td class=n><td class=n>{python:.1f}"
        f"<td class=n>{100 * python / (engine + python):.0f} %"
    )
    table = (
        "<table><tr><th>steps<th class=n>count<th class=n>rows<th class=n>ms<th class=n>share"
        + "".join(rows)
        + "</table>"
    )
    return table + _time_chart(steps)


def _time_chart(steps: Sequence[TracedStep]) -> str:
    """One bar a step."""
    most = max(s.engine_ms + s.python_ms for s in steps)
    width, height = 836, 90
    each = min(width / len(steps), 24.0)
    parts = [
        f"<svg viewBox='0 0 {width} {height + 16}' width={width} height={height + 16} role=img aria-label='time of each step'>"
    ]
    for n, s in enumerate(steps):
        tall = height * s.engine_ms / most
        label = f"<title>step {n + 1}: {_kind(s)}, {s.commit + s.preview} rows, {s.engine_ms:.2f} ms</title>"
        parts.append(
            f"<rect x={n * each:.1f} y={height - tall:.1f} width={max(each - 1, 0.5):.1f} height={tall:.1f} "
            f"fill='{KIND_COLOURS[_kind(s)]}'>{label}</rect>"
        )
    parts.append(f"<text x=0 y={height + 12} class=lab>each step in order; the tallest took {most:.1f} ms</text>")
    return "<figure>" + "".join(parts) + "</svg></figure>"


def _experts(experts: Sequence[TracedExperts], in_all: int, per_token: int) -> str:
    if not experts:
        return "<p class=dim>No step previewed a block.</p>"
    left, width, row = 60, 836, 16
    scale = (width - left - 150) / in_all
    height = row * len(experts) + 18
    parts = [
        f"<p class=dim>Experts of {in_all} that the rows of one denoise step touch in each layer, mean over the steps: with the "
        f"block's coreset (dark), and if every row took its own best {per_token} (light).</p>"
        f"<figure><svg viewBox='0 0 {width} {height}' width={width} height={height} role=img aria-label='experts by layer'>"
    ]
    for n, e in enumerate(experts):
        y = row * n
        parts.append(
            f"<text x=0 y={y + 11} class=lab>layer {e.layer}</text>"
            f"<rect x={left} y={y + 1} width={scale * e.free_mean:.1f} height={row - 3} fill='#c9ddf0'/>"
            f"<rect x={left} y={y + 4} width={scale * e.mean:.1f} height={row - 9} fill='#0d4a83'/>"
            f"<text x={left + scale * in_all + 8:.0f} y={y + 11}>{e.mean:.1f} ({e.least}-{e.most}) of {e.free_mean:.1f}</text>"
        )
    return "".join(parts) + "</svg></figure>"
