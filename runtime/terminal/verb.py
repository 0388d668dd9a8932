"""What every verb of the command line shares: one sentence on errors, JSON or tables as results."""

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

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
BundlePath = Annotated[Path, typer.Argument(help="A bundle made by `clover build`.")]
Mode = Annotated[
    str | None, typer.Option(help="fill, autoregressive, self-speculative or adaptive; default the bundle's.")
]
Threshold = Annotated[float | None, typer.Option(help="Fill positions whose probability exceeds this.")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens developed at once.")]
CoresetTopP = Annotated[float | None, typer.Option(help="Share of router votes the block's experts cover.")]
MaxNewTokens = Annotated[int | None, typer.Option(help="Longest reply in tokens.")]
MaxContext = Annotated[int | None, typer.Option(help="Tokens of prompt and reply together.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default one a core.")]
Thinking = Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="Template's enable_thinking.")]
Raw = Annotated[bool, typer.Option("--raw", help="No chat template: continue the prompt as it is.")]
Provider = Annotated[
    str | None, typer.Option(help="tensorrt, cpu or cuda; default the bundle's GPU engine, else the CPU.")
]


def hold_standard_streams() -> None:
    """Opens the null device where a caller closed stdin, stdout or stderr.

    Else the next file opened, perhaps one of a bundle, would get its number, and what is printed could land there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


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
