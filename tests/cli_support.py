"""The command line as a user types it, in this process."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from clover.cli import app


def clover(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def refused(result: Result) -> str:
    """The one sentence of a refusal, without the command's name."""
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert not result.stdout, "what failed prints nothing as its result"
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("clover: ") and line[-1] in ".?", line
    return line.removeprefix("clover: ")
