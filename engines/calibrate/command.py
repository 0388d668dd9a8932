"""`clover calibrate`: runs the prompts, writes the file and says which experts never answered."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover.engines.bundle import Bundle
from clover.engines.calibrate.record import Progress, Recording, record
from clover.engines.lock import exclusive
from clover.engines.open import check_threads
from clover.engines.prompts import read_prompts
from clover.exporter.calibration import LEAST_ROWS
from clover.runtime.errors import CloverError, RequestError
from clover.runtime.terminal.output import check_out

if TYPE_CHECKING:
    from rich.console import RenderableType

LISTED = 12  # experts that a line of the table names


def calibrate_command(
    bundle: Path,
    prompts: Path,
    out: Path,
    *,
    mode: str,
    max_new_tokens: int,
    threads: int | None,
    force: bool,
    progress: Progress,
) -> dict[str, Any]:
    """Writes `out` and returns what was found as JSON data. Raises CloverError with nothing half-written."""
    check_out(out)
    if out.exists() and not force:
        raise CloverError(f"--out {out} already exists; give another path or --force to replace it.")
    if max_new_tokens < 1:
        raise RequestError("max_new_tokens", f"--max-new-tokens is {max_new_tokens}; it must be at least 1.")
    check_threads(threads)
    chats = read_prompts(prompts)
    with exclusive(out.with_name(f".{out.name}.lock"), f"another calibration is writing {out}; wait for it."):
        opened = Bundle.open(bundle)
        try:
            found = record(
                opened,
                chats,
                out,
                mode=mode,
                max_new_tokens=max_new_tokens,
                threads=threads,
                progress=progress,
            )
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise CloverError(
                f"--out {out} can't be written ({error.strerror}); make room or give another path."
            ) from None
    return describe(found, out)


def describe(found: Recording, out: Path) -> dict[str, Any]:
    """The result of a run as JSON data: rows seen, and of every layer the experts that were never or rarely hit."""
    calibration = found.calibration
    layers = []
    for layer in range(sum(name.endswith("experts.gate_up") for name in calibration.statistics)):
        counts = calibration.statistics[f"layers.{layer}.experts.gate_up"].count
        layers.append(
            {
                "layer": layer,
                "experts": len(counts),
                "rows": [int(n) for n in counts],
                "never": [e for e, n in enumerate(counts) if n == 0],
                "rare": [e for e in calibration.rare_experts(layer) if counts[e]],
            }
        )
    return {
        "out": str(out),
        "sha256": calibration.sha256,
        "checkpoint": calibration.checkpoint,
        "recorded": dict(calibration.recorded),
        "least_rows": LEAST_ROWS,
        "layers": layers,
        "seconds": round(found.seconds, 1),
        "resumed_after_prompts": found.resumed,
    }


def render(data: dict[str, Any]) -> RenderableType:
    """A table of layers, and the totals under it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("layer", justify="right")
    for heading in ("rows an expert: least", "median", "most"):
        table.add_column(heading, justify="right")
    table.add_column("never hit")
    table.add_column(f"under {data['least_rows']} rows")
    for x in data["layers"]:
        rows = sorted(x["rows"])
        spread = (rows[0], rows[len(rows) // 2], rows[-1])
        table.add_row(str(x["layer"]), *(f"{n:,}" for n in spread), _some(x["never"]), _some(x["rare"]))
    recorded, rows = data["recorded"], data["recorded"]["rows"]
    never, rare = (sum(len(x[kind]) for x in data["layers"]) for kind in ("never", "rare"))
    resumed = f", going on after {data['resumed_after_prompts']}" if data["resumed_after_prompts"] else ""
    lines = [
        f"{data['out']}: {recorded['prompts']} prompts{resumed}, {rows['commit']:,} rows committed and {rows['preview']:,} previewed, "
        f"{data['seconds']:.1f} s",
        f"{never} experts were never hit and {rare} by fewer than {data['least_rows']} rows; these keep the weight-only "
        "search, and more or other prompts would reach them."
        if never or rare
        else "Every expert was hit often enough.",
    ]
    return Group(table, *map(Text, lines))


def _some(experts: list[int]) -> str:
    more = f" … ({len(experts)})" if len(experts) > LISTED else ""
    return ", ".join(map(str, experts[:LISTED])) + more
