"""Every decode mode and threshold on the nano checkpoint's tasks, interleaved: right answers, tokens a step, tokens/s,
ratios to the autoregressive mode, and whether self-speculative replies equal the autoregressive ones.

    python benchmarks/modes.py --exact 100 --transformers --predict rtx-5070-ti --predict h200

--transformers also times transformers' generate on the same checkpoint (float32; it has no preview pass). --predict: what
the planner's roofline says of the full-size model on a card with the tokens a step and the share of experts measured
here; what that model would really fill, nano can't tell. --json for machines.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clover import Clover
from clover.engines.bench.measure import measure, run_once, summarise
from clover.engines.build import BuildRequest, build_target
from clover.engines.gpus import resolve_gpu
from clover.engines.planner.full_size import FULL_SIZE
from clover.engines.planner.plan import plan
from clover.engines.planner.roofline import block_seconds
from clover.engines.planner.routing import RoutingAssumptions
from clover.engines.trace.routing import open_routing_session
from clover.exporter.precision import parse_precision, plan_precision
from clover.runtime.loop import StepTimes, decode
from clover.runtime.options import DecodeOptions

NANO = Path(__file__).resolve().parent.parent / "examples" / "nano"
TASKS = ("dispatch", "tool", "decide")


def settings_of(engine: Clover, thresholds: Sequence[float], limit: int) -> dict[str, DecodeOptions]:
    """Autoregressive first: what the ratios are against."""
    found = {"autoregressive": engine.options(mode="autoregressive", max_new_tokens=limit)}
    for threshold in thresholds:
        found[f"fill {threshold:g}"] = engine.options(mode="fill", threshold=threshold, max_new_tokens=limit)
    found["self-speculative"] = engine.options(mode="self-speculative", max_new_tokens=limit)
    found["adaptive"] = engine.options(mode="adaptive", max_new_tokens=limit)
    return found


def answers(engine: Clover, prompt: Sequence[int], settings: dict[str, DecodeOptions]) -> dict[str, list[int]]:
    """The reply's ids under every setting."""
    found = {}
    for name, options in settings.items():
        decoder, ids = engine.decoder(prompt, options), []
        engine.session.reset(0)
        for event in decode(engine.session, decoder, 0, StepTimes()):
            ids += [t.id for t in getattr(event, "tokens", ()) if hasattr(t, "logprob")]
        found[name] = ids
    return found


def share_of_experts(engine: Clover, prompts: Sequence[Sequence[int]], options: DecodeOptions, threads: int) -> float:
    """Share of a layer's experts that a block's rows touch in a step, mean over steps and layers."""
    routed = open_routing_session(engine.bundle, max_context=2048, threads=threads)
    try:
        for prompt in prompts:
            decoder = engine.decoder(prompt, options)
            routed.reset(0)
            for _ in decode(routed, decoder, 0, StepTimes()):
                pass
        touched = np.array(routed.touched)  # [steps, layers, 2]
    finally:
        routed.close()
    return float(touched[:, :, 0].mean()) / engine.bundle.manifest.config.num_experts


def predictions(card: str, share: float, tokens_per_step: dict[str, float]) -> dict[str, float]:
    """Most tokens/s of the full-size model in INT4 on a card, by setting, from the planner's roofline."""
    base, overrides = parse_precision("int4")
    distinct = max(share * FULL_SIZE.num_experts, float(FULL_SIZE.num_experts_per_tok))
    routing = RoutingAssumptions(1.0, 0.0, distinct, None)
    planned = plan(FULL_SIZE, resolve_gpu(card), plan_precision(FULL_SIZE, base, overrides), routing=routing)
    (cost,) = planned.require_fit().performance
    found = {}
    for name, count in tokens_per_step.items():
        if name == "autoregressive":
            found[name] = cost.autoregressive_tokens_per_second
        elif name.startswith("fill"):
            seconds = block_seconds(cost.block_size, count, cost.denoise.seconds, cost.commit_and_preview.seconds)
            found[name] = cost.block_size / seconds
    return found


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--precision", default="int4", choices=["fp32", "int4"])
    a.add_argument("--threshold", type=float, action="append", help="of fill; repeatable; default 0.5, 0.8 and 0.95")
    a.add_argument("--prompts", type=int, default=12, help="timed prompts of each task")
    a.add_argument("--repeat", type=int, default=3)
    a.add_argument("--max-new-tokens", type=int, default=160)
    a.add_argument("--threads", type=int, default=1)
    a.add_argument("--exact", type=int, default=0, help="also compare the answers to this many prompts of each task")
    a.add_argument("--transformers", action="store_true")
    a.add_argument("--predict", action="append", default=[], metavar="GPU", help="a card of `clover gpus`; repeatable")
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
            "exact": args.exact,
        },
        "tasks": {},
        "equal": {},
        "transformers": {},
        "predictions": {},
    }
    rival: Any = None
    if args.transformers:
        from decode import Transformers

        rival = Transformers(NANO, args.threads)
    with Clover.load(bundle, threads=args.threads, max_context=2048, cache=False) as engine:
        assert engine.template is not None and engine.tokenizer is not None
        settings = settings_of(engine, args.threshold or (0.5, 0.8, 0.95), args.max_new_tokens)
        asked: list[list[int]] = []
        for task in TASKS:
            pairs = data.held_out(task, max(args.prompts, args.exact))
            rendered = [engine.template.render([{"role": "user", "content": q}]) for q, _ in pairs]
            prompts = [engine.tokenizer.encode_prompt(p) for p in rendered]
            asked += prompts[: args.prompts]
            rows = [
                s.to_json() for s in summarise(measure(engine, prompts[: args.prompts], settings, repeats=args.repeat))
            ]
            result["tasks"][task] = rows
            if args.exact:
                right, same = dict.fromkeys(settings, 0), 0
                for prompt, (_, answer) in zip(prompts[: args.exact], pairs, strict=False):
                    replies = answers(engine, prompt, settings)
                    same += replies["self-speculative"] == replies["autoregressive"]
                    for name, ids in replies.items():
                        right[name] += engine.tokenizer.decode(ids, keep_control_tokens=True) == answer
                result["equal"][task] = [same, args.exact]
                for row in rows:
                    row["exact"] = right[str(row["name"])] / args.exact
            if rival:
                # each beside a reply of ours to the same prompt; the first warms up
                ratios = []
                for n, prompt in enumerate(prompts[: args.prompts]):
                    ours = run_once(engine, prompt, settings["autoregressive"], n)
                    theirs = rival.run(prompt, args.max_new_tokens, engine.bundle.manifest.eos_token_ids)
                    ratios.append(theirs.rate / (ours.tokens / ours.seconds))
                result["transformers"][task] = statistics.median(ratios[1:])
        if args.predict:
            last = [name for name in settings if name.startswith("fill")][-1]
            share = share_of_experts(engine, asked, settings[last], args.threads)
            counts = {}
            for i, name in enumerate(settings):  # all tokens over all steps
                rows = [r[i] for r in result["tasks"].values()]
                counts[name] = sum(r["tokens"] for r in rows) / sum(r["tokens"] / r["tokens_per_step"] for r in rows)
            result["share_of_experts"] = share
            result["predictions"] = {card: predictions(card, share, counts) for card in args.predict}
            result["predicted_from"] = counts
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)


def show(result: dict[str, Any]) -> None:
    """Markdown."""
    print(", ".join(f"{k} {v}" for k, v in result["conditions"].items()))
    print(
        "\n| task | mode | exact | tokens a step | tokens/s | quartiles | against autoregressive | first ms |\n"
        + "|---" * 8
        + "|"
    )
    for task, rows in result["tasks"].items():
        for row in rows:
            rate, exact = row["tokens_per_second"], f"{100 * row['exact']:.0f} %" if "exact" in row else "-"
            print(
                f"| {task} | {row['name']} | {exact} | {row['tokens_per_step']:.1f} | {rate['median']:.0f} "
                f"| {rate['quarter']:.0f}–{rate['three_quarters']:.0f} | {row['ratio']['median']:.2f} "
                f"| {row['first_token_ms']['median']:.1f} |"
            )
        if task in result["transformers"]:
            print(f"| {task} | transformers generate | | 1.0 | | | {result['transformers'][task]:.3f} | |")
    for task, (same, count) in result["equal"].items():
        print(f"{task}: {same} of {count} self-speculative replies equal the autoregressive ones")
    if result["predictions"]:
        cards = list(result["predictions"])
        print(
            f"\nfull-size model in INT4, {100 * result['share_of_experts']:.0f} % of a layer's experts touched by a block:"
        )
        print(
            "\n| mode | tokens a step | "
            + " | ".join(f"{c}: tokens/s at most" for c in cards)
            + " |\n"
            + "|---" * (2 + len(cards))
            + "|"
        )
        for name in result["predictions"][cards[0]]:
            cells = " | ".join(f"{result['predictions'][c][name]:.0f}" for c in cards)
            print(f"| {name} | {result['predicted_from'][name]:.1f} | {cells} |")


if __name__ == "__main__":
    main()
