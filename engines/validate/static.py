"""A GPU bundle's validation where its engine can't run: what can be checked without a card, and what was not."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover.engines.bundle import Bundle
from clover.engines.tensorrt.checks import Check, static_checks
from clover.engines.tensorrt.machine import detected_cards
from clover.runtime.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

CARD = "card here"
STYLES = {"passed": "green", "failed": "red", "not checked": "yellow"}


@dataclass(frozen=True)
class StaticValidation:
    """The checks of a GPU bundle whose numbers were not compared."""

    bundle: Bundle
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether no check failed; what could not be checked does not count."""
        return not any(c.verdict == "failed" for c in self.checks)

    @property
    def numbers(self) -> str:
        """What was not compared, and the commands that do it."""
        target, where = self.bundle.manifest.target, shlex.quote(str(self.bundle.directory))
        why = next((c.found for c in self.checks if c.name == CARD and c.verdict == "not checked"), None)
        reason = "for want of a card" if why else "since a check failed"
        return (
            f"Numbers were not compared, {reason}. On a machine with an SM {target.sm} card ({target.name}), "
            f"`clover validate {where}` runs the engine as well; `clover validate {where} --provider cpu` compares the same "
            "model's graph in ONNX Runtime here."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "bundle": str(self.bundle.directory),
            "passed": self.passed,
            "checks": [c.to_json() for c in self.checks],
            "numbers_compared": False,
            "numbers": self.numbers,
            "comparisons": [],
        }

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        manifest = self.bundle.manifest
        title = f"{manifest.model.name}, {manifest.precision_plan.name}, {manifest.target.name}"
        failed = sum(c.verdict == "failed" for c in self.checks)
        verdict = f"FAILED: {failed} of {len(self.checks)} checks." if failed else "passed, as far as it was checked."
        return Group(
            checks_table(title, self.checks),
            Text(verdict, style="red" if failed else "green"),
            Text(self.numbers, style="yellow"),
        )


def checks_table(title: str, checks: list[Check]) -> RenderableType:
    """One line for each check: what was found, and the verdict."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for c in checks:
        table.add_row(c.name, Text(c.found), Text(c.verdict, style=STYLES[c.verdict]))
    return table


def check_gpu_bundle(bundle: Bundle) -> tuple[list[Check], bool]:
    """The static checks of a bundle, which need not be verified, and whether its engine can run here."""
    checks = static_checks(bundle, detected_cards())
    return checks, all(c.verdict == "passed" for c in checks)


def refuse_options(given: Mapping[str, Any], directory: Path) -> None:
    """Raises RequestError for an option of the comparison of numbers: given (option: value, None where it was not)."""
    for option, value in given.items():
        if value is not None:
            raise RequestError(
                option.lstrip("-"),
                f"{option} is for comparing numbers, and this machine can't run the engine of {directory}; leave it out, or "
                "add --provider cpu to compare the model's graph in ONNX Runtime.",
            )
