"""`clover trace` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clover.runtime.terminal.verb import BundlePath, Json, print_json, sentence_on_error


@sentence_on_error
def trace(
    bundle: BundlePath,
    prompt: Annotated[str, typer.Argument(help="The user's message.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The .html or .json file to write.")],
    mode: Annotated[
        str | None, typer.Option(help="fill, autoregressive, self-speculative or adaptive; default the bundle's.")
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="Fill positions whose probability exceeds this.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens developed at once.")] = None,
    coreset_top_p: Annotated[
        float | None, typer.Option(help="Share of router votes the block's experts cover.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest reply in tokens.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the prompt as it is.")] = False,
    max_context: Annotated[int | None, typer.Option(help="Tokens of prompt and reply together.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default one a core.")] = None,
    provider: Annotated[str | None, typer.Option(help="tensorrt, cpu or cuda; default what the bundle is for.")] = None,
    as_json: Json = False,
) -> None:
    """Draw how a reply developed: blocks, confidence, experts and time."""
    from clover.engines.trace.command import trace_command

    options = {
        "mode": mode,
        "threshold": threshold,
        "block_size": block_size,
        "coreset_top_p": coreset_top_p,
        "max_new_tokens": max_new_tokens,
    }
    traced = trace_command(
        bundle, prompt, out, options, {"max_context": max_context, "threads": threads, "provider": provider}, raw=raw
    )
    if as_json:
        print_json({"out": str(out), **{part: len(getattr(traced, part)) for part in ("tokens", "steps", "blocks")}})
        return
    print(f"{out}: {len(traced.tokens)} tokens, {len(traced.steps)} steps, {len(traced.blocks)} blocks")
