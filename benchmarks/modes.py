"""Every decode mode and threshold on the nano checkpoint's tasks, interleaved: right answers, tokens a step, tokens/s,
ratios to the autoregressive mode, and whether self-speculative replies equal the autoregressive ones.

    python benchmarks/modes.py --exact 100 --transformers --predict rtx-5070-ti --predict h200

--transformers also times transformers' generate on the same checkpoint (float32; it has no preview pass), --llama-cpp
PYTHON llama.cpp on the bundle's own integers (an interpreter with llama-cpp-python), and says how many of its replies
equal ours. --predict: what the planner's roofline says of the full-size model on a card if it ran the steps that nano ran here, a block touching the
same share of its experts; what that model would really fill, nano can't tell. --json for machines.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clover import Clover
from clover.engines.bench.measure import Plans, Run, measure, run_once, summarise
from clover.engines.bench.roofline import CountedPlan, count_experts
from clover.engines.build import BuildRequest, build_target
from clover.engines.bundle import Bundle
from clover.engines.gpus import find_gpu
from clover.engines.planner.full_size import FULL_SIZE
from clover.engines.planner.measured import MeasuredStep, floor_seconds, machine_on
from clover.engines.planner.roofline import Machine, commit_distinct
from clover.engines.planner.routing import union_distinct
from clover.exporter.precision import plan_precision
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


CONTEXT = 8192  # tokens before the reply, for predictions


@dataclass(frozen=True)
class Predicted:
    """One setting. share: of a layer's experts that a step's developing rows touch. cards: tokens/s at most."""

    tokens_per_step: float
    share: float
    cards: dict[str, float]


def at_full_size(machine: Machine, counted: CountedPlan, share: float, prompt: int, block: int) -> list[MeasuredStep]:
    """The steps that developed a reply, as the full-size model would run them in a long conversation.

    What commits the prompt alone is left out; where a step commits it beside its own rows, a block stands in its place (one
    token, where no block is previewed). Previews touch the share of experts that was measured, committed rows what the
    planner says.
    """
    experts, steps = FULL_SIZE.num_experts, []
    for step in counted.steps:
        if not step.logit_rows:
            continue
        commit = step.commit if step.context >= prompt else (block if step.preview else 1)
        sets = [commit_distinct(machine, commit)] if commit else []
        if step.preview:
            sets.append(max(share * experts, float(FULL_SIZE.num_experts_per_tok)))
        distinct = sets[0] if len(sets) == 1 else union_distinct(experts, *sets)
        steps.append(MeasuredStep(commit, step.preview, step.logit_rows, CONTEXT, distinct))
    return steps


def predict(
    runs: dict[str, list[Run]], counted: Sequence[CountedPlan], experts: int, cards: Sequence[str], block: int
) -> dict[str, Predicted]:
    """What the planner's roofline allows the full-size model in INT4, by setting."""
    precision = plan_precision(FULL_SIZE, "int4")
    machines = {
        card: machine_on(FULL_SIZE, precision, find_gpu(card, "--predict"), max_context=CONTEXT) for card in cards
    }
    found = {}
    for name, own in runs.items():
        developing = [d for r in own for d in counted[r.plan].developing]
        share, tokens = statistics.mean(developing) / experts, sum(r.tokens for r in own)
        seconds = dict.fromkeys(cards, 0.0)
        steps: list[MeasuredStep] = []
        for r in own:
            for card, machine in machines.items():
                steps_of_run = at_full_size(machine, counted[r.plan], share, r.prompt_tokens, block)
                seconds[card] += floor_seconds(machine, steps_of_run)
            steps += steps_of_run
        found[name] = Predicted(tokens / len(steps), share, {card: tokens / s for card, s in seconds.items()})
    return found


@dataclass(frozen=True)
class Answer:
    """A rival's greedy reply: ids without the end token; seconds in all and to the first token (0: not known)."""

    ids: list[int]
    seconds: float
    first: float


def rivals_of(bundle: Path, args: argparse.Namespace) -> dict[str, Callable[[Sequence[int], Sequence[int]], Answer]]:
    """Who answers (prompt, end tokens), by name."""
    found: dict[str, Callable[[Sequence[int], Sequence[int]], Answer]] = {}
    limit: int = args.max_new_tokens
    if args.transformers:
        from decode import Transformers

        model = Transformers(NANO, args.threads)

        def generate(prompt: Sequence[int], eos: Sequence[int]) -> Answer:
            ids, seconds = model.generate(prompt, limit, eos)
            return Answer([i for i in ids if i not in eos], seconds, 0.0)

        found["transformers generate"] = generate
    if args.llama_cpp:
        from gguf_bundle import write_gguf
        from llamacpp import LlamaCpp

        gguf = bundle.with_suffix(".gguf")
        write_gguf(Bundle.open(bundle), gguf)
        peer = LlamaCpp(args.llama_cpp, gguf, args.threads)
        found[f"llama.cpp ({peer.version})"] = lambda prompt, eos: Answer(*peer.run(prompt, limit, eos))
    return found


def beside(
    engine: Clover,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    answer: Callable[[Sequence[int], Sequence[int]], Answer],
) -> dict[str, float]:
    """A rival's replies, each beside one of ours to the same prompt; the first only warms up."""
    ratios, firsts, equal = [], [], 0
    for n, prompt in enumerate(prompts):
        ours = run_once(engine, prompt, options, n)
        theirs = answer(prompt, engine.bundle.manifest.eos_token_ids)
        equal += theirs.ids == answers(engine, prompt, {"": options})[""]
        ratios.append(len(theirs.ids) / theirs.seconds / (ours.tokens / ours.seconds))
        firsts.append(1e3 * theirs.first)
    return {
        "ratio": statistics.median(ratios[1:]),
        "first_token_ms": statistics.median(firsts[1:]),
        "equal": equal,
        "prompts": len(prompts),
    }


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
    a.add_argument("--llama-cpp", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
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
        "rivals": {},
        "predictions": {},
    }
    rivals = rivals_of(bundle, args)
    with Clover.load(bundle, threads=args.threads, max_context=2048, cache=False) as engine:
        assert engine.template is not None and engine.tokenizer is not None
        settings = settings_of(engine, args.threshold or (0.5, 0.8, 0.95), args.max_new_tokens)
        plans, ran = Plans(), {name: list[Run]() for name in settings}
        for task in TASKS:
            pairs = data.held_out(task, max(args.prompts, args.exact))
            rendered = [engine.template.render([{"role": "user", "content": q}]) for q, _ in pairs]
            prompts = [engine.tokenizer.encode_prompt(p) for p in rendered]
            runs = measure(engine, prompts[: args.prompts], settings, repeats=args.repeat, plans=plans)
            for name, own in runs.items():
                ran[name] += own
            rows = [s.to_json() for s in summarise(runs)]
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
            result["rivals"][task] = {
                name: beside(engine, prompts[: args.prompts], settings["autoregressive"], answer)
                for name, answer in rivals.items()
            }
        if args.predict:
            counted = count_experts(
                engine.bundle, plans.found, max_context=2048, max_rows=engine.session.max_rows, threads=args.threads
            )
            experts = engine.bundle.manifest.config.num_experts
            block = next(o.block_size for o in settings.values())
            predicted = predict(ran, counted, experts, args.predict, block)
            result["predictions"] = {name: asdict(p) for name, p in predicted.items()}
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
        for name, found in result["rivals"][task].items():
            first = f"{found['first_token_ms']:.1f}" if found["first_token_ms"] else "-"
            print(f"| {task} | {name} | | 1.0 | | | {found['ratio']:.2f} | {first} |")
    for task, (same, count) in result["equal"].items():
        print(f"{task}: {same} of {count} self-speculative replies equal the autoregressive ones")
    for task, rivals in result["rivals"].items():
        for name, found in rivals.items():
            print(f"{task}: {found['equal']} of {found['prompts']} replies of {name} equal ours")
    if result["predictions"]:
        cards = list(next(iter(result["predictions"].values()))["cards"])
        heads = " | ".join(f"{c}: tokens/s at most" for c in cards)
        print(f"\nthe full-size model in INT4, if it ran these steps at {CONTEXT:,} tokens of context:")
        print(f"\n| mode | tokens a step | experts touched | {heads} |\n" + "|---" * (3 + len(cards)) + "|")
        for name, p in result["predictions"].items():
            cells = " | ".join(f"{p['cards'][c]:,.0f}" for c in cards)
            print(f"| {name} | {p['tokens_per_step']:.1f} | {100 * p['share']:.0f} % | {cells} |")


if __name__ == "__main__":
    main()
