"""What a running CPU bundle takes of memory, against its size on disk: with mapped packed weights, and without.

    python benchmarks/memory.py BUNDLE [--blocks 2] [--json]

Each case is a process of its own. RSS counts all resident pages; private are those that no file backs, which the
system can't drop or share. A bundle's packed weights are cached before anything is measured (`clover run` does it too).
Linux only: the numbers come from /proc.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from clover import Clover
from clover.engines.bundle import Bundle
from clover.engines.cpu_cache import cache_entries, packed_model
from clover.exporter.config import ModelConfig
from clover.runtime.errors import CloverError

PROMPT_TOKENS = 64
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
    before = resident()
    with Clover.load(bundle, verify=False, cache=cache) as engine:
        loaded = resident()
        config = engine.bundle.manifest.config
        prompt = np.random.default_rng(0).integers(0, config.vocab_size - 16, PROMPT_TOKENS).tolist()
        size = engine.options().block_size
        # every position is filled at once, so that random weights decode as fast as trained ones
        reply = engine.generate(prompt, mode="fill", threshold=1e-9, max_new_tokens=blocks * size)
        snapshot = engine.session.snapshot(0)
        return {
            "cache": cache,
            "before_load": before,
            "after_load": loaded,
            "after_decode": resident(),
            "blocks": reply.statistics.blocks,
            "state_tokens": snapshot.position,
            "state_bytes": snapshot.nbytes,
            "state_formula": state_formula(config, snapshot.position, 4),
            "state_formula_bf16": state_formula(config, snapshot.position, 2),
        }


def in_process(bundle: Path, blocks: int, case: str) -> dict[str, Any]:
    """`measure` in a fresh process."""
    command = [sys.executable, __file__, str(bundle), "--blocks", str(blocks), "--case", case]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise CloverError(f"measuring {bundle} ({case}) failed.")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run(directory: Path, blocks: int) -> dict[str, Any]:
    bundle = Bundle.open(directory, verify=False)
    cached = packed_model(bundle) is not None
    size = bundle.nbytes
    cases = {case: in_process(directory, blocks, case) for case in (["cached"] if cached else []) + ["private"]}
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
    print(f"{'':10}{'RSS loaded':>12}{'RSS decoded':>13}{'peak':>8}{'private':>9}   (x bundle)")
    for name, case in result["cases"].items():
        print(
            f"{name:10}{case['rss_ratio_after_load']:12.2f}{case['rss_ratio_after_decode']:13.2f}"
            f"{case['peak_ratio']:8.2f}{case['private_ratio']:9.2f}"
        )
    case = next(iter(result["cases"].values()))
    print(
        f"state of a sequence of {case['state_tokens']} tokens: {case['state_bytes']:,} bytes, "
        f"{case['state_ratio']:.3f} x the formula in float32 ({case['state_formula_bf16']:,} with BF16 caches)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--blocks", type=int, default=2, help="blocks to decode before measuring again (default 2)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--case", choices=["cached", "private"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.case:
            print(json.dumps(measure(options.bundle, options.blocks, cache=options.case == "cached")))
            return 0
        result = run(options.bundle, options.blocks)
    except CloverError as error:
        print(f"memory: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print_table(result)
    within = next(iter(result["cases"].values()))["rss_ratio_after_decode"] <= RSS_LIMIT
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
