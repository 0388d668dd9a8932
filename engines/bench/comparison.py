"""`clover bench --compare`: the verb's work."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover.engines.bench.cases import read_cases
from clover.engines.bench.ledger import compare
from clover.engines.bench.report import render_html, render_terminal
from clover.runtime.errors import CloverError
from clover.runtime.terminal.output import check_out, write_out

if TYPE_CHECKING:
    from rich.console import RenderableType

OWN_FIELDS = ("messages", "stream")


def compare_servers(
    urls: tuple[str, str],
    cases: Path,
    ledger: Path | None,
    out: Path | None,
    *,
    runs: int,
    timeout: float,
    max_tokens: int,
    key: str | None = None,
    fields: tuple[Sequence[str], Sequence[str]] = ((), ()),
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> tuple[dict[str, Any], RenderableType]:
    """Compares, writes the report, and returns the result as JSON data and for the terminal. `fields`: FIELD=VALUE of each
    server's requests. Raises CloverError."""
    if out is not None:
        if out.suffix != ".html":
            raise CloverError(f"--out {out} must end in .html; give another path.")
        check_out(out)
    if not 0 < timeout <= 86_400:
        raise CloverError(f"--timeout is {timeout:g}; it must be above 0 and at most 86400 seconds.")
    given = _fields(fields[0], "--field-a"), _fields(fields[1], "--field-b")
    read, digest = read_cases(cases)
    book = ledger or cases.with_suffix(".ledger.jsonl")
    if not book.parent.is_dir():
        raise CloverError(f"--ledger {book}: {book.parent} is not a directory; create it or give another path.")
    result = compare(
        urls, read, digest, book, runs=runs, timeout=timeout, max_tokens=max_tokens, key=key, fields=given,
        progress=lambda done, total: progress("servers", done, total),
    )  # fmt: skip
    if out is not None:
        write_out(out, lambda work: work.write_text(render_html(result), encoding="utf-8"))
    return {**result.to_json(), "ledger": str(book)}, render_terminal(result)


def _fields(given: Sequence[str], option: str) -> dict[str, Any]:
    """Request fields from FIELD=VALUE; a value that is no JSON is a text. Raises CloverError."""
    found: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise CloverError(f"{option} {one} must be FIELD=VALUE, such as mode=autoregressive.")
        if name in OWN_FIELDS:
            raise CloverError(f"{option}: {name} is the comparison's own; leave it out.")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found
