"""The verbs that look at models, bundles and machines; `clover.cli` puts them under `clover`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clover.runtime.terminal.verb import (
    BundlePath,
    CoresetTopP,
    Json,
    Threads,
    print_json,
    sentence_on_error,
    show,
)


@sentence_on_error
def logits(
    bundle: BundlePath,
    block: Annotated[str, typer.Option(help="Token ids of the previewed block, masks included: 3,3,3,….")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The .npz file to write.")],
    prompt: Annotated[str, typer.Option(help="Token ids committed before it; may be empty.")] = "1,2,3",
    coreset_top_p: CoresetTopP = None,
    as_json: Json = False,
) -> None:
    """Write the raw logits of a prompt and a block to a file (needs a bundle built --with-logits)."""
    from clover.engines.logits import logits_command

    written = logits_command(bundle, prompt, block, out, coreset_top_p)
    if as_json:
        print_json(written)
    else:
        print(f"{out}: {written['prompt_tokens']} + {written['block_size']} rows of {written['vocab_size']} logits")


@sentence_on_error
def validate(
    bundle: BundlePath,
    checkpoint: Annotated[
        str | None, typer.Option(help="The checkpoint it was made from: compare with its weights as well.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Token ids to run; default random ones.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Chooses the random tokens.  [default: 0]")] = None,
    trace: Annotated[
        bool | None, typer.Option("--trace/--no-trace", help="Also follow a block token by token.  [default: trace]")
    ] = None,
    threads: Threads = None,
    provider: Annotated[
        str | None, typer.Option(help="What runs the trace: tensorrt, cpu or cuda; default what the bundle is for.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a bundle's engine with the NumPy reference, layer by layer; exit code 1 when a gate fails.

    A GPU bundle's engine, kernels and layer list are checked first; without its card that is all that is done.
    """
    from clover.engines.validate.command import validate_command

    result = validate_command(bundle, checkpoint, prompt, seed, trace, threads, provider)
    show(result.to_json() if as_json else result.render())
    if not result.passed:
        raise typer.Exit(1)


@sentence_on_error
def inspect(
    path: Annotated[str, typer.Argument(help="A checkpoint (a directory, or org/name as it is cached) or a bundle.")],
    checkpoint: Annotated[
        str | None, typer.Option(help="The checkpoint a bundle was made from: show what its precision costs.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Hash each of a bundle's files again.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint or a bundle holds: parameters, precisions, bytes, options."""
    from clover.engines.inspect import inspect_path, render_inspection

    data = inspect_path(path, checkpoint, verify=verify)
    show(data if as_json else render_inspection(data))


@sentence_on_error
def doctor(as_json: Json = False) -> None:
    """Show what is installed, what can be built and run here, and what to install for the rest."""
    from clover.engines.doctor import diagnose, render_diagnosis

    data = diagnose()
    show(data if as_json else render_diagnosis(data))


@sentence_on_error
def gpus(as_json: Json = False) -> None:
    """List the targets that `--gpu` knows."""
    from clover.engines.gpus import gpus_table

    data, table = gpus_table()
    show(data if as_json else table)


@sentence_on_error
def plan(
    checkpoint: Annotated[
        str | None, typer.Argument(help="A checkpoint, as for `clover build`; default the published model.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="The target: a card, auto or cpu.")] = None,
    sm: Annotated[str | None, typer.Option(help="Compute capability of any other card, with --memory.")] = None,
    memory: Annotated[str | None, typer.Option(help="Its memory, such as 16GiB.")] = None,
    precision: Annotated[str | None, typer.Option(help="As for `clover build`.  [default: int4]")] = None,
    int4: Annotated[bool, typer.Option("--int4", help="Short for --precision int4.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Short for --precision bf16.")] = False,
    group_size: Annotated[int | None, typer.Option(help="Weights that share a scale: 128, 64 or 32.")] = None,
    max_context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of context of every sequence.  [default: 8192]")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Sequences decoded at once.")] = 1,
    block_size: Annotated[list[int] | None, typer.Option(help="Block sizes (repeatable); default the model's.")] = None,
    backend: Annotated[str | None, typer.Option(help="tensorrt-rtx, tensorrt or onnxruntime.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="RAM of the machine, such as 64GiB.")] = None,
    resident_experts: Annotated[int | None, typer.Option(help="Experts to keep on the card.")] = None,
    prefill_chunk: Annotated[int | None, typer.Option(help="Prompt rows of one run.  [default: 512]")] = None,
    block_skew: Annotated[float, typer.Option(help="Zipf exponent of how a block uses experts.")] = 1.0,
    popularity_skew: Annotated[float, typer.Option(help="The same of a whole conversation; 0 is the worst.")] = 0.0,
    distinct: Annotated[float | None, typer.Option(help="Measured experts a block touches in a layer.")] = None,
    hit_rate: Annotated[float | None, typer.Option(help="Measured share of touched experts on the card.")] = None,
    as_json: Json = False,
) -> None:
    """Say whether a model fits a target, and how fast it can be at most, before anything is built."""
    from clover.engines.planner import plan_command
    from clover.exporter.precision import check_integer_options, chosen_precision

    base, overrides = chosen_precision(precision, int4=int4, bf16=bf16)
    check_integer_options(base, overrides, group_size=group_size)
    data, table = plan_command(
        checkpoint,
        gpu=gpu,
        sm=sm,
        memory=memory,
        precision=base,
        overrides=overrides,
        group_size=group_size,
        max_context=max_context,
        sequences=sequences,
        block_sizes=tuple(block_size or ()),
        backend=backend,
        host_memory=host_memory,
        resident_experts=resident_experts,
        block_skew=block_skew,
        popularity_skew=popularity_skew,
        distinct=distinct,
        hit_rate=hit_rate,
        **({} if prefill_chunk is None else {"prefill_chunk": prefill_chunk}),
    )
    show(data if as_json else table)
    if not data["fits"]:
        raise typer.Exit(1)


VERBS = (inspect, validate, logits, plan, gpus, doctor)
