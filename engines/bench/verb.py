"""`clover bench` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clover.runtime.errors import CloverError
from clover.runtime.terminal.verb import (
    Json,
    MaxContext,
    Provider,
    Threads,
    sentence_on_error,
    show,
)


@sentence_on_error
def bench(
    bundle: Annotated[Path | None, typer.Argument(help="A bundle made by `clover build`.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A prompt a line, or .jsonl (see `clover calibrate`); default three of our own."),
    ] = None,
    mode: Annotated[list[str] | None, typer.Option(help="A mode to measure (repeatable); default all.")] = None,
    threshold: Annotated[list[float] | None, typer.Option(help="A threshold to measure (repeatable).")] = None,
    block_size: Annotated[list[int] | None, typer.Option(help="A block size to measure (repeatable).")] = None,
    coreset_top_p: Annotated[list[float] | None, typer.Option(help="A coreset share to measure (repeatable).")] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Interleaved rounds over all prompts and settings.  [default: 3]")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest reply in tokens.")] = 128,
    experts: Annotated[
        bool | None,
        typer.Option(
            "--experts/--no-experts", help="Count experts in an untimed pass, for the roofline.  [default: yes]"
        ),
    ] = None,
    roofline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CARD",
            help="A card to say the most of (repeatable; see `clover gpus`).  [default: rtx-5070-ti, h200]",
        ),
    ] = None,
    max_context: MaxContext = None,
    threads: Threads = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(metavar="URL URL", help="Compare two servers by what they get right.")
    ] = None,
    cases: Annotated[Path | None, typer.Option(help="JSON lines: prompt, and exact, regex, json or script.")] = None,
    field_a: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE", help="Goes into requests to the first server, such as mode=fill (repeatable)."
        ),
    ] = None,
    field_b: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE", help="The same for the second (repeatable).")
    ] = None,
    runs: Annotated[int | None, typer.Option(help="Times each case is asked of each server.  [default: 1]")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait for an answer.  [default: 120]")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The comparison's .html report.")] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Where answers are written down; the same path goes on with a broken-off run.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key that both servers ask for.")] = None,
    provider: Provider = None,
    as_json: Json = False,
) -> None:
    """Measure a bundle in all its modes, or two servers by what they get right."""
    from clover.runtime.terminal.progress import Progress

    if compare is not None:
        from clover.engines.bench.comparison import compare_servers

        if bundle is not None:
            raise CloverError("--compare asks servers and a bundle is none; give one of them.")
        if cases is None:
            raise CloverError("--compare needs --cases; give a JSON lines file.")
        _refuse(
            "measures a bundle, and --compare asks servers; leave it out.",
            prompts=prompts,
            mode=mode,
            threshold=threshold,
            block_size=block_size,
            coreset_top_p=coreset_top_p,
            repeats=repeats,
            experts=experts,
            roofline=roofline,
            max_context=max_context,
            threads=threads,
            provider=provider,
        )
        with Progress("asking", " answers", quiet=as_json) as shown:
            told = compare_servers(
                compare,
                cases,
                ledger,
                out,
                runs=1 if runs is None else runs,
                timeout=120.0 if timeout is None else timeout,
                max_tokens=max_new_tokens,
                key=api_key,
                fields=(field_a or (), field_b or ()),
                progress=shown,
            )
        show(told[0] if as_json else told[1])
        return
    _refuse(
        "acts on a comparison; give --compare URL URL as well.",
        cases=cases,
        field_a=field_a,
        field_b=field_b,
        runs=runs,
        timeout=timeout,
        out=out,
        ledger=ledger,
        api_key=api_key,
    )
    if bundle is None:
        raise CloverError("bench needs a bundle, or --compare with two servers; give its path.")
    from clover.engines.bench.command import bench_engine
    from clover.engines.bench.tables import render

    with Progress("measuring", "", quiet=as_json, steady=True) as shown:
        result = bench_engine(
            bundle,
            prompts,
            {"max_context": max_context, "threads": threads, "provider": provider},
            modes=mode or (),
            thresholds=threshold or (),
            block_sizes=block_size or (),
            coreset_top_ps=coreset_top_p or (),
            repeats=3 if repeats is None else repeats,
            max_new_tokens=max_new_tokens,
            experts=experts is not False,
            cards=roofline or (),
            progress=shown,
        )
    show(result if as_json else render(result))


def _refuse(why: str, **given: object) -> None:
    """Refuses the first option that is given, by name."""
    for name, value in given.items():
        if value not in (None, []):
            raise CloverError(f"--{name.replace('_', '-')} {why}")
