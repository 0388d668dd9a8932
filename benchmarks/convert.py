"""How fast a checkpoint becomes an INT4 weight store, against the machine's disk, the quantiser alone, and a plain loop.

    python benchmarks/convert.py --checkpoint DIR           # of any size; or a random one at full width:
    python benchmarks/convert.py --layers 4 --out /big/disk

Measured in one run, each in a process of its own and with the checkpoint dropped from the page cache:
`conversion`, exporter.weights.write_weights as `clover build` calls it; `kernel`, the quantiser on numbers in memory,
a thread a core; `disk`, large sequential reads, and writes with fsync, in the same places; `plain loop`, torch,
tensor by tensor, abs-max / 7, no search, one process; `search loop`, the same with the search that our conversion does,
written plainly. Parameters a second and the ratios that the project aims at. CPU seconds stand beside the wall clock,
since on a busy machine only those say what the work costs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from clover.runtime.errors import CloverError

DISK_BYTES = 2 * 10**9
PIECE = 8 * 2**20
GROUP = 128
KERNEL_WEIGHTS = 2**21  # one expert's fused projection
LEAST_OF_LIMIT = 0.7  # what the project aims at: part of the slower of disk and kernel
LEAST_OF_PLAIN = 5.0  # times the plain loop
MOST_RSS = 3e9
CASES = ("disk", "kernel", "conversion", "plain", "search")  # each in a process of its own
LOOPS = {"plain": "plain loop", "search": "search loop"}

Result = dict[str, Any]


class Meter:
    """Wall clock and CPU seconds of this process since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> Result:
        return {"seconds": time.perf_counter() - self._wall, "cpu_seconds": time.process_time() - self._cpu}


def peak_rss() -> int:
    """Bytes. Not `ru_maxrss` where there is better: a child's begins with its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def drop_from_cache(paths: list[Path]) -> None:
    """Asks the system to forget the files' pages, so that reads are the disk's."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def shards(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.safetensors"))


def measure_disk(checkpoint: Path, out: Path) -> Result:
    """Bytes a second: sequential reads of the checkpoint, and fsynced writes beside the output."""
    drop_from_cache(shards(checkpoint))
    meter, done = Meter(), 0
    buffer = bytearray(PIECE)
    for path in shards(checkpoint):
        with path.open("rb", buffering=0) as file:
            while done < DISK_BYTES and (count := file.readinto(buffer)):
                done += count
    read = meter.read() | {"bytes": done}
    noise = np.random.default_rng(0).integers(0, 256, PIECE, np.uint8).data
    with tempfile.NamedTemporaryFile(dir=out, buffering=0) as target:
        meter = Meter()
        for _ in range(DISK_BYTES // PIECE):
            target.write(noise)
        os.fsync(target.fileno())
        write = meter.read() | {"bytes": DISK_BYTES // PIECE * PIECE}
    return {
        "read_bytes_per_second": read["bytes"] / read["seconds"],
        "write_bytes_per_second": write["bytes"] / write["seconds"],
        "read": read,
        "write": write,
    }


def measure_kernel() -> Result:
    """The quantiser alone, a thread a core, on bfloat16 in memory."""
    import ml_dtypes

    from clover.exporter.quantize import quantize_int4

    normal = np.random.default_rng(0).standard_normal((KERNEL_WEIGHTS // 2048, 2048), np.float32)
    weight = normal.astype(ml_dtypes.bfloat16)
    quantise = partial(quantize_int4, group_size=GROUP, signed_scales=True)  # as most weights are, routed experts'
    threads, rounds = os.cpu_count() or 1, 160
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(quantise, [weight] * threads))
        meter = Meter()
        list(pool.map(quantise, [weight] * rounds))
        return _rate(meter.read(), rounds * weight.size) | {"threads": threads}


def measure_conversion(checkpoint: Path, out: Path) -> Result:
    """write_weights of every tensor, hashed and fsynced."""
    from clover.exporter.checkpoint import Checkpoint
    from clover.exporter.precision import plan_precision
    from clover.exporter.store_plan import store_plan
    from clover.exporter.weights import write_weights

    drop_from_cache(shards(checkpoint))
    meter = Meter()
    source = Checkpoint.open(checkpoint)
    items = store_plan(source.config, plan_precision(source.config, "int4"))
    with tempfile.TemporaryDirectory(dir=out, prefix=".convert-") as folder:
        files = write_weights(source, items, Path(folder))
        found = meter.read()
        written = sum((Path(folder) / name).stat().st_size for name in files)
    weights = sum(int(np.prod(item.shape)) for item in items)
    read = sum(path.stat().st_size for path in shards(checkpoint))
    return _rate(found, weights) | {
        "layers": source.config.num_hidden_layers,
        "bytes_read": read,
        "bytes_written": written,
        "bytes_per_second": (read + written) / found["seconds"],
        "peak_rss": peak_rss(),
        "system_seconds": resource.getrusage(resource.RUSAGE_SELF).ru_stime,
        "sha256": files,
    }


def measure_plain_loop(checkpoint: Path, out: Path, most: int, search: bool = False) -> Result:
    """What one would write first: each matrix to float32, abs-max by group, rounded, packed, saved. Stops after `most`.

    With `search` each group gets the scale of least squared error among those of as many starts as our search has.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from clover.exporter.quantize import INT4

    def searched(groups: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        best, least = largest / 7, torch.full_like(largest, torch.inf)
        for level in (7.0, *INT4.levels[GROUP]):
            q = torch.round(groups * (level / largest.clamp(min=1e-30))).clamp(-8, 7)
            scales = (groups * q).sum(1, keepdim=True) / (q * q).sum(1, keepdim=True).clamp(min=1)
            error = (groups - q * scales).square().sum(1, keepdim=True)
            best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
        return best

    def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups = weight.float().reshape(-1, GROUP)
        largest = groups.abs().amax(dim=1, keepdim=True)
        scales = searched(groups, largest) if search else largest / 7
        values = (torch.round(groups / scales.clamp(min=1e-30)).clamp(-8, 7) + 8).to(torch.uint8)
        return values[:, 0::2] | (values[:, 1::2] << 4), scales

    drop_from_cache(shards(checkpoint))
    weights, written, meter = 0, 0, Meter()
    with tempfile.TemporaryDirectory(dir=out, prefix=".convert-") as folder:
        for shard in shards(checkpoint):
            with safe_open(shard, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    if weights >= most:
                        break
                    tensor = file.get_tensor(name)
                    result: dict[str, torch.Tensor] = {name: tensor}
                    if tensor.dim() == 3 and tensor.shape[-1] % GROUP == 0:  # an expert at a time, or it needs 10 GB
                        parts = [quantise(expert) for expert in tensor]
                        result = {"q": torch.stack([q for q, _ in parts]), "s": torch.stack([s for _, s in parts])}
                    elif tensor.dim() == 2 and tensor.shape[-1] % GROUP == 0:
                        result["q"], result["s"] = quantise(result.pop(name))
                    path = Path(folder) / f"{written}.safetensors"
                    save_file({key: t.contiguous() for key, t in result.items()}, path)
                    with path.open("rb+") as saved:
                        os.fsync(saved.fileno())
                    weights += tensor.numel()
                    written += 1
        found = meter.read()
    return _rate(found, weights) | {"peak_rss": peak_rss()}


def _rate(found: Result, weights: int) -> Result:
    return found | {
        "weights": weights,
        "weights_per_second": weights / found["seconds"],
        "weights_per_cpu_second": weights / found["cpu_seconds"],
    }


def summarise(disk: Result, kernel: Result, conversion: Result, plain: Result, search: Result) -> Result:
    """Ratios. In wall time the slower of kernel and disk (reading and writing by turns) is the limit; in CPU time, both."""
    weights = conversion["weights"]
    read = conversion["bytes_read"] / disk["read_bytes_per_second"]
    write = conversion["bytes_written"] / disk["write_bytes_per_second"]
    limits = {"disk": weights / (read + write), "kernel": kernel["weights_per_second"]}
    cpu = weights / kernel["weights_per_cpu_second"]
    for kind, done in (("read", conversion["bytes_read"]), ("write", conversion["bytes_written"])):
        cpu += disk[kind]["cpu_seconds"] * done / disk[kind]["bytes"]
    slower = min(limits, key=lambda name: limits[name])
    return {
        "disk_weights_per_second": limits["disk"],
        "limit": slower,
        "of_limit": conversion["weights_per_second"] / limits[slower],
        "of_limit_cpu": cpu / conversion["cpu_seconds"],
        "of_plain_loop": conversion["weights_per_second"] / plain["weights_per_second"],
        "of_plain_loop_cpu": conversion["weights_per_cpu_second"] / plain["weights_per_cpu_second"],
        "of_search_loop": conversion["weights_per_second"] / search["weights_per_second"],
        "of_search_loop_cpu": conversion["weights_per_cpu_second"] / search["weights_per_cpu_second"],
    }


def run(checkpoint: Path, out: Path, most: int) -> Result:
    """Every case in a process of its own."""

    def case(name: str) -> Result:
        command = [sys.executable, __file__, "--checkpoint", str(checkpoint), "--out", str(out), "--case", name]
        done = subprocess.run([*command, "--plain-weights", str(most)], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise CloverError(f"measuring {name} failed.")
        found: Result = json.loads(done.stdout)
        return found

    load = os.getloadavg()[0]
    found = {name: case(name) for name in CASES}
    summary = summarise(*(found[name] for name in CASES))
    return {"checkpoint": str(checkpoint), "cores": os.cpu_count(), "load_before": load, **found, "ratios": summary}


def print_table(result: Result) -> None:
    c, ratios, disk = result["conversion"], result["ratios"], result["disk"]
    print(
        f"{c['layers']} layers, {c['weights'] / 1e9:.2f} G weights, {result['cores']} cores (load {result['load_before']:.1f})"
    )
    print(f"{'':14}{'M weights/s':>12}{'a CPU second':>14}{'wall s':>9}{'CPU s':>9}")
    for name in ("conversion", "kernel", "plain", "search"):
        r = result[name]
        print(
            f"{LOOPS.get(name, name):14}{r['weights_per_second'] / 1e6:12.0f}{r['weights_per_cpu_second'] / 1e6:14.0f}"
            f"{r['seconds']:9.1f}{r['cpu_seconds']:9.1f}"
        )
    print(f"{'disk':14}{ratios['disk_weights_per_second'] / 1e6:12.0f}")
    print(
        f"disk: reads {disk['read_bytes_per_second'] / 1e9:.2f} GB/s, writes {disk['write_bytes_per_second'] / 1e9:.2f} GB/s; "
        f"conversion: {c['bytes_per_second'] / 1e9:.2f} GB/s read and written together, peak memory {c['peak_rss'] / 1e9:.2f} GB"
    )
    print(
        f"{100 * ratios['of_limit']:.0f} % of the slower one ({ratios['limit']}), {ratios['of_plain_loop']:.1f} x the plain "
        f"loop, {ratios['of_search_loop']:.1f} x the search loop; by CPU seconds {100 * ratios['of_limit_cpu']:.0f} % of "
        f"kernel and disk together, {ratios['of_plain_loop_cpu']:.1f} x and {ratios['of_search_loop_cpu']:.1f} x"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="an existing one (default: a random one of --layers)")
    parser.add_argument("--layers", type=int, default=1, help="of the random checkpoint at full width (default 1)")
    parser.add_argument("--out", type=Path, help="a directory on the disk to write to (default: the system's for such)")
    parser.add_argument("--plain-weights", type=int, default=10**9, help="where the loops stop (default 1e9)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(dir=options.out, prefix=".convert-") as folder:
            out = options.out or Path(folder)
            if options.case:
                cases: dict[str, Callable[[], Result]] = {
                    "disk": lambda: measure_disk(options.checkpoint, out),
                    "kernel": measure_kernel,
                    "conversion": lambda: measure_conversion(options.checkpoint, out),
                    "plain": lambda: measure_plain_loop(options.checkpoint, out, options.plain_weights),
                    "search": lambda: measure_plain_loop(options.checkpoint, out, options.plain_weights, search=True),
                }
                print(json.dumps(cases[options.case]()))
                return 0
            checkpoint = options.checkpoint
            if checkpoint is None:
                make_checkpoint = importlib.import_module("make_checkpoint")  # beside this file
                checkpoint = Path(folder) / "checkpoint"
                make_checkpoint.make_checkpoint(
                    checkpoint, make_checkpoint.make_config(options.layers, full_width=True)
                )
            result = run(checkpoint, out, options.plain_weights)
    except CloverError as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print_table(result)
    r, rss = result["ratios"], result["conversion"]["peak_rss"]
    return 0 if r["of_limit"] >= LEAST_OF_LIMIT and r["of_plain_loop"] >= LEAST_OF_PLAIN and rss <= MOST_RSS else 1


if __name__ == "__main__":
    sys.exit(main())
