"""How well the residency policy keeps the right experts on the card, against LRU, static and ideal, on one trace.

python benchmarks/residency.py                              # made-up routing, full size, RTX 5070 Ti
python benchmarks/residency.py --skew 0 --topic 0           # no structure at all: nothing can help
python benchmarks/residency.py --trace routing.jsonl --json # routing recorded from a model
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from clover.engines.gpus import find_gpu, parse_size
from clover.engines.planner import FULL_SIZE, plan
from clover.engines.residency import ResidencySettings
from clover.engines.residency_simulator import (
    SyntheticSettings,
    outcomes_table,
    read_trace,
    simulate,
    synthetic_trace,
    write_trace,
)
from clover.exporter.precision import plan_precision
from clover.runtime.errors import CloverError

Settings = SyntheticSettings | ResidencySettings


def add_settings(parser: argparse.ArgumentParser, title: str, defaults: Settings) -> None:
    """One option per field of a settings dataclass."""
    group = parser.add_argument_group(title)
    for field in fields(defaults):
        value: Any = getattr(defaults, field.name)
        group.add_argument(f"--{field.name.replace('_', '-')}", type=type(value), default=value, help=f"({value})")


def chosen_settings(options: argparse.Namespace, defaults: Any) -> Any:
    return replace(defaults, **{f.name: getattr(options, f.name) for f in fields(defaults)})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="JSONL file of a model's routing (docs/planner.md); else made up")
    parser.add_argument("--save-trace", type=Path, help="write the trace that is replayed")
    parser.add_argument("--gpu", default="rtx-5070-ti", help="target whose link and memory count")
    parser.add_argument("--capacity", type=int, help="experts on the card (default: what the planner says)")
    parser.add_argument("--expert-bytes", type=int, help="bytes of one expert (default: full size, INT4)")
    parser.add_argument("--moved-per-block", default="256MiB", help="bytes the policy may move between two blocks")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_settings(parser, "made-up trace", SyntheticSettings())
    add_settings(parser, "policy", ResidencySettings())
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except CloverError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def run(options: argparse.Namespace) -> int:
    gpu = find_gpu(options.gpu)
    full = plan(FULL_SIZE, gpu, plan_precision(FULL_SIZE, "int4"))
    synthetic: SyntheticSettings = chosen_settings(options, SyntheticSettings())
    settings: ResidencySettings = chosen_settings(options, ResidencySettings())
    trace = read_trace(options.trace) if options.trace else synthetic_trace(synthetic)
    if options.save_trace:
        write_trace(options.save_trace, trace)
    expert_bytes = options.expert_bytes or full.weights.per_expert
    # The same share of the experts as the full-size model keeps, when the trace is of another size.
    share = full.placement.experts_resident / full.experts_total
    number = trace.layers * trace.experts
    capacity = int(share * number) if options.capacity is None else options.capacity
    moves = parse_size(options.moved_per_block, "--moved-per-block") // expert_bytes
    outcomes = simulate(trace, capacity, expert_bytes, moves, settings)
    if options.json:
        data = {
            "gpu": gpu.name,
            "link_gbs": gpu.link_gbs,
            "trace": str(options.trace) if options.trace else asdict(synthetic),
            "steps": len(trace.steps),
            "experts": number,
            "capacity": capacity,
            "expert_bytes": expert_bytes,
            "moves_per_block": moves,
            "settings": asdict(settings),
            "outcomes": [o.to_json() for o in outcomes],
        }
        print(json.dumps(data, indent=2))
        return 0
    from rich.console import Console

    console = Console()
    console.print(outcomes_table(outcomes, gpu.link_gbs))
    source = str(options.trace) if options.trace else "a made-up trace"
    console.print(
        f"{len(trace.steps)} steps of {source}; {capacity:,} of {number:,} experts on the card, {expert_bytes:,} B each; "
        f"at most {moves} moves a block; {gpu.link} at its peak."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
