"""`clover trace`: the verb."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clover.engines.trace.page import render_page
from clover.engines.trace.record import Trace, record
from clover.runtime.clover import Clover
from clover.runtime.errors import CloverError, RequestError


def trace_command(
    bundle: Path, prompt: str, out: Path, options: Mapping[str, Any], load: Mapping[str, Any], *, raw: bool
) -> Trace:
    """Records the reply to `prompt` and writes `out`, whose ending says how: .html or .json. Raises CloverError."""
    if out.suffix not in (".html", ".json"):
        raise CloverError(f"--out {out}: the ending says the format; give a path that ends in .html or .json.")
    if not out.parent.is_dir():
        raise CloverError(f"--out {out}: {out.parent} is not a directory; create it or give another path.")
    with Clover.load(bundle, **load) as engine:
        if engine.tokenizer is None or (engine.template is None and not raw):
            raise RequestError("prompt", "this bundle has no tokenizer or chat template; use --raw with a tokenizer.")
        if raw:
            ids = engine.tokenizer.encode(prompt)
        else:
            assert engine.template is not None
            ids = engine.tokenizer.encode_prompt(engine.template.render([{"role": "user", "content": prompt}]))
        given = {k: v for k, v in options.items() if v is not None}
        trace = record(engine, ids, engine.options(**given), threads=load.get("threads"))
    text = (
        json.dumps(trace.to_json(), indent=1, ensure_ascii=False) + "\n"
        if out.suffix == ".json"
        else render_page(trace)
    )
    work = out.with_name(f".{out.name}.partial")
    try:
        work.write_text(text, encoding="utf-8")
        work.replace(out)
    except OSError as error:
        work.unlink(missing_ok=True)
        raise CloverError(f"--out {out} can't be written ({error.strerror}); give another path.") from None
    return trace
