"""What a running CPU bundle takes of memory and of time to load: with mapped packed weights, and without.

    python benchmarks/memory.py BUNDLE [--blocks 2] [--first-load] [--mapped-only] [--limit 12GiB] [--json]

Each case is a process of its own. RSS counts all resident pages; private are those that no file backs, which the
system can't drop or share. A bundle's packed weights are cached before anything is measured (`clover run` does it too);
with --first-load that is measured as well, after removing what is cached. With --limit the cached case is run once more
in a control group of that much memory, the page cache included, and its reply is compared. Hashes are checked as by
`clover run`. Linux only: the numbers come from /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from clover import Clover
from clover.engines.bundle import Bundle
from clover.engines.cpu_cache import cache_entries, clear_cache, packed_model
from clover.engines.gpus import parse_size
from clover.exporter.config import ModelConfig
from clover.runtime.errors import CloverError

PROMPT_TOKENS = 64
MAX_CONTEXT = 2048
RSS_LIMIT = 1.3  # of the bundle's size: what the project promises for INT4 at full width


def resident() -> dict[str, int]:
    """Bytes of this process: rss, its peak, and the private part."""
    names = {"VmRSS": "rss", "VmHWM": "peak", "RssAnon": "private"}
    lines = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {names[n]: 1024 * int(value.split()[0]) for n, value in lines if n in names}


def state_formula(c: ModelConfig, tokens: int, cache_bytes: int) -> int:
    """Bytes of one sequence's state after `tokens`: float32 recurrent state, then conv ring and KV at `cache_bytes`.

    At full size and 2 bytes (BF16): 62.9 MB, 1.5 MB and 20,480 bytes a token.
    """
    heads = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    recurrent = 4 * len(c.gdn_layers) * heads
    ring = cache_bytes * len(c.gdn_layers) * c.conv_history * c.conv_channels
    per_token = cache_bytes * len(c.attention_layers) * 2 * c.num_key_value_heads * c.head_dim
    return recurrent + ring + tokens * per_token


def measure(bundle: Path, blocks: int, *, cache: bool) -> dict[str, Any]:
    """Loads and decodes in this process."""
    before, wall, cpu = resident(), time.perf_counter(), time.process_time()
    with Clover.load(bundle, cache=cache, max_context=MAX_CONTEXT) as engine:
        load = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        loaded = resident()
        config = engine.bundle.manifest.config
        prompt = np.random.default_rng(0).integers(0, config.vocab_size - 16, PROMPT_TOKENS).tolist()
        size = engine.options().block_size
        wall = time.perf_counter()
        # every position is filled at once, so that random weights decode as fast as trained ones
        reply = engine.generate(prompt, mode="fill", threshold=1e-9, max_new_tokens=blocks * size)
        seconds = time.perf_counter() - wall
        snapshot = engine.session.snapshot(0)
        return {
            "cache": cache,
            "load_seconds": load,
            "before_load": before,
            "after_load": loaded,
            "after_decode": resident(),
            "blocks": reply.statistics.blocks,
            "tokens": [(token.id, token.logprob) for token in reply.tokens],
            "tokens_per_second": len(reply.tokens) / seconds,
            "state_tokens": snapshot.position,
            "state_bytes": snapshot.nbytes,
            "state_formula": state_formula(config, snapshot.position, 4),
            "state_formula_bf16": state_formula(config, snapshot.position, 2),
        }


@contextmanager
def memory_group(limit: int) -> Iterator[list[str]]:
    """The beginning of a command that runs the rest with `limit` bytes of memory, pages of files included."""
    line = next((x for x in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in x), None)
    if line is None:  # version 2, where systemd owns the groups
        yield ["systemd-run", "--scope", "--quiet", "-p", f"MemoryMax={limit}", "-p", "MemorySwapMax=0"]
        return
    group = Path("/sys/fs/cgroup/memory") / line.split(":")[2].strip("/") / f"clover-memory-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh"]
    finally:
        group.rmdir()


def drop_pages(bundle: Bundle) -> None:
    """Takes the bundle's and its entries' files out of the page cache: pages already there count for no group."""
    kept = [p for entry in cache_entries(bundle) for p in entry.directory.iterdir()]
    for path in [*(bundle.directory / name for name in bundle.manifest.files), *kept]:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_process(bundle: Path, blocks: int, case: str, start: Sequence[str] = ()) -> dict[str, Any]:
    """`measure` in a fresh process."""
    command = [*start, sys.executable, __file__, str(bundle), "--blocks", str(blocks), "--case", case]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise CloverError(f"measuring {bundle} ({case}) failed.")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run(
    directory: Path, blocks: int, *, first_load: bool = False, private: bool = True, limit: int | None = None
) -> dict[str, Any]:
    """Every case as JSON data. Raises CloverError when one fails or replies otherwise than another."""
    bundle = Bundle.open(directory, verify=False)
    if first_load:
        clear_cache(bundle)
    cases = {"first load": in_process(directory, blocks, "cached")} if first_load else {}
    cached = packed_model(bundle, verify=True) is not None
    size = bundle.nbytes
    kinds = [*(["cached"] if cached else []), *(["private"] if private or not cached else [])]
    cases |= {kind: in_process(directory, blocks, kind) for kind in kinds}
    if limit and cached:
        drop_pages(bundle)
        with memory_group(limit) as start:
            cases["limited"] = in_process(directory, blocks, "cached", start)
    if len({tuple(map(tuple, case["tokens"])) for case in cases.values()}) > 1:
        raise CloverError(f"{bundle.directory} replied otherwise in one of the cases {', '.join(cases)}.")
    for case in cases.values():
        for moment in ("after_load", "after_decode"):
            case[f"rss_ratio_{moment}"] = case[moment]["rss"] / size
        case["private_ratio"] = case["after_decode"]["private"] / size
        case["peak_ratio"] = case["after_decode"]["peak"] / size
        case["state_ratio"] = case["state_bytes"] / case["state_formula"]
    entry_bytes = sum(e.nbytes for e in cache_entries(bundle) if e.current)
    return {"bundle": str(directory), "bytes": size, "cache_ratio": entry_bytes / size, "cases": cases}


def print_table(result: dict[str, Any]) -> None:
    size = result["bytes"]
    print(f"{result['bundle']}: {size / 1e9:.2f} GB, packed weights on disk {result['cache_ratio']:.2f} x that")
    print(
        f"{'':12}{'RSS loaded':>11}{'RSS decoded':>13}{'peak':>7}{'private':>9}{'load':>11}{'load, CPU':>11}{'tokens/s':>10}"
    )
    for name, case in result["cases"].items():
        load = case["load_seconds"]
        print(
            f"{name:12}{case['rss_ratio_after_load']:11.2f}{case['rss_ratio_after_decode']:13.2f}"
            f"{case['peak_ratio']:7.2f}{case['private_ratio']:9.2f}{load['wall']:9.1f} s{load['cpu']:9.1f} s"
            f"{case['tokens_per_second']:10.2f}"
        )
    print("the same reply in every case: ids and log-probabilities, to the bit")
    print(
        f"state of a sequence of {case['state_tokens']} tokens: {case['state_bytes']:,} bytes, "
        f"{case['state_ratio']:.3f} x the formula in float32 ({case['state_formula_bf16']:,} with BF16 caches)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--blocks", type=int, default=2, help="blocks to decode before measuring again (default 2)")
    parser.add_argument("--first-load", action="store_true", help="remove the packed weights and time making them")
    parser.add_argument("--mapped-only", action="store_true", help="leave out the case in private memory")
    parser.add_argument("--limit", help="also run in a control group of this much memory, such as 12GiB")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--case", choices=["cached", "private"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.case:
            print(json.dumps(measure(options.bundle, options.blocks, cache=options.case == "cached")))
            return 0
        limit = parse_size(options.limit, "--limit") if options.limit else None
        result = run(
            options.bundle, options.blocks, first_load=options.first_load, private=not options.mapped_only, limit=limit
        )
    except CloverError as error:
        print(f"memory: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print_table(result)
    judged = result["cases"].get("cached") or result["cases"]["private"]
    within = judged["rss_ratio_after_decode"] <= RSS_LIMIT
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
