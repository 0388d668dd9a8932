"""What choosing scales wins: INT4 with abs-max, searched and signed scales, beside public quantisers.

    python benchmarks/quantizers.py [--checkpoint DIR] [--group-size 32 --group-size 128] [--json]
    python benchmarks/quantizers.py --against llmcompressor --against auto-round --against torchao --answers 200
    python benchmarks/quantizers.py --curve

Signal-to-noise ratio and CPU time on the matrices of a checkpoint (default: examples/nano) and on random weights of ordinary, heavy
and very heavy tails. `search` is what dense matrices get, `signed` what routed experts get: it turns a group so that its
largest weight lies on the longer side of -8…7, which TensorRT's dequantisation of dense matrices refuses.

--answers decodes that many held-out prompts of examples/nano per task, by threshold, with every quantisable matrix as
integers times scales, in float32, so that nothing but the quantiser differs; `clover` is what a build does.
--curve gives SNR and CPU time by the number of clip ranges that the search tries.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import public_quantizers as public  # beside this file

from clover.exporter import quantize
from clover.exporter.checkpoint import Checkpoint
from clover.exporter.precision import largest_group_size, plan_precision
from clover.exporter.quantize import dequantize_int4, quantize_int4
from clover.exporter.store_plan import store_plan
from clover.exporter.weights import row_blocks
from clover.runtime.errors import CloverError
from clover.runtime.terminal.progress import Progress

NANO = Path(__file__).resolve().parent.parent / "examples" / "nano"
RANDOM_SHAPE = (256, 2048)

Floats = npt.NDArray[np.float32]
Restore = Callable[[Floats, int], Floats]  # [N, K], group size -> the same after quantisation


def _ours(weight: Floats, group: int, search: bool = True, signed_scales: bool = False) -> Floats:
    return dequantize_int4(*quantize_int4(weight, group, search=search, signed_scales=signed_scales))


OURS: Mapping[str, Restore] = {
    "abs-max": partial(_ours, search=False),
    "search": _ours,
    "signed": partial(_ours, signed_scales=True),
}


def random_weights() -> Iterator[tuple[str, Floats]]:
    """Normal numbers, and Student's t with 5 and 3 degrees of freedom: the fewer, the more outliers."""
    rng = np.random.default_rng(0)
    yield "normal", rng.standard_normal(RANDOM_SHAPE, np.float32)
    for degrees in (5, 3):
        yield f"Student's t, {degrees}", rng.standard_t(degrees, RANDOM_SHAPE).astype(np.float32)


def checkpoint_weights(directory: Path, group: int) -> Iterator[tuple[str, Floats]]:
    """Every quantisable matrix of a width that `group` divides by its tensor class, some rows at a time."""
    checkpoint = Checkpoint.open(directory)
    for item in store_plan(checkpoint.config, plan_precision(checkpoint.config, "int4")):
        if item.tensor_class and item.shape[-1] % group == 0:
            for _, block in row_blocks(checkpoint, item):
                yield item.tensor_class, block


def measure(
    weights: Iterator[tuple[str, Floats]], cases: Mapping[str, Restore], group: int
) -> dict[str, dict[str, float]]:
    """SNR in dB by name and case: 10 log10(Σw² / Σ(w - q)²)."""
    signal: dict[str, float] = {}
    noise: dict[tuple[str, str], float] = {}
    for name, w in weights:
        signal[name] = signal.get(name, 0.0) + float((w.astype(np.float64) ** 2).sum())
        for case, restore in cases.items():
            error = float(((w.astype(np.float64) - restore(w, group)) ** 2).sum())
            noise[name, case] = noise.get((name, case), 0.0) + error
    return {n: {case: float(10 * np.log10(s / noise[n, case])) for case in cases} for n, s in signal.items()}


def quantised_copy(target: Path, restore: Callable[[str, Floats], Floats]) -> None:
    """examples/nano at `target`, every quantisable matrix as restore(tensor class, matrix), in float32."""
    from safetensors.numpy import save_file

    checkpoint = Checkpoint.open(NANO)
    plan = store_plan(checkpoint.config, plan_precision(checkpoint.config, "int4"))
    classes = {source: item.tensor_class for item in plan if item.tensor_class for source in item.sources}
    tensors = {}
    for name in checkpoint.names():
        tensor = checkpoint.read(name)
        if kind := classes.get(name):
            tensor = restore(kind, tensor.reshape(-1, tensor.shape[-1])).reshape(tensor.shape)
        tensors[name] = tensor
    target.mkdir()
    for path in (*NANO.glob("*.json"), *NANO.glob("*.jinja")):
        shutil.copy(path, target)
    save_file(tensors, target / "model.safetensors")


def answers(cases: Mapping[str, Restore], group: int, count: int, quiet: bool) -> dict[str, dict[str, float]]:
    """Share of exact answers by case and task, with nano's embedding, head and every matrix quantised."""
    import quality  # beside this file

    from clover import Clover
    from clover.engines.build import BuildRequest, build_target

    found: dict[str, dict[str, float]] = {}

    def for_all(restore: Restore) -> Callable[[str, Floats], Floats]:
        return lambda kind, w: restore(w, group)

    exact: dict[str, Callable[[str, Floats], Floats]] = {
        "float32": lambda kind, w: w,
        "clover": lambda kind, w: _ours(w, group, signed_scales=kind == "experts"),
        **{name: for_all(restore) for name, restore in cases.items()},
    }
    total, done = len(exact) * len(quality.TASKS) * count, 0
    with tempfile.TemporaryDirectory() as folder, Progress("answering", " prompts", quiet=quiet) as bar:
        for i, (name, restore) in enumerate(exact.items()):
            checkpoint, bundle = Path(folder) / f"checkpoint{i}", Path(folder) / f"bundle{i}"
            quantised_copy(checkpoint, restore)
            build_target(BuildRequest(checkpoint, bundle, precision="fp32"))
            with Clover.load(bundle) as engine:
                for task in quality.TASKS:

                    def tick(task: str) -> None:
                        nonlocal done
                        done += 1
                        bar(task, done, total)

                    result = quality.score(engine, task, count, tick, mode="fill")
                    found.setdefault(name, {})[task] = result.share
    return found


def curve(group: int) -> list[dict[str, Any]]:
    """SNR on normal weights and CPU nanoseconds a weight, by how many levels the search tries beside abs-max / 7."""
    import ml_dtypes

    weight = np.random.default_rng(0).standard_normal(RANDOM_SHAPE, np.float32)
    low = weight.astype(ml_dtypes.bfloat16)
    kept, rows = quantize.INT4, []
    grid = np.linspace(7.4, 10.6, 17).tolist()
    ours = tuple(kept.levels[group])
    sets = {"none": (), "1": (8.2,), "2": (ours[0], ours[2]), "3, as built": ours, "17": tuple(grid)}
    try:
        for name, levels in sets.items():
            quantize.INT4 = replace(kept, levels={group: levels})
            search = name != "none"
            seconds = min(_cpu_seconds(partial(quantize_int4, low, group, search=search)) for _ in range(7))
            snr = measure(iter([("normal", weight)]), {"": partial(_ours, search=search)}, group)["normal"][""]
            rows.append({"levels": name, "snr_db": snr, "cpu_ns_per_weight": 1e9 * seconds / weight.size})
    finally:
        quantize.INT4 = kept
    return rows


def cost(cases: Mapping[str, Restore], group: int) -> dict[str, float]:
    """CPU nanoseconds a weight, all threads together, for quantising and restoring normal weights in memory."""
    weight = next(random_weights())[1]
    found = {}
    for name, restore in cases.items():
        restore(weight[:8], group)  # imports and compiles what it needs
        start = time.process_time()
        restore(weight, group)
        found[name] = 1e9 * (time.process_time() - start) / weight.size
    return found


def _cpu_seconds(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=NANO, help="default: examples/nano")
    parser.add_argument(
        "--group-size", type=int, action="append", help="default: the largest for the checkpoint's widths"
    )
    parser.add_argument(
        "--against", action="append", choices=public.PACKAGES, help="a package to compare with; repeatable"
    )
    parser.add_argument(
        "--answers", type=int, metavar="N", help="also decode N held-out prompts of each of nano's tasks"
    )
    parser.add_argument("--curve", action="store_true", help="only SNR and CPU time by number of clip ranges")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    try:
        groups = options.group_size or [largest_group_size(Checkpoint.open(options.checkpoint).config) or 32]
        if options.curve:
            print_curve({group: curve(group) for group in groups}, options.json)
            return 0
        versions = {package: public.version(package) for package in options.against or ()}
        cases = dict(OURS)
        for name, (package, _) in public.PUBLIC.items():
            if package in versions:
                cases[name] = partial(public.restore, name)
        snr = {
            group: {
                options.checkpoint.resolve().name: measure(checkpoint_weights(options.checkpoint, group), cases, group),
                "random": measure(random_weights(), cases, group),
            }
            for group in groups
        }
        costs = {group: cost(cases, group) for group in groups}
        exact = {group: answers(cases, group, options.answers, options.json) for group in groups if options.answers}
    except CloverError as error:
        print(f"quantizers: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"versions": versions, "snr_db": snr, "cpu_ns": costs, "exact": exact}, indent=1))
        return 0
    for package, installed in versions.items():
        print(f"{package} {installed}")
    for group, sources in snr.items():
        columns = [(source, name) for source, rows in sources.items() for name in rows]
        heads = " | ".join(f"{source}: {name}" for source, name in columns)
        print(f"\n| dB, groups of {group} | {heads} | CPU, a weight |\n|---|---|{'---|' * len(columns)}")
        for case in cases:
            values = " | ".join(f"{sources[source][name][case]:.2f}" for source, name in columns)
            print(f"| {case} | {values} | {costs[group][case]:.0f} ns |")
    for group, by_case in exact.items():
        tasks = list(next(iter(by_case.values())))
        print(f"\n| exact answers, groups of {group} | {' | '.join(tasks)} |\n|---|{'---|' * len(tasks)}")
        for case, shares in by_case.items():
            print(f"| {case} | {' | '.join(f'{100 * shares[task]:.1f} %' for task in tasks)} |")
    return 0


def print_curve(found: Mapping[int, list[dict[str, Any]]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=1))
        return
    print("| group | levels beside abs-max / 7 | SNR, normal weights | CPU, a weight |\n|---|---|---|---|")
    for group, rows in found.items():
        for row in rows:
            print(f"| {group} | {row['levels']} | {row['snr_db']:.2f} dB | {row['cpu_ns_per_weight']:.1f} ns |")


if __name__ == "__main__":
    sys.exit(main())
