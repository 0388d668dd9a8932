"""`clover fill` and `clover decide` on the command line; `clover.cli` puts them under `clover`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clover.runtime.terminal.verb import (
    BlockSize,
    BundlePath,
    CoresetTopP,
    Json,
    Provider,
    Thinking,
    Threads,
    Threshold,
    sentence_on_error,
    show,
)

MaxContext = Annotated[int | None, typer.Option(help="Tokens of prompt and form together.")]


@sentence_on_error
def fill(
    bundle: BundlePath,
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads standard input.")],
    template: Annotated[
        str | None, typer.Option(help="Text with holes: {{name:12}}, {{ok:true|false}}, {{n:int}}, {{x:number}}.")
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="Instead: a file with a JSON schema to answer by.")] = None,
    thinking: Thinking = None,
    threshold: Threshold = None,
    block_size: BlockSize = None,
    coreset_top_p: CoresetTopP = None,
    max_context: MaxContext = None,
    threads: Threads = None,
    provider: Provider = None,
    as_json: Json = False,
) -> None:
    """Answer with a form: the text stands, the model fills the holes."""
    from clover.runtime.forms.command import fill_command

    options = {"threshold": threshold, "block_size": block_size, "coreset_top_p": coreset_top_p}
    load = {"max_context": max_context, "threads": threads, "provider": provider}
    filled = fill_command(bundle, prompt, template, schema, thinking, options, load)
    if as_json:
        show(filled)
    else:
        print(filled["text"])


@sentence_on_error
def decide(
    bundle: BundlePath,
    document: Annotated[Path, typer.Option(help="The file with the document; - reads standard input.")],
    question: Annotated[
        list[str], typer.Option(help="A question and its choices, name=true|false (repeatable, up to 8).")
    ],
    alone: Annotated[bool, typer.Option("--alone", help="Ask each question alone, for comparison.")] = False,
    threshold: Threshold = None,
    block_size: BlockSize = None,
    coreset_top_p: CoresetTopP = None,
    max_context: MaxContext = None,
    threads: Threads = None,
    provider: Provider = None,
    as_json: Json = False,
) -> None:
    """Answer questions on one document, all in one denoising."""
    from clover.runtime.forms.command import decide_command

    options = {"threshold": threshold, "block_size": block_size, "coreset_top_p": coreset_top_p}
    load = {"max_context": max_context, "threads": threads, "provider": provider}
    data, table = decide_command(bundle, document, question, not alone, options, load)
    show(data if as_json else table)


FORM_VERBS = (fill, decide)
