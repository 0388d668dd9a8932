"""What `coreset_top_p` does on the nano checkpoint: experts touched, time and right answers, as a table and a figure.

    python benchmarks/coreset.py --prompts 100 --svg docs/images/coreset.svg

Every prompt is decoded by threshold fill with every value, in a shuffled order: once with the routing given out, for the
experts and the answer, and --repeat times with the usual session, for the times. --json for machines.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clover import Clover
from clover.engines.build import BuildRequest, build_target
from clover.engines.trace.routing import RoutingSession, open_routing_session
from clover.runtime.decoder import TokensEvent
from clover.runtime.options import DecodeOptions
from clover.runtime.session import StepSession
from clover.runtime.terminal.progress import Progress

NANO = Path(__file__).resolve().parent.parent / "examples" / "nano"
TASKS = ("dispatch", "tool", "decide")
VALUES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass
class Row:
    """One value of coreset_top_p. experts: touched by the preview rows of a step, for each layer the mean over steps."""

    top_p: float
    exact: dict[str, float] = field(default_factory=dict)
    experts: list[float] = field(default_factory=list)
    tokens_per_step: float = 0.0
    step_ms: float = 0.0  # median of steps that only preview
    reply_ms: float = 0.0  # median over prompts and repeats, prompt included

    @property
    def mean_exact(self) -> float:
        return statistics.mean(self.exact.values())

    @property
    def mean_experts(self) -> float:
        return statistics.mean(self.experts)


def decode(
    engine: Clover, session: StepSession, prompt: Sequence[int], options: DecodeOptions
) -> tuple[list[int], int, float, list[float]]:
    """Token ids, steps, seconds, and seconds of each step that only previews."""
    decoder = engine.decoder(prompt, options)
    tokens: list[int] = []
    previews: list[float] = []
    session.reset(0)
    began = time.perf_counter()
    while not decoder.done:
        rows = decoder.plan(0, session.max_rows)
        start = time.perf_counter()
        (candidates,) = session.step([rows], decoder.candidates)
        if not rows.commit:
            previews.append(time.perf_counter() - start)
        tokens += [t.id for e in decoder.accept(candidates) if isinstance(e, TokensEvent) for t in e.tokens]
    return tokens, decoder.counts.steps, time.perf_counter() - began, previews


def sweep(engine: Clover, routed: RoutingSession, count: int, repeat: int, quiet: bool) -> list[Row]:
    """Decodes `count` held-out prompts of every task with every value."""
    sys.path.insert(0, str(NANO))
    import data

    assert engine.template is not None and engine.tokenizer is not None
    rows = {p: Row(p) for p in VALUES}
    right = {(p, t): 0 for p in VALUES for t in TASKS}
    touched: dict[float, list[Any]] = {p: [] for p in VALUES}
    steps, tokens = dict.fromkeys(VALUES, 0), dict.fromkeys(VALUES, 0)
    previews: dict[float, list[float]] = {p: [] for p in VALUES}
    replies: dict[float, list[float]] = {p: [] for p in VALUES}
    shuffled, done = random.Random(0), 0
    with Progress("answering", " prompts", quiet=quiet) as bar:
        for task in TASKS:
            for question, answer in data.held_out(task, count):
                rendered = engine.template.render([{"role": "user", "content": question}])
                prompt = engine.tokenizer.encode_prompt(rendered)
                for top_p in shuffled.sample(VALUES, len(VALUES)):
                    options = engine.options(max_new_tokens=256, coreset_top_p=top_p)
                    routed.touched.clear()
                    ids, taken, _, _ = decode(engine, routed, prompt, options)
                    touched[top_p] += [t[:, 0] for t in routed.touched]
                    right[top_p, task] += engine.tokenizer.decode(ids, keep_control_tokens=True) == answer
                    steps[top_p], tokens[top_p] = steps[top_p] + taken, tokens[top_p] + len(ids)
                    for _ in range(repeat):
                        _, _, seconds, alone = decode(engine, engine.session, prompt, options)
                        replies[top_p].append(seconds)
                        previews[top_p] += alone
                done += 1
                bar(task, done, count * len(TASKS))
    for p, row in rows.items():
        row.exact = {t: right[p, t] / count for t in TASKS}
        row.experts = np.mean(touched[p], axis=0).tolist()
        row.tokens_per_step = tokens[p] / steps[p]
        row.step_ms, row.reply_ms = 1e3 * statistics.median(previews[p]), 1e3 * statistics.median(replies[p])
    return list(rows.values())


# -- the figure ---------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 236, 150, 34, 26, 26
INK, GRID = "#222", "#ddd"
TASK_LOOK = {"dispatch": ("#0d4a83", ""), "tool": ("#b5651d", "5 2"), "decide": ("#3d7a4e", "1.5 2")}


def figure(rows: Sequence[Row], experts_in_all: int) -> str:
    """Three small panels over coreset_top_p, as SVG: exact answers, experts a layer, milliseconds a step."""
    worst = 100 * min(min(r.exact.values()) for r in rows)
    exact = [([100 * r.exact[t] for r in rows], *TASK_LOOK[t], t) for t in TASKS]
    tick_ms = math.ceil(1.1 * max(r.step_ms for r in rows) / 4 * 5) / 5
    panels = [
        _panel(rows, "exact answers, %", exact, 100, least=math.floor(max(worst - 5, 0) / 20) * 20),
        _panel(
            rows,
            f"experts touched in a layer, of {experts_in_all}",
            [([r.mean_experts for r in rows], TASK_LOOK["dispatch"][0], "", "")],
            experts_in_all,
        ),
        _panel(
            rows,
            "median ms of a denoise step",
            [([r.step_ms for r in rows], TASK_LOOK["dispatch"][0], "", "")],
            4 * tick_ms,
        ),
    ]
    body = "".join(f'<g transform="translate({n * WIDTH},0)">{p}</g>\n' for n, p in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {3 * WIDTH} {HEIGHT}" width="{3 * WIDTH}" height="{HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="9" fill="{INK}">\n'
        f"<title>coreset_top_p on nano: exact answers, experts touched, time of a step</title>\n"
        f'<rect width="{3 * WIDTH}" height="{HEIGHT}" fill="#fff"/>\n{body}</svg>\n'
    )


def _panel(
    rows: Sequence[Row], title: str, lines: Sequence[tuple[list[float], str, str, str]], most: float, least: float = 0
) -> str:
    """One panel; `lines` holds values, colour, dashes and name."""
    inner, tall = WIDTH - LEFT - 14, HEIGHT - TOP - BOTTOM
    first = rows[0].top_p

    def x(top_p: float) -> float:
        return LEFT + inner * (top_p - first) / (1 - first)

    def y(value: float) -> float:
        return TOP + tall * (most - value) / (most - least)

    out = [f'<text x="{LEFT}" y="14" font-size="10">{title}</text>']
    for part in range(5):
        value = least + (most - least) * part / 4
        label = f"{value:.1f}" if most < 10 else f"{value:.0f}"
        out.append(
            f'<path d="M{LEFT} {y(value):.1f}H{LEFT + inner}" stroke="{GRID}" stroke-width=".7"/>'
            f'<text x="{LEFT - 4}" y="{y(value) + 3:.1f}" text-anchor="end">{label}</text>'
        )
    for n, row in enumerate(rows):
        if n % 2 == 0 or row.top_p == 1:
            out.append(f'<text x="{x(row.top_p):.1f}" y="{HEIGHT - 14}" text-anchor="middle">{row.top_p:g}</text>')
    out.append(f'<text x="{LEFT + inner / 2:.1f}" y="{HEIGHT - 3}" text-anchor="middle">coreset_top_p</text>')
    for n, (values, colour, dashes, name) in enumerate(lines):
        points = [(x(r.top_p), y(v)) for r, v in zip(rows, values, strict=True)]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        out.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashed}/>')
        out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="1.8" fill="{colour}"/>' for a, b in points]
        if name:
            at = TOP + tall - 34 + 12 * n
            out.append(
                f'<path d="M{LEFT + inner - 62} {at - 3}h16" stroke="{colour}" stroke-width="1.5"{dashed}/>'
                f'<text x="{LEFT + inner - 42}" y="{at}">{name}</text>'
            )
    return "".join(out)


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    head = "| `coreset_top_p` | experts a layer | step ms | reply ms | tokens a step | " + " | ".join(TASKS) + " |"
    lines = [head, "|" + "---|" * (5 + len(TASKS))]
    for r in rows:
        exact = " | ".join(f"{100 * r.exact[t]:.1f} %" for t in TASKS)
        lines.append(
            f"| {r.top_p:g} | {r.mean_experts:.1f} | {r.step_ms:.2f} | {r.reply_ms:.1f} | {r.tokens_per_step:.1f} | {exact} |"
        )
    return "\n".join(lines)


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--prompts", type=int, default=100, help="of each task")
    a.add_argument("--repeat", type=int, default=1, help="timed replies of each prompt and value")
    a.add_argument("--precision", default="int4", choices=["fp32", "int4"])
    a.add_argument("--threads", type=int, default=1)
    a.add_argument("--svg", type=Path, help="also write the figure here")
    a.add_argument("--json", action="store_true")
    args = a.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        build_target(BuildRequest(NANO, bundle, precision=args.precision))
        with Clover.load(bundle, threads=args.threads, max_context=2048, cache=False) as engine:
            routed = open_routing_session(engine.bundle, max_context=2048, threads=args.threads)
            try:
                rows = sweep(engine, routed, args.prompts, args.repeat, args.json)
            finally:
                routed.close()
            experts = engine.bundle.manifest.config.num_experts
    if args.svg:
        args.svg.write_text(figure(rows, experts), encoding="utf-8")
    conditions = {
        "model": "nano",
        "precision": args.precision,
        "threads": args.threads,
        "machine": platform.machine(),
        "prompts": args.prompts,
        "repeats": args.repeat,
        "experts": experts,
    }
    if args.json:
        print(json.dumps({"conditions": conditions, "rows": [asdict(r) for r in rows]}, indent=1))
    else:
        print(", ".join(f"{k} {v}" for k, v in conditions.items()))
        print(table(rows))


if __name__ == "__main__":
    main()
