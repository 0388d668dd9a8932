"""`clover trace` on the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from clover.runtime.terminal.verb import (
    BlockSize,
    BundlePath,
    CoresetTopP,
    Json,
    MaxContext,
    MaxNewTokens,
    Mode,
    Provider,
    Raw,
    Threads,
    Threshold,
    print_json,
    sentence_on_error,
)


@sentence_on_error
def trace(
    bundle: BundlePath,
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads standard input.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The .html, .png or .json file to write.")],
    mode: Mode = None,
    threshold: Threshold = None,
    block_size: BlockSize = None,
    coreset_top_p: CoresetTopP = None,
    max_new_tokens: MaxNewTokens = None,
    dpi: Annotated[int | None, typer.Option(help="Pixels per inch of a .png.  [default: 300]")] = None,
    raw: Raw = False,
    max_context: MaxContext = None,
    threads: Threads = None,
    provider: Provider = None,
    as_json: Json = False,
) -> None:
    """Draw how a reply developed: blocks, confidence, experts and time."""
    from clover.engines.trace.command import trace_command
    from clover.runtime.run_command import read_prompt
    from clover.runtime.terminal.progress import Progress

    options = {
        "mode": mode,
        "threshold": threshold,
        "block_size": block_size,
        "coreset_top_p": coreset_top_p,
        "max_new_tokens": max_new_tokens,
    }
    text = read_prompt(sys.stdin) if prompt == "-" else prompt
    load = {"max_context": max_context, "threads": threads, "provider": provider}
    with Progress("tracing", "", quiet=as_json) as shown:
        traced = trace_command(
            bundle, text, out, options, load, raw=raw, dpi=dpi, progress=lambda phase: shown(phase, 0, 0)
        )
    if as_json:
        print_json({"out": str(out), **{part: len(getattr(traced, part)) for part in ("tokens", "steps", "blocks")}})
        return
    print(f"{out}: {len(traced.tokens)} tokens, {len(traced.steps)} steps, {len(traced.blocks)} blocks")
