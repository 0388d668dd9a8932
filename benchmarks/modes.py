"""Every decode mode on the nano checkpoint's tasks, interleaved: tokens/s, ratios to the autoregressive mode, and whether
self-speculative replies equal the autoregressive ones.

    python benchmarks/modes.py --precision int4 --prompts 12 --repeat 3

--json for machines.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from clover import Clover
from clover.engines.bench.measure import measure, summarise
from clover.engines.build import BuildRequest, build_target
from clover.runtime.options import MODES

NANO = Path(__file__).resolve().parent.parent / "examples" / "nano"
ORDER = ("autoregressive", *(m for m in MODES if m != "autoregressive"))


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--precision", default="int4", choices=["fp32", "int4"])
    a.add_argument("--prompts", type=int, default=12)
    a.add_argument("--repeat", type=int, default=3)
    a.add_argument("--max-new-tokens", type=int, default=160)
    a.add_argument("--threads", type=int, default=1)
    a.add_argument("--equality", type=int, default=0, help="also compare this many held-out replies of each task")
    a.add_argument("--json", action="store_true")
    args = a.parse_args()
    sys.path.insert(0, str(NANO))
    import data

    folder = tempfile.TemporaryDirectory()
    bundle = Path(folder.name) / "bundle"
    build_target(BuildRequest(NANO, bundle, precision=args.precision))
    result: dict[str, Any] = {
        "conditions": {
            "model": "nano",
            "precision": args.precision,
            "threads": args.threads,
            "machine": platform.machine(),
            "prompts": args.prompts,
            "repeats": args.repeat,
            "max_new_tokens": args.max_new_tokens,
        },
        "tasks": {},
        "equal": {},
    }
    with Clover.load(bundle, threads=args.threads, max_context=2048, cache=False) as engine:
        assert engine.template is not None and engine.tokenizer is not None
        settings = {m: engine.options(mode=m, max_new_tokens=args.max_new_tokens) for m in ORDER}
        for task in ("dispatch", "tool", "decide"):
            rendered = [
                engine.template.render([{"role": "user", "content": q}])
                for q, _ in data.held_out(task, max(args.prompts, args.equality))
            ]
            prompts = [engine.tokenizer.encode_prompt(p) for p in rendered]
            runs = measure(engine, prompts[: args.prompts], settings, repeats=args.repeat)
            result["tasks"][task] = [s.to_json() for s in summarise(runs)]
            if args.equality:
                same = 0
                for prompt in prompts[: args.equality]:
                    replies = [engine.generate(prompt, mode=m).tokens for m in ("autoregressive", "self-speculative")]
                    same += [t.id for t in replies[0]] == [t.id for t in replies[1]]
                result["equal"][task] = [same, args.equality]
    if args.json:
        print(json.dumps(result, indent=1))
        return
    print(", ".join(f"{k} {v}" for k, v in result["conditions"].items()))
    print(f"{'task':<10}{'mode':<18}{'tokens/s':>10}{'quartiles':>16}{'tok/step':>10}{'x ar':>8}{'first ms':>10}")
    for task, rows in result["tasks"].items():
        for row in rows:
            rate = row["tokens_per_second"]
            print(
                f"{task:<10}{row['name']:<18}{rate['median']:>10.0f}"
                f"{rate['quarter']:>10.0f}-{rate['three_quarters']:<5.0f}{row['tokens_per_step']:>10.2f}"
                f"{row['ratio']['median']:>8.2f}{row['first_token_ms']['median']:>10.1f}"
            )
    for task, (same, count) in result["equal"].items():
        print(f"{task}: {same} of {count} self-speculative replies equal the autoregressive ones")


if __name__ == "__main__":
    main()
