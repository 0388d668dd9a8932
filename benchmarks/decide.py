"""Groups of questions answered jointly in one form against each question alone, on the nano checkpoint's held-out decisions.

    python benchmarks/decide.py --groups 500

Both ways of every group run one after the other, the order changing, on one thread. Nano was trained to answer its four
questions at once and never saw a single one. --json for machines.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clover import Clover
from clover.engines.bench.statistics import wilson
from clover.engines.build import BuildRequest, build_target
from clover.runtime.terminal.progress import Progress

NANO = Path(__file__).resolve().parent.parent / "examples" / "nano"
WAYS = ("together", "alone")


@dataclass
class Score:
    """One way to answer. right: by question."""

    right: dict[str, int] = field(default_factory=dict)
    groups_right: int = 0
    steps: int = 0
    seconds: list[float] = field(default_factory=list)


def questions_of(document: str, answer: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The choices of a held-out decision: yes or no, and for the refund none or the deposit."""
    deposit = int(document.split("The deposit is ")[1].split(".")[0])
    return {name: [0, deposit] if name == "refund" else [True, False] for name in answer}


def compare(engine: Clover, pairs: Sequence[tuple[str, str]], quiet: bool) -> dict[str, Score]:
    """Every group both ways."""
    scores = {way: Score() for way in WAYS}
    with Progress("deciding", " groups", quiet=quiet) as bar:
        for n, (question, text) in enumerate(pairs):
            document, want = question.split(". ", 1)[1], json.loads(text)
            questions = questions_of(document, want)
            for way in WAYS if n % 2 else WAYS[::-1]:
                decision = engine.decide(document, questions, together=way == "together")
                score = scores[way]
                for name, value in want.items():
                    score.right[name] = score.right.get(name, 0) + (decision.answers[name] == value)
                score.groups_right += dict(decision.answers) == want
                score.steps += decision.steps
                score.seconds.append(sum(f.seconds for f in decision.forms))
            bar("groups", n + 1, len(pairs))
    return scores


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--groups", type=int, default=500)
    a.add_argument("--precision", default="int4", choices=["fp32", "int4"])
    a.add_argument("--threads", type=int, default=1)
    a.add_argument("--json", action="store_true")
    args = a.parse_args()
    sys.path.insert(0, str(NANO))
    import data

    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        build_target(BuildRequest(NANO, bundle, precision=args.precision))
        with Clover.load(bundle, threads=args.threads, max_context=2048, cache=False) as engine:
            scores = compare(engine, data.held_out("decide", args.groups), args.json)
    together, alone = (scores[w].seconds for w in WAYS)
    ratio = statistics.median(b / a for a, b in zip(together, alone, strict=True))
    conditions = {
        "model": "nano",
        "precision": args.precision,
        "threads": args.threads,
        "machine": platform.machine(),
        "groups": args.groups,
    }
    if args.json:
        print(
            json.dumps(
                {"conditions": conditions, "time_ratio": ratio, **{w: asdict(s) for w, s in scores.items()}}, indent=1
            )
        )
        return
    print(", ".join(f"{k} {v}" for k, v in conditions.items()))
    print("| right | together | alone |\n|---|---|---|")
    for name in scores["together"].right:
        shares = [f"{100 * scores[w].right[name] / args.groups:.1f} %" for w in WAYS]
        print(f"| `{name}` | {' | '.join(shares)} |")
    whole = [(scores[w].groups_right, *wilson(scores[w].groups_right, args.groups)) for w in WAYS]
    cells = [f"{100 * k / args.groups:.1f} % ({100 * low:.1f}–{100 * high:.1f})" for k, low, high in whole]
    print(f"| whole group (95 %) | {' | '.join(cells)} |")
    print(f"| steps a group | {' | '.join(f'{scores[w].steps / args.groups:.2f}' for w in WAYS)} |")
    print(f"| median ms a group | {' | '.join(f'{1e3 * statistics.median(scores[w].seconds):.1f}' for w in WAYS)} |")
    print(f"alone takes {ratio:.2f} times as long (median of pairs)")


if __name__ == "__main__":
    main()
