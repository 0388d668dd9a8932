"""`clover run`: one prompt, streamed to the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from clover.runtime.clover import Clover
from clover.runtime.decoder import StepEvent
from clover.runtime.errors import CloverError
from clover.runtime.reply import Reply, ReplyFinished, StreamItem
from clover.runtime.terminal.blocks import BlockView
from clover.runtime.text.stream_parser import ContentDelta, ReasoningDelta


def read_prompt(stream: TextIO | None) -> str:
    """The prompt on standard input, without the line end that `echo` adds.

    Raises CloverError when it is closed, empty or not UTF-8, whatever the locale.
    """
    try:
        text = "" if stream is None else stream.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CloverError(f"standard input is not UTF-8 text ({error}); convert it first.") from None
    if not text.strip():
        raise CloverError("standard input holds no prompt; pipe one into it, or give it in place of the dash.")
    return text.removesuffix("\n").removesuffix("\r")


def run_prompt(
    bundle: Path,
    prompt: str,
    options: Mapping[str, Any],
    load: Mapping[str, Any],
    *,
    raw: bool,
    thinking: bool | None,
    show_steps: bool,
    as_json: bool,
) -> None:
    """Loads the bundle and prints the reply as it develops; statistics go to stderr."""
    if raw and thinking is not None:
        option = "--thinking" if thinking else "--no-thinking"
        raise CloverError(f"{option} is for the chat template, which --raw leaves out; give one of them.")
    given = {k: v for k, v in options.items() if v is not None}
    with Clover.load(bundle, **load) as engine:
        if raw:
            stream = engine.stream_prompt(prompt, steps=show_steps, **given)
        else:
            messages = [{"role": "user", "content": prompt}]
            stream = engine.stream(messages, enable_thinking=thinking, steps=show_steps, **given)
        if as_json:
            print(json.dumps(reply_json(_finish(stream)), indent=1, ensure_ascii=False))
        else:
            _show(engine, stream, text_last=show_steps and sys.stdout.isatty())


def reply_json(reply: Reply) -> dict[str, Any]:
    """A reply as a JSON object."""
    return {
        "text": reply.text,
        "reasoning": reply.reasoning,
        "tool_calls": [asdict(call) for call in reply.tool_calls],
        "finish_reason": reply.finish_reason,
        "stop_string": reply.stop_string,
        "tokens": [t.id for t in reply.tokens],
        "statistics": reply.statistics.to_json(),
    }


def _finish(stream: Iterator[StreamItem]) -> Reply:
    return next(item.reply for item in stream if isinstance(item, ReplyFinished))


def _show(engine: Clover, stream: Iterator[StreamItem], *, text_last: bool) -> None:
    """Text as it is final; with `text_last` behind all steps, whose lines it would break up on the same terminal."""
    from rich.console import Console

    out, notes = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    decode = engine.tokenizer.decode if engine.tokenizer else (lambda ids, **_: " ".join(map(str, ids)))
    ends = engine.bundle.manifest.eos_token_ids
    view = BlockView(lambda token: decode([token], keep_control_tokens=True), ends)
    for item in _text_last(stream) if text_last else stream:
        if isinstance(item, StepEvent):
            notes.print(view.render(item))
        elif isinstance(item, ContentDelta):
            out.print(item.text, end="", markup=False)
        elif isinstance(item, ReasoningDelta):
            out.print(item.text, end="", markup=False, style="dim")
        elif isinstance(item, ReplyFinished):
            _show_end(out, notes, item.reply)
    sys.stdout.flush()


def _text_last(stream: Iterator[StreamItem]) -> Iterator[StreamItem]:
    kept: list[StreamItem] = []
    for item in stream:
        if isinstance(item, StepEvent):
            yield item
        else:
            kept.append(item)
    yield from kept


def _show_end(out: Any, notes: Any, reply: Reply) -> None:
    for call in reply.tool_calls:
        out.print(f"{call.name}({call.arguments}" + (")" if call.complete else " … incomplete"), markup=False)
    out.print()
    s = reply.statistics
    first = "-" if s.time_to_first_token is None else f"{1000 * s.time_to_first_token:.0f} ms"
    notes.print(
        f"{s.mode}: {s.response_tokens} tokens, {s.blocks} blocks, {s.steps} steps, {s.tokens_per_step:.1f} tokens/step, "
        f"{s.tokens_per_second:.0f} tokens/s, first token after {first}, ended by {reply.finish_reason}",
        style="dim",
    )
