"""What the adaptive mode costs against the better of the modes it chooses from, on the nano checkpoint's tasks.

    python benchmarks/adaptive.py --repeat 10
    python benchmarks/adaptive.py --price 1.5 --price 5 --price 12 --price 20 --price 40

The first measures CPU seconds of the process, all modes in turn, the order turned round each time: with the bundle's threshold,
and with threshold 1, which fills one position a step, so that the autoregressive mode wins. The second counts priced steps: a
preview costs so many autoregressive steps, whatever it takes; the first replies, in which the mode learns, by themselves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clover import Clover
from clover.engines.build import BuildRequest, build_target
from clover.runtime.adaptive import AdaptiveDecoder, StepTimesSeen
from clover.runtime.decoder import Decoder, TokensEvent
from clover.runtime.loop import StepTimes, decode
from clover.runtime.options import DecodeOptions
from clover.runtime.session import Candidates, SequenceRows, StepSession

NANO = Path(__file__).resolve().parent.parent / "examples" / "nano"
TASKS = ("dispatch", "tool", "decide")
MODES = ("autoregressive", "fill", "adaptive", "self-speculative")


class PricedSession:
    """A session whose steps cost what they are said to."""

    def __init__(self, inner: StepSession, price: float) -> None:
        self._inner, self._price, self.spent = inner, price, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, rows: Sequence[SequenceRows], candidates: int = 1) -> list[Candidates]:
        self.spent += self._price if any(len(r.tokens) > r.commit for r in rows) else 1.0
        return self._inner.step(rows, candidates)


def run(session: Any, decoder: Decoder) -> int:
    """Decodes one reply; returns its tokens."""
    session.reset(0)
    events = decode(session, decoder, 0, StepTimes())
    return sum(len(event.tokens) for event in events if isinstance(event, TokensEvent))


def measured(engine: Clover, prompts: list[list[int]], threshold: float, repeats: int, limit: int) -> dict[str, float]:
    """CPU seconds of every mode against the better of fill and autoregressive, median over the repeats."""
    settings: dict[str, DecodeOptions] = {}
    for mode in MODES:
        acting = {"threshold": threshold} if mode in ("fill", "adaptive") else {}
        settings[mode] = engine.options(mode=mode, max_new_tokens=limit, **acting)
    spent: dict[str, list[float]] = {mode: [] for mode in MODES}
    for repeat in range(repeats + 1):  # the first warms up
        seconds = dict.fromkeys(MODES, 0.0)
        for n, prompt in enumerate(prompts):
            for mode in MODES if (repeat + n) % 2 else MODES[::-1]:
                start = time.process_time()
                run(engine.session, engine.decoder(prompt, settings[mode]))
                seconds[mode] += time.process_time() - start
        if repeat:
            for mode in MODES:
                spent[mode].append(seconds[mode])
    better = min(("autoregressive", "fill"), key=lambda mode: statistics.median(spent[mode]))
    return {mode: statistics.median(a / b for a, b in zip(spent[mode], spent[better], strict=True)) for mode in MODES}


def priced(engine: Clover, prompts: list[list[int]], price: float, limit: int) -> dict[str, float]:
    """Priced steps a token: fill against autoregressive, and adaptive against the better, while it learns and afterwards."""
    manifest = engine.bundle.manifest
    common: dict[str, Any] = {
        "mask_id": manifest.mask_token_id,
        "eos_ids": manifest.eos_token_ids,
        "vocab_size": manifest.config.vocab_size,
        "limit": limit,
    }
    costs: dict[str, float] = {}
    for mode in ("autoregressive", "fill"):
        session = PricedSession(engine.session, price)
        options = engine.options(mode=mode, max_new_tokens=limit)
        tokens = sum(run(session, engine.decoder(prompt, options)) for prompt in prompts)
        costs[mode] = session.spent / tokens
    session, times = PricedSession(engine.session, price), StepTimesSeen()
    options = engine.options(mode="adaptive", max_new_tokens=limit)
    for name in ("first", "later"):
        session.spent, tokens = 0.0, 0
        for prompt in prompts:
            decoder = AdaptiveDecoder(prompt, options, **common, times=times, clock=lambda: session.spent)
            tokens += run(session, decoder)
        costs[name] = session.spent / tokens / min(costs["autoregressive"], costs["fill"])
    return {
        "fill against autoregressive": costs["fill"] / costs["autoregressive"],
        "adaptive, first replies": costs["first"],
        "adaptive, later": costs["later"],
    }


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--price", type=float, action="append", help="autoregressive steps that a preview costs; repeatable")
    a.add_argument("--prompts", type=int, default=24, help="of each task")
    a.add_argument("--repeat", type=int, default=10)
    a.add_argument("--max-new-tokens", type=int, default=128)
    a.add_argument("--json", action="store_true")
    args = a.parse_args()
    sys.path.insert(0, str(NANO))
    import data

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        build_target(BuildRequest(NANO, bundle, precision="int4"))
        with Clover.load(bundle, threads=1, max_context=2048, cache=False) as engine:
            assert engine.template is not None and engine.tokenizer is not None
            for task in TASKS:
                rendered = [
                    engine.template.render([{"role": "user", "content": question}])
                    for question, _ in data.held_out(task, args.prompts)
                ]
                prompts = [engine.tokenizer.encode_prompt(prompt) for prompt in rendered]
                for price in args.price or ():
                    rows.append({"task": task, "price": price, **priced(engine, prompts, price, args.max_new_tokens)})
                for threshold in () if args.price else (engine.options().threshold, 1.0):
                    ratios = measured(engine, prompts, threshold, args.repeat, args.max_new_tokens)
                    rows.append({"task": task, "threshold": threshold, **ratios})
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(f"{v:.2f}" if isinstance(v, float) else v for v in row.values()) + " |")


if __name__ == "__main__":
    main()
