"""The `clover` command: thin verbs, each importing what it needs when it runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from clover.runtime.errors import CloverError

P = ParamSpec("P")
R = TypeVar("R")

app = typer.Typer(
    name="clover",
    help="Compiler and small runtime for the Clover block-diffusion language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
BundlePath = Annotated[Path, typer.Argument(help="A bundle made by `clover build`.")]


def fail(message: str, code: int = 2) -> typer.Exit:
    """One sentence on stderr and an exit code."""
    print("clover:", " ".join(message.splitlines()), file=sys.stderr)
    return typer.Exit(code)


def sentence_on_error(verb: Callable[P, R]) -> Callable[P, R]:
    """A user's mistake becomes one sentence and exit code 2, never a traceback."""

    @wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return verb(*args, **kwargs)
        except CloverError as error:
            raise fail(str(error), error.exit_code) from None
        except KeyboardInterrupt:
            raise fail("interrupted.", 130) from None
        except MemoryError:
            raise fail("out of memory; close other programs or choose a smaller --max-context.") from None
        except BrokenPipeError:  # the reader of our output has left: nobody to tell
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise fail(
                f"{where}{error.strerror or error}; check the path, its permissions and the free space."
            ) from None

    return run


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def show(value: Any) -> None:
    """JSON data as JSON, anything else as rich draws it; a pipe gets lines as wide as they need."""
    if isinstance(value, dict | list):
        return print_json(value)
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(value)
    return None


@app.command()
@sentence_on_error
def build(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint directory, or org/name on the Hugging Face hub.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the bundle goes.")],
    gpu: Annotated[str, typer.Option(help="The target: `cpu`, or a card (see `clover gpus`).")] = "cpu",
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16, int8 or int4; per class: int4,lm_head=int8,embed=bf16.")
    ] = None,
    int4: Annotated[bool, typer.Option("--int4", help="Short for --precision int4.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Short for --precision bf16.")] = False,
    group_size: Annotated[int | None, typer.Option(help="Weights that share a scale: 128, 64 or 32.")] = None,
    block_size: Annotated[
        list[int] | None, typer.Option(help="Block sizes to serve (repeatable); default all.")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(help="Longest context in tokens; default the model's, on a GPU at most 8192.")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Replies a GPU engine decodes at once.")] = 1,
    resident_experts: Annotated[
        int | None, typer.Option(help="Most routed experts kept on the card; default as many as fit.")
    ] = None,
    reuse: Annotated[
        Path | None, typer.Option(help="A bundle of the same checkpoint and precision whose weights are taken over.")
    ] = None,
    with_logits: Annotated[
        bool, typer.Option("--with-logits", help="Also give logits out (for `clover logits`).")
    ] = False,
    exact_activations: Annotated[
        bool, typer.Option("--exact-activations", help="Integer weights meet float32 activations: slower, exact.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle that stands at the output path.")] = False,
    ignore_config_field: Annotated[
        list[str] | None, typer.Option(help="An unknown config.json field to disregard (repeatable).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn a checkpoint into a bundle for one target."""
    from clover.engines.build import BuildRequest, build_target
    from clover.exporter.precision import parse_precision
    from clover.exporter.source import resolve_source
    from clover.runtime.terminal.progress import Progress

    named = [*(["int4"] if int4 else []), *(["bf16"] if bf16 else []), *([] if precision is None else [precision])]
    if len(named) > 1:
        raise CloverError("--precision, --int4 and --bf16 exclude each other; give one.")
    base, overrides = parse_precision(named[0] if named else "int4")
    request = BuildRequest(
        checkpoint=resolve_source(checkpoint),
        out=out,
        target=gpu,
        precision=base,
        overrides=overrides,
        group_size=group_size,
        block_sizes=tuple(block_size or ()),
        max_context=max_context,
        with_logits=with_logits,
        exact_activations=exact_activations,
        replace=force,
        ignore_fields=tuple(ignore_config_field or ()),
        sequences=sequences,
        resident_experts=resident_experts,
        reuse=reuse,
    )
    with Progress("building", " weights", quiet=as_json) as progress:
        bundle = build_target(request, progress)
    if as_json:
        print_json(
            {
                "bundle": str(bundle.directory),
                "bytes": bundle.nbytes,
                "manifest": bundle.manifest.model_dump(mode="json"),
            }
        )
    else:
        print(f"{bundle.directory}: {bundle.nbytes / 1e6:.1f} MB, {bundle.manifest.target.name}, {base}")


@app.command()
@sentence_on_error
def run(
    bundle: BundlePath,
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads standard input.")],
    mode: Annotated[
        str | None, typer.Option(help="fill, autoregressive or self-speculative; default the bundle's.")
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="Fill positions whose probability exceeds this.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens developed at once.")] = None,
    coreset_top_p: Annotated[
        float | None, typer.Option(help="Share of router votes the block's experts cover.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest reply in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the smallest set of this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the best K tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Subtracted from logits of tokens in the reply.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Divides positive logits of tokens in the reply.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the reply at this text (repeatable).")] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="Template's enable_thinking.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the prompt as it is.")] = False,
    show_steps: Annotated[bool, typer.Option("--show-steps", help="Draw the block developing.")] = False,
    max_context: Annotated[int | None, typer.Option(help="Tokens of prompt and reply together.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default one a core.")] = None,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Keep weights packed for this CPU.")] = True,
    provider: Annotated[
        str | None, typer.Option(help="tensorrt, cpu or cuda; default the bundle's GPU engine, else the CPU.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer one prompt, streaming."""
    from clover.runtime.run_command import run_prompt

    options = {
        "mode": mode,
        "threshold": threshold,
        "block_size": block_size,
        "coreset_top_p": coreset_top_p,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty,
        "stop": tuple(stop) if stop else None,
    }
    load = {"max_context": max_context, "threads": threads, "cache": cache, "provider": provider}
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise CloverError(f"standard input is not UTF-8 text ({error}); convert it first.") from None
    run_prompt(bundle, text, options, load, raw=raw, thinking=thinking, show_steps=show_steps, as_json=as_json)


@app.command()
@sentence_on_error
def logits(
    bundle: BundlePath,
    block: Annotated[str, typer.Option(help="Token ids of the previewed block, masks included: 3,3,3,….")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The .npz file to write.")],
    prompt: Annotated[str, typer.Option(help="Token ids committed before it; may be empty.")] = "1,2,3",
    coreset_top_p: Annotated[
        float | None, typer.Option(help="Share of router votes the block's experts cover.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the raw logits of a prompt and a block to a file (needs a bundle built --with-logits)."""
    from clover.engines.logits import logits_command

    written = logits_command(bundle, prompt, block, out, coreset_top_p)
    if as_json:
        print_json(written)
    else:
        print(f"{out}: {written['prompt_tokens']} + {written['block_size']} rows of {written['vocab_size']} logits")


@app.command()
@sentence_on_error
def serve(
    bundle: BundlePath,
    host: Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one.  [default: 8000]")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Key that clients must send (repeatable).")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with such keys, one a line.")] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help="Listen beyond loopback without a key.")] = None,
    slots: Annotated[int | None, typer.Option(help="Replies developed at once.  [default: 4]")] = None,
    max_context: Annotated[int | None, typer.Option(help="Tokens of prompt and reply together.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default one a core.")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Requests that may wait.  [default: 64]")] = None,
    shared_rows: Annotated[
        int | None, typer.Option(help="Rows of each reply in a step they share; default by backend.")
    ] = None,
    cache_mb: Annotated[int | None, typer.Option(help="Memory for conversation states.  [default: 1024]")] = None,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds a request may take.  [default: 600]")] = None,
    max_body_mb: Annotated[int | None, typer.Option(help="Largest request.  [default: 8]")] = None,
    shutdown_grace: Annotated[
        float | None, typer.Option(help="Seconds that running replies get after SIGTERM.  [default: 30]")
    ] = None,
    model_name: Annotated[
        list[str] | None, typer.Option(help="Name clients ask for (repeatable); default the bundle's.")
    ] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="Web origin whose pages may call (repeatable).")] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Host name the server answers to (repeatable).")
    ] = None,
    log_prompts: Annotated[bool | None, typer.Option("--log-prompts", help="Write requests' text to the log.")] = None,
    cache: Annotated[bool | None, typer.Option("--cache/--no-cache", help="Keep weights packed for this CPU.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="clover.toml whose [serve] table has the same names as these flags.")
    ] = None,
) -> None:
    """Serve a bundle over the OpenAI and Anthropic APIs, with a chat page at /."""
    from clover.runtime.server.serve import serve_command

    flags = {
        "host": host,
        "port": port,
        "api_key": tuple(api_key or ()),
        "insecure": insecure,
        "slots": slots,
        "max_context": max_context,
        "threads": threads,
        "max_queue": max_queue,
        "shared_rows": shared_rows,
        "cache_mb": cache_mb,
        "request_timeout": request_timeout,
        "max_body_mb": max_body_mb,
        "shutdown_grace": shutdown_grace,
        "model_name": tuple(model_name or ()),
        "cors_origin": tuple(cors_origin or ()),
        "allowed_host": tuple(allowed_host or ()),
        "log_prompts": log_prompts,
        "cache": cache,
    }
    serve_command(bundle, config, api_key_file, flags)


@app.command()
@sentence_on_error
def validate(
    bundle: BundlePath,
    checkpoint: Annotated[
        Path | None, typer.Option(help="The checkpoint it was made from: compare with its weights as well.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Token ids to run; default random ones.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the random tokens.")] = 0,
    trace: Annotated[bool, typer.Option("--trace/--no-trace", help="Also follow a block token by token.")] = True,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default one a core.")] = None,
    as_json: Json = False,
) -> None:
    """Compare a bundle's engine with the NumPy reference, layer by layer; exit code 1 when a gate fails."""
    from clover.engines.validate.command import validate_command

    result = validate_command(bundle, checkpoint, prompt, seed, trace, threads)
    show(result.to_json() if as_json else result.render())
    if not result.passed:
        raise typer.Exit(1)


@app.command()
@sentence_on_error
def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint or a bundle.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="The checkpoint a bundle was made from: show what its precision costs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint or a bundle holds: parameters, precisions, bytes, options."""
    from clover.engines.inspect import inspect_path, render_inspection

    data = inspect_path(path, checkpoint)
    show(data if as_json else render_inspection(data))


@app.command()
@sentence_on_error
def doctor(as_json: Json = False) -> None:
    """Show what is installed, what can be built and run here, and what to install for the rest."""
    from clover.engines.doctor import diagnose, render_diagnosis

    data = diagnose()
    show(data if as_json else render_diagnosis(data))


@app.command()
@sentence_on_error
def gpus(as_json: Json = False) -> None:
    """List the targets that `--gpu` knows."""
    from clover.engines.gpus import gpus_table

    data, table = gpus_table()
    show(data if as_json else table)


@app.command()
@sentence_on_error
def plan(
    checkpoint: Annotated[Path | None, typer.Argument(help="A checkpoint; default the published model.")] = None,
    gpu: Annotated[str | None, typer.Option(help="The target: a card, auto or cpu.")] = None,
    sm: Annotated[str | None, typer.Option(help="Compute capability of any other card, with --memory.")] = None,
    memory: Annotated[str | None, typer.Option(help="Its memory, such as 16GiB.")] = None,
    precision: Annotated[str, typer.Option(help="As for `clover build`.")] = "int4",
    group_size: Annotated[int | None, typer.Option(help="Weights that share a scale: 128, 64 or 32.")] = None,
    max_context: Annotated[int, typer.Option(help="Tokens of context of every sequence.")] = 8192,
    sequences: Annotated[int, typer.Option(help="Sequences decoded at once.")] = 1,
    block_size: Annotated[list[int] | None, typer.Option(help="Block sizes (repeatable); default the model's.")] = None,
    backend: Annotated[str | None, typer.Option(help="tensorrt-rtx, tensorrt or onnxruntime.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="RAM of the machine, such as 64GiB.")] = None,
    resident_experts: Annotated[int | None, typer.Option(help="Experts to keep on the card.")] = None,
    distinct: Annotated[float | None, typer.Option(help="Measured experts a block touches in a layer.")] = None,
    hit_rate: Annotated[float | None, typer.Option(help="Measured share of touched experts on the card.")] = None,
    as_json: Json = False,
) -> None:
    """Say whether a model fits a target, and how fast it can be at most, before anything is built."""
    from clover.engines.planner import plan_command

    data, table = plan_command(
        checkpoint,
        gpu=gpu,
        sm=sm,
        memory=memory,
        precision=precision,
        group_size=group_size,
        max_context=max_context,
        sequences=sequences,
        block_sizes=tuple(block_size or ()),
        backend=backend,
        host_memory=host_memory,
        resident_experts=resident_experts,
        distinct=distinct,
        hit_rate=hit_rate,
    )
    show(data if as_json else table)
    if not data["fits"]:
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the `clover` command."""
    app()


if __name__ == "__main__":
    main()
