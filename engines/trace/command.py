"""`clover trace`: the verb."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clover.engines.trace.page import render_page
from clover.engines.trace.picture import DPI, render_png, require_pillow
from clover.engines.trace.record import Trace, record
from clover.runtime.clover import Clover
from clover.runtime.errors import CloverError, RequestError
from clover.runtime.terminal.output import check_out, write_out

ENDINGS = (".html", ".png", ".json")
DEFAULT_DPI = 300


def trace_command(
    bundle: Path,
    prompt: str,
    out: Path,
    options: Mapping[str, Any],
    load: Mapping[str, Any],
    *,
    raw: bool,
    dpi: int | None = None,
    progress: Callable[[str], None] = lambda phase: None,
) -> Trace:
    """Records the reply to `prompt` and writes `out`, whose ending says how: .html, .png or .json. Raises CloverError."""
    _check(out, dpi)
    with Clover.load(bundle, **load) as engine:
        if engine.tokenizer is None or (engine.template is None and not raw):
            raise RequestError("prompt", "this bundle has no tokenizer or chat template; use --raw with a tokenizer.")
        if raw:
            ids = engine.tokenizer.encode(prompt)
        else:
            assert engine.template is not None
            ids = engine.tokenizer.encode_prompt(engine.template.render([{"role": "user", "content": prompt}]))
        given = {k: v for k, v in options.items() if v is not None}
        trace = record(
            engine,
            ids,
            engine.options(**given),
            threads=load.get("threads"),
            provider=load.get("provider"),
            progress=progress,
        )
    if out.suffix == ".png":
        written = render_png(trace, dpi or DEFAULT_DPI)
    elif out.suffix == ".json":
        written = (json.dumps(trace.to_json(), indent=1, ensure_ascii=False) + "\n").encode()
    else:
        written = render_page(trace).encode()
    write_out(out, lambda work: work.write_bytes(written))
    return trace


def _check(out: Path, dpi: int | None) -> None:
    """Refuses, before anything is loaded, what can't be written."""
    if out.suffix not in ENDINGS:
        raise CloverError(
            f"--out {out}: the ending says the format; give a path that ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}."
        )
    check_out(out)
    if dpi is not None and out.suffix != ".png":
        raise CloverError(f"--dpi acts on .png pictures, and --out is {out}; leave it out.")
    if dpi is not None and not DPI[0] <= dpi <= DPI[1]:
        raise CloverError(f"--dpi is {dpi}; it must be from {DPI[0]} to {DPI[1]}.")
    if out.suffix == ".png":
        require_pillow()
