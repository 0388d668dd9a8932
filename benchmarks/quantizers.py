"""What choosing scales wins: signal-to-noise ratio of INT4 weights with abs-max, searched and signed scales.

    python benchmarks/quantizers.py [--checkpoint DIR] [--group-size 64] [--json]

On the matrices of a checkpoint (default: examples/nano) and on random weights of ordinary, heavy and very heavy tails.
`signed` turns a group so that its largest weight lies on the longer side of -8…7; engines whose dequantisation refuses
negative scales can't take it, so the builds use `search`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.exporter.checkpoint import Checkpoint
from clover.exporter.precision import largest_group_size, plan_precision
from clover.exporter.quantize import dequantize_int4, quantize_int4
from clover.exporter.store_plan import store_plan
from clover.exporter.weights import row_blocks
from clover.runtime.errors import CloverError

NANO = Path(__file__).resolve().parent.parent / "examples" / "nano"
CASES: dict[str, dict[str, Any]] = {"abs-max": {"search": False}, "search": {}, "signed": {"signed_scales": True}}
RANDOM_SHAPE = (2048, 2048)


def random_weights() -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Normal numbers, and Student's t with 5 and 3 degrees of freedom: the fewer, the more outliers."""
    rng = np.random.default_rng(0)
    yield "normal", rng.standard_normal(RANDOM_SHAPE, np.float32)
    for degrees in (5, 3):
        yield f"Student's t, {degrees}", rng.standard_t(degrees, RANDOM_SHAPE).astype(np.float32)


def checkpoint_weights(directory: Path) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Every quantisable matrix by its tensor class, some rows at a time."""
    checkpoint = Checkpoint.open(directory)
    for item in store_plan(checkpoint.config, plan_precision(checkpoint.config, "int4")):
        if item.tensor_class:
            for _, block in row_blocks(checkpoint, item):
                yield item.tensor_class, block


def measure(weights: Iterator[tuple[str, npt.NDArray[np.float32]]], group_size: int) -> dict[str, dict[str, float]]:
    """SNR in dB by name and case: 10 log10(Σw² / Σ(w - q)²)."""
    signal: dict[str, float] = {}
    noise: dict[tuple[str, str], float] = {}
    for name, w in weights:
        signal[name] = signal.get(name, 0.0) + float((w.astype(np.float64) ** 2).sum())
        for case, options in CASES.items():
            restored = dequantize_int4(*quantize_int4(w, group_size, name=name, **options))
            error = float(((w.astype(np.float64) - restored) ** 2).sum())
            noise[name, case] = noise.get((name, case), 0.0) + error
    return {n: {case: float(10 * np.log10(s / noise[n, case])) for case in CASES} for n, s in signal.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=NANO, help="default: examples/nano")
    parser.add_argument("--group-size", type=int, help="default: the largest that divides the checkpoint's widths")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    try:
        config = Checkpoint.open(options.checkpoint).config
        group = options.group_size or largest_group_size(config) or 32
        found = {
            options.checkpoint.resolve().name: measure(checkpoint_weights(options.checkpoint), group),
            "random": measure(random_weights(), group),
        }
    except CloverError as error:
        print(f"quantizers: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"group_size": group, "snr_db": found}, indent=1))
        return 0
    print(f"| weights (groups of {group}) | {' | '.join(CASES)} |\n|---|{'---|' * len(CASES)}")
    for source, rows in found.items():
        for name, values in rows.items():
            print(f"| {source}: {name} | {' | '.join(f'{values[case]:.2f} dB' for case in CASES)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
