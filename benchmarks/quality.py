"""Exact-match answers on the nano model's held-out prompts, by precision, mode and task, through the real runtime.

    python benchmarks/quality.py --count 200

Builds fp32 and INT4 bundles of examples/nano for the run. Prints a table; --json for machines.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clover import Clover
from clover.engines.build import BuildRequest, build_target
from clover.exporter.precision import parse_precision
from clover.runtime.reply import ReplyFinished
from clover.runtime.terminal.progress import Progress

NANO = Path(__file__).resolve().parent.parent / "examples" / "nano"
TASKS = ("dispatch", "tool", "decide")


@dataclass
class Score:
    """Exact answers among `count`, with the steps they took."""

    count: int = 0
    exact: int = 0
    tokens: int = 0
    steps: int = 0

    @property
    def share(self) -> float:
        return self.exact / max(self.count, 1)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(self.steps, 1)


def held_out(task: str, count: int) -> list[tuple[str, str]]:
    """Prompts and answers from the seed kept for evaluation."""
    if str(NANO) not in sys.path:
        sys.path.insert(0, str(NANO))
    import data

    return list(data.held_out(task, count))


def score(engine: Clover, task: str, count: int, progress: Any = None, **options: Any) -> Score:
    """Decodes `count` held-out prompts of a task and compares the raw text with the answer."""
    assert engine.tokenizer is not None and engine.template is not None
    result = Score()
    for prompt, answer in held_out(task, count):
        rendered = engine.template.render([{"role": "user", "content": prompt}])
        ids = engine.tokenizer.encode_prompt(rendered)
        for item in engine.stream_prompt(ids, max_new_tokens=256, **options):
            if isinstance(item, ReplyFinished):
                got = engine.tokenizer.decode([t.id for t in item.reply.tokens], keep_control_tokens=True)
                result.exact += got == answer
                result.tokens += item.reply.statistics.response_tokens
                result.steps += item.reply.statistics.steps
        result.count += 1
        if progress:
            progress(task)
    return result


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--count", type=int, default=200, help="prompts of each task")
    a.add_argument("--precision", action="append", help="repeatable; default fp32 and int4")
    a.add_argument("--threshold", type=float, default=None)
    a.add_argument("--json", action="store_true")
    args = a.parse_args()
    precisions = args.precision or ["fp32", "int4"]
    modes = ("fill", "autoregressive")
    rows = []
    total, done = len(precisions) * len(modes) * len(TASKS) * args.count, 0
    with tempfile.TemporaryDirectory() as folder, Progress("answering", " prompts", quiet=args.json) as bar:
        for precision in precisions:
            base, overrides = parse_precision(precision)
            out = Path(folder) / precision.replace("=", "-").replace(",", "-")
            build_target(BuildRequest(NANO, out, precision=base, overrides=overrides))
            with Clover.load(out) as engine:
                for mode in modes:
                    for task in TASKS:

                        def tick(task: str) -> None:
                            nonlocal done
                            done += 1
                            bar(task, done, total)

                        acts = args.threshold and mode in ("fill", "adaptive")
                        options = {"threshold": args.threshold} if acts else {}
                        s = score(engine, task, args.count, tick, mode=mode, **options)
                        rows.append((precision, mode, task, s))
    if args.json:
        print(json.dumps([{"precision": p, "mode": m, "task": t, **vars(s)} for p, m, t, s in rows], indent=1))
        return
    print("| precision | mode | task | exact | of | tokens per step |\n|---|---|---|---|---|---|")
    for precision, mode, task, s in rows:
        print(f"| {precision} | {mode} | {task} | {100 * s.share:.1f} % | {s.count} | {s.tokens_per_step:.1f} |")


if __name__ == "__main__":
    main()
