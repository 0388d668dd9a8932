"""What calibration wins: INT4 bundles of nano with and without it, against float32, on prompts it was not calibrated with.

    python benchmarks/calibration.py --count 200

First the error of single matrices' outputs, on the inputs that held-out prompts give them: with groups of 128 as well,
where a matrix is that wide. Then whole bundles: KL divergence and RMS difference of log-probabilities over rows of
held-out prompts and answers, committed and previewed (all masked, half masked), and exact answers by threshold fill as
in benchmarks/quality.py. Calibrated bundles are measured with several sets of prompts; ranges are over these.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from quality import NANO, TASKS, held_out, score

from clover import Clover
from clover.engines.build import BuildRequest, build_target
from clover.engines.bundle import Bundle
from clover.engines.calibrate.record import record
from clover.engines.calibrate.taps import matrix_inputs
from clover.engines.observed_session import ObservedSession, give_out
from clover.engines.prompts import Prompt, user_prompt
from clover.engines.validate.layers import log_softmax
from clover.exporter.calibration import load_calibration
from clover.exporter.checkpoint import Checkpoint
from clover.exporter.precision import GROUP_SIZES, plan_precision
from clover.exporter.quantize import dequantize_int4, quantize_int4
from clover.exporter.store_plan import store_plan
from clover.exporter.weighted_quantize import quantize_int4_weighted
from clover.exporter.weights import row_blocks
from clover.plugins.moe_coreset_routing.spec import USED_LOGIT
from clover.runtime.session import SequenceRows, StepSession
from clover.runtime.terminal.progress import Progress

GROUPS = (64, 32)  # of whole bundles: nano's experts are 64 wide, so it has none of 128
WAYS = ("weights alone", "calibrated")

Floats = npt.NDArray[np.floating[Any]]


def calibration_prompts(count: int, evaluated: int, seed: int) -> list[Prompt]:
    """Prompts of the training distribution, none of which is evaluated."""
    kept = {prompt for task in TASKS for prompt, _ in held_out(task, evaluated)}
    import data

    r, prompts = Random(seed), list[Prompt]()
    while len(prompts) < count:
        prompt, _ = data.sample(r)
        if prompt not in kept:
            prompts.append(user_prompt(prompt, f"prompt {len(prompts) + 1}"))
    return prompts


def held_out_rows(engine: Clover, count: int) -> Iterator[tuple[str, SequenceRows]]:
    """("commit" or "preview", rows of one step) of every held-out prompt with its answer."""
    assert engine.tokenizer is not None and engine.template is not None
    mask, size = engine.bundle.manifest.mask_token_id, int(engine.bundle.manifest.defaults["block_size"])
    r = np.random.default_rng(0)

    def rows(tokens: Sequence[int] | npt.NDArray[np.int64], commit: bool) -> SequenceRows:
        array = np.asarray(tokens, np.int64)
        return SequenceRows(0, array, len(array) if commit else 0, np.arange(len(array)), coreset_top_p=0.9)

    for task in TASKS:
        for prompt, answer in held_out(task, count):
            rendered = engine.template.render([{"role": "user", "content": prompt}])
            engine.session.reset(0)
            yield "commit", rows(engine.tokenizer.encode_prompt(rendered), True)
            block = np.array(engine.tokenizer.encode(answer)[:size])
            yield "preview", rows(np.full(size, mask), False)
            yield "preview", rows(np.where(r.random(len(block)) < 0.5, mask, block), False)
            yield "commit", rows(block, True)


# -- single matrices --------------------------------------------------------------------------------


class Moments(ObservedSession):
    """Sums x xᵀ over the rows x that each matrix reads, of routed experts' gate and up projections each one's own."""

    def __init__(self, bundle: Bundle) -> None:
        import onnx

        model = onnx.load_model_from_string(bundle.graph_bytes)
        names = matrix_inputs(model, bundle.manifest.config, bundle.directory)
        self.inputs = {name: x for name, x in names.items() if not name.endswith("experts.down")}
        routings = [f"layers.{n}.routing" for n in range(bundle.manifest.config.num_hidden_layers)]
        observed = list(dict.fromkeys([*self.inputs.values(), *routings]))
        give_out(model, observed)
        self.sums: dict[tuple[str, int], Floats] = {}
        super().__init__(model.SerializeToString(), bundle.directory, observed, max_context=1024)

    def observe(self, rows: Sequence[SequenceRows], values: dict[str, npt.NDArray[Any]]) -> None:
        for name, source in self.inputs.items():
            x = values[source].astype(np.float64)
            used = np.ones((len(x), 1), bool)
            if name.endswith("experts.gate_up"):
                used = values[f"{name.removesuffix('.experts.gate_up')}.routing"][0] > USED_LOGIT
            for part in range(used.shape[1]):
                own = x[used[:, part]]
                self.sums[name, part] = self.sums.get((name, part), 0) + own.T @ own


def matrix_errors(bundle: Bundle, count: int, file: Path) -> dict[tuple[str, int, str], float]:
    """Relative RMS error of matrices' outputs on held-out rows, by (tensor class, group size, way)."""
    session = Moments(bundle)
    with Clover.load(bundle.directory, cache=False) as engine:
        engine.session = session
        for _, rows in held_out_rows(engine, count):
            session.step([rows])
    checkpoint, calibration = Checkpoint.open(NANO), load_calibration(file)
    signal: dict[tuple[str, int, str], float] = {}
    noise: dict[tuple[str, int, str], float] = {}
    for item in store_plan(checkpoint.config, plan_precision(checkpoint.config, "int4")):
        if item.name not in session.inputs:
            continue
        routed = item.tensor_class == "experts"
        for first, w in row_blocks(checkpoint, item):
            expert = first // item.shape[1] if routed else None
            h, importance = session.sums[item.name, expert or 0], calibration.importance(item, expert)
            if importance is None:
                continue
            for group in (g for g in GROUP_SIZES if w.shape[1] % g == 0):
                for way in WAYS:
                    stored = (
                        quantize_int4(w, group, signed_scales=routed)
                        if way == WAYS[0]
                        else quantize_int4_weighted(w, importance, group, signed_scales=routed)
                    )
                    key, off = (str(item.tensor_class), group, way), w - dequantize_int4(*stored).astype(np.float64)
                    noise[key] = noise.get(key, 0.0) + float(((off @ h) * off).sum())
                    signal[key] = signal.get(key, 0.0) + float(((w @ h) * w).sum())
    return {key: (noise[key] / signal[key]) ** 0.5 for key in noise}


# -- whole bundles ----------------------------------------------------------------------------------


def held_out_logits(engine: Clover, count: int) -> Iterator[tuple[str, Floats]]:
    """("commit" or "preview", log-probabilities [rows, V])."""
    for kind, rows in held_out_rows(engine, count):
        yield kind, _log_probabilities(engine.session, rows)


def _log_probabilities(session: StepSession, rows: SequenceRows) -> Floats:
    (candidates,) = session.step([rows])
    assert candidates.logits is not None
    return log_softmax(candidates.logits.astype(np.float64))


def compare(engine: Clover, reference: Sequence[tuple[str, Floats]], count: int) -> dict[str, float]:
    """The engine's log-probabilities against float32's: KL in nats a row, RMS, share of rows with the same best token."""
    kl: dict[str, list[float]] = {"commit": [], "preview": []}
    squares, same, rows, values = 0.0, 0, 0, 0
    for (kind, mine), (_, exact) in zip(held_out_logits(engine, count), reference, strict=True):
        kl[kind] += (np.exp(exact) * (exact - mine)).sum(axis=1).tolist()
        squares += float(((mine - exact) ** 2).sum())
        same += int((mine.argmax(1) == exact.argmax(1)).sum())
        rows, values = rows + len(mine), values + mine.size
    found = {"kl_commit": float(np.mean(kl["commit"])), "kl_preview": float(np.mean(kl["preview"]))}
    return found | {"rms": float(np.sqrt(squares / values)), "same": same / rows}


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--prompts", type=int, default=200, help="prompts of a calibration")
    a.add_argument("--sets", type=int, default=3, help="calibrations with prompts of their own")
    a.add_argument("--count", type=int, default=200, help="held-out prompts of each task")
    a.add_argument("--json", action="store_true")
    args = a.parse_args()
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    total = len(GROUPS) * (1 + args.sets)
    with tempfile.TemporaryDirectory() as folder, Progress("comparing", " bundles", quiet=args.json) as bar:
        home = Path(folder)
        exact = build_target(BuildRequest(NANO, home / "fp32", precision="fp32", with_logits=True))
        files = [home / f"{seed}.safetensors" for seed in range(args.sets)]
        for seed, file in enumerate(files):
            record(exact, calibration_prompts(args.prompts, args.count, seed), file)
        errors = matrix_errors(exact, args.count, files[0])
        with Clover.load(exact.directory, cache=False) as engine:
            reference = list(held_out_logits(engine, args.count))
        for group in GROUPS:
            for calibration in (None, *files):
                request = BuildRequest(NANO, home / "int4", group_size=group, calibration=calibration, with_logits=True, replace=True)  # fmt: skip
                with Clover.load(build_target(request).directory, cache=False) as engine:
                    measured = compare(engine, reference, args.count)
                    measured |= {task: score(engine, task, args.count, mode="fill").share for task in TASKS}
                found.setdefault((group, WAYS[calibration is not None]), []).append(measured)
                bar("bundles", sum(map(len, found.values())), total)
    if args.json:
        matrices = [{"class": c, "group_size": g, "scales": w, "error": e} for (c, g, w), e in errors.items()]
        bundles = [{"group_size": g, "scales": w, "runs": runs} for (g, w), runs in found.items()]
        print(json.dumps({"matrices": matrices, "bundles": bundles}, indent=1))
        return
    print_tables(errors, found)


def print_tables(
    errors: dict[tuple[str, int, str], float], found: dict[tuple[int, str], list[dict[str, float]]]
) -> None:
    print(f"| error of the output | {' | '.join(f'groups of {g}' for g in GROUP_SIZES)} |\n|---|{'---|' * 3}")
    for kind in dict.fromkeys(c for c, _, _ in errors):
        cells = [" → ".join(f"{100 * errors[kind, g, way]:.2f}" for way in WAYS) + " %" for g in GROUP_SIZES]
        print(f"| {kind} | {' | '.join(cells)} |")
    print(
        f"\n| group, scales | KL committed | KL previewed | RMS | same best token | {' | '.join(TASKS)} |\n|{'---|' * 8}"
    )
    for (group, way), runs in found.items():

        def cell(name: str, digits: int, factor: float = 1.0, runs: list[dict[str, float]] = runs) -> str:
            values = [factor * run[name] for run in runs]
            spread = f" ({min(values):.{digits}f}–{max(values):.{digits}f})" if len(values) > 1 else ""
            return f"{np.mean(values):.{digits}f}{spread}"

        numbers = [cell("kl_commit", 5), cell("kl_preview", 4), cell("rms", 3), f"{cell('same', 2, 100)} %"]
        print(f"| {group}, {way} | {' | '.join([*numbers, *(f'{cell(t, 1, 100)} %' for t in TASKS)])} |")


if __name__ == "__main__":
    main()
