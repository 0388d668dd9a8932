"""A trace as one HTML file: no scripts, nothing fetched; for paper, phones and dark screens too."""

from __future__ import annotations

from html import escape

from clover.engines.trace import figures
from clover.engines.trace.drawing import draw_svgs, stylesheet
from clover.engines.trace.record import Trace

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:740px;margin:24px auto;padding:0 16px}
h1{font-size:20px;margin:0 0 4px}h2{font-size:15px;margin:26px 0 6px;border-bottom:1px solid var(--line);padding-bottom:3px}
p{margin:6px 0}p.dim{color:var(--dim);font-size:12.5px;overflow-wrap:anywhere}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--panel);border:1px solid var(--line);border-radius:4px;padding:8px 10px;
margin:6px 0;font:12.5px/1.5 ui-monospace,monospace}
figure{margin:0;break-inside:avoid;overflow-x:auto}svg{display:block;margin:6px 0 12px}
text{font:10px system-ui,sans-serif}
@media print{body{margin:0;max-width:none;font-size:11px}h2,p.dim{break-after:avoid}svg{max-width:100%;height:auto}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""


def render_page(trace: Trace) -> str:
    """The whole page."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Trace of a reply</title><style>{stylesheet()}{STYLE}</style>"
        f"<h1>How a reply came to be</h1>{_note(describe_conditions(trace))}"
        f"<h2>Prompt</h2><pre>{escape(trace.prompt)}</pre><h2>Reply</h2><pre>{escape(trace.text)}</pre>"
        + "".join(
            f"<h2>{heading}</h2>"
            + "".join(_note(part) if isinstance(part, str) else draw_svgs([part]) for part in parts)
            for heading, parts in figures.sections(trace)
        )
        + "</html>\n"
    )


def describe_conditions(trace: Trace) -> str:
    return ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in trace.conditions.items() if v is not None)


def _note(text: str) -> str:
    return f"<p class=dim>{escape(text)}</p>"
