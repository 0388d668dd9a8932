"""`clover calibrate` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clover.runtime.terminal.verb import BundlePath, Json, Threads, sentence_on_error, show


@sentence_on_error
def calibrate(
    bundle: BundlePath,
    prompts: Annotated[
        Path,
        typer.Option(help="A prompt a line, or .jsonl with one of `prompt`, `messages`, `text` and `tokens` a line."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The .safetensors file to write.")],
    mode: Annotated[
        str, typer.Option(help="How prompts are answered: fill, autoregressive, self-speculative or adaptive.")
    ] = "fill",
    max_new_tokens: Annotated[int, typer.Option(help="Longest reply in tokens.")] = 256,
    threads: Threads = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that stands at the output path.")] = False,
    as_json: Json = False,
) -> None:
    """Measure what a model's matrices are fed with, for `clover build --int4 --calibration`."""
    from clover.engines.calibrate.command import calibrate_command, render
    from clover.runtime.terminal.progress import Progress

    with Progress("calibrating", " prompts", quiet=as_json) as progress:
        found = calibrate_command(
            bundle,
            prompts,
            out,
            mode=mode,
            max_new_tokens=max_new_tokens,
            threads=threads,
            force=force,
            progress=progress,
        )
    show(found if as_json else render(found))
