"""The `clover` command: thin verbs, each importing what it needs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from clover.engines.bench.verb import bench
from clover.engines.calibrate.verb import calibrate
from clover.engines.commands import VERBS
from clover.engines.trace.verb import trace
from clover.runtime.errors import CloverError
from clover.runtime.forms.verbs import FORM_VERBS
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
    Thinking,
    Threads,
    Threshold,
    hold_standard_streams,
    print_json,
    sentence_on_error,
)

app = typer.Typer(
    name="clover",
    help="Compiler and small runtime for the Clover block-diffusion language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
@sentence_on_error
def build(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint directory, or org/name on the Hugging Face hub.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the bundle goes.")],
    gpu: Annotated[
        str | None, typer.Option(help="The target: `cpu` (default), `auto`, or a card (see `clover gpus`).")
    ] = None,
    sm: Annotated[str | None, typer.Option(help="With --memory: a card that is not in the table, such as 120.")] = None,
    memory: Annotated[str | None, typer.Option(help="Its memory, such as 16GiB.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16, int8 or int4; per class: int4,lm_head=int8,embed=bf16.")
    ] = None,
    int4: Annotated[bool, typer.Option("--int4", help="Short for --precision int4.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Short for --precision bf16.")] = False,
    group_size: Annotated[int | None, typer.Option(help="Weights that share a scale: 128, 64 or 32.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="A file of `clover calibrate`: INT4 scales that weigh errors by its inputs.")
    ] = None,
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
    host_memory: Annotated[
        str | None, typer.Option(help="RAM of the machine with the card, such as 64GiB; default 32GiB.")
    ] = None,
    reuse: Annotated[
        Path | None, typer.Option(help="A bundle of the same checkpoint and precision whose weights are taken over.")
    ] = None,
    with_logits: Annotated[
        bool, typer.Option("--with-logits", help="Also give logits out (for `clover logits`).")
    ] = False,
    exact_activations: Annotated[
        bool | None,
        typer.Option(
            "--exact-activations/--fast-activations",
            help="Integer weights meet float32 or 8-bit activations; default 8-bit for wide models, which it speeds up.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle that stands at the output path.")] = False,
    ignore_config_field: Annotated[
        list[str] | None, typer.Option(help="An unknown config.json field to disregard (repeatable).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn a checkpoint into a bundle for one target."""
    from clover.engines.build import BuildRequest, build_target
    from clover.exporter.precision import check_integer_options, chosen_precision
    from clover.exporter.source import resolve_source
    from clover.runtime.terminal.progress import Progress

    base, overrides = chosen_precision(precision, int4=int4, bf16=bf16)
    check_integer_options(base, overrides, group_size=group_size, calibration=calibration)
    check_integer_options(
        base,
        overrides,
        **{"fast_activations" if exact_activations is False else "exact_activations": exact_activations},
    )
    request = BuildRequest(
        checkpoint=resolve_source(checkpoint),
        out=out,
        target=gpu,
        sm=sm,
        memory=memory,
        precision=base,
        overrides=overrides,
        group_size=group_size,
        calibration=calibration,
        block_sizes=tuple(block_size or ()),
        max_context=max_context,
        with_logits=with_logits,
        exact_activations=exact_activations,
        replace=force,
        ignore_fields=tuple(ignore_config_field or ()),
        sequences=sequences,
        resident_experts=resident_experts,
        host_memory=host_memory,
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
        shown = ", ".join([base, *(f"{kind} {value}" for kind, value in overrides.items())])
        print(f"{bundle.directory}: {bundle.nbytes / 1e6:.1f} MB, {bundle.manifest.target.name}, {shown}")


@app.command()
@sentence_on_error
def run(
    bundle: BundlePath,
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads standard input.")],
    mode: Mode = None,
    threshold: Threshold = None,
    block_size: BlockSize = None,
    coreset_top_p: CoresetTopP = None,
    max_new_tokens: MaxNewTokens = None,
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
    length_ramp: Annotated[
        str | None, typer.Option(help="off, or START:STOP:MAX_BIAS: raises the ending tokens of very long replies.")
    ] = None,
    thinking: Thinking = None,
    raw: Raw = False,
    show_steps: Annotated[bool, typer.Option("--show-steps", help="Draw the block developing.")] = False,
    max_context: MaxContext = None,
    threads: Threads = None,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Keep weights packed for this CPU.")] = True,
    provider: Provider = None,
    as_json: Json = False,
) -> None:
    """Answer one prompt, streaming."""
    from clover.runtime.run_command import read_prompt, run_prompt

    if show_steps and as_json:
        raise CloverError("--show-steps draws for a reader and --json prints one object; give one of them.")
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
        "length_ramp": length_ramp,
    }
    load = {"max_context": max_context, "threads": threads, "cache": cache, "provider": provider}
    text = read_prompt(sys.stdin) if prompt == "-" else prompt
    run_prompt(bundle, text, options, load, raw=raw, thinking=thinking, show_steps=show_steps, as_json=as_json)


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
    max_context: MaxContext = None,
    threads: Threads = None,
    provider: Provider = None,
    max_queue: Annotated[int | None, typer.Option(help="Requests that may wait.  [default: 64]")] = None,
    shared_rows: Annotated[
        int | None, typer.Option(help="Rows of each reply in a step they share; default by backend.")
    ] = None,
    cache_mb: Annotated[int | None, typer.Option(help="Memory for conversation states.  [default: 2048]")] = None,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds a request may take.  [default: 600]")] = None,
    client_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds a client may take to send a request, or to take its reply.  [default: 30]"),
    ] = None,
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
        "provider": provider,
        "max_queue": max_queue,
        "shared_rows": shared_rows,
        "cache_mb": cache_mb,
        "request_timeout": request_timeout,
        "client_timeout": client_timeout,
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
def cache(
    bundle: BundlePath,
    clear: Annotated[bool, typer.Option("--clear", help="Remove them; the next load packs them again.")] = False,
    as_json: Json = False,
) -> None:
    """List the weights kept packed for CPUs, or remove them."""
    from clover.engines.bundle import Bundle
    from clover.engines.cpu_cache import cache_entries, clear_cache

    opened = Bundle.open(bundle, verify=False)
    entries = cache_entries(opened)
    freed = clear_cache(opened) if clear else 0
    if as_json:
        kept = [{**vars(e), "directory": str(e.directory)} for e in entries]
        print_json({"entries": [] if clear else kept, "freed": freed})
    elif clear:
        print(f"{bundle}: {freed / 1e6:.1f} MB freed")
    else:
        for e in entries:
            use = "this machine" if e.current else "not used here"
            print(f"{e.directory}: {e.nbytes / 1e6:.1f} MB, {e.cpu}, onnxruntime {e.onnxruntime}, {use}")
        if not entries:
            print(f"{bundle}: no packed weights are kept")


for verb in (*FORM_VERBS, *VERBS, calibrate, bench, trace):
    app.command()(verb)


def main() -> None:
    """Entry point of the `clover` command."""
    hold_standard_streams()
    app()


if __name__ == "__main__":
    main()
