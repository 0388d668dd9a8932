"""`clover bench BUNDLE`: every mode of one engine on prompts from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clover.engines.bench.machine import CpuSpeeds, measure_cpu
from clover.engines.bench.measure import Plans, Summary, measure, summarise
from clover.engines.bench.roofline import DEFAULT_CARDS, Roofline, against_roofline, count_experts, machines_on
from clover.engines.bench.roofline import to_json as roofline_json
from clover.engines.bundle import Bundle
from clover.engines.conditions import engine_conditions
from clover.engines.gpus import Gpu, find_gpu
from clover.engines.planner.measured import machine_on
from clover.engines.planner.roofline import Machine
from clover.engines.prompts import read_prompts, user_prompt
from clover.engines.trace.routing import routing_graph
from clover.runtime.clover import Clover
from clover.runtime.errors import CloverError, RequestError
from clover.runtime.options import INERT, MODES, DecodeOptions

MAX_SETTINGS = 64
DEFAULT_PROMPTS = (
    "Parse the dispatch: Send UAV7 to Cedar, priority high. UAV12: move waypoint 3 to 120,450.",
    "Explain in three sentences how a tide comes about.",
    "Write a Python function that returns the longest common prefix of a list of strings.",
)


def make_settings(
    engine: Clover,
    modes: Sequence[str],
    thresholds: Sequence[float],
    block_sizes: Sequence[int],
    coreset_top_ps: Sequence[float],
    max_new_tokens: int,
) -> dict[str, DecodeOptions]:
    """Decode options by name: each mode with every combination of the options that act in it.

    The autoregressive mode comes first where it is asked for: ratios are against the first. Raises RequestError.
    """
    settings: dict[str, DecodeOptions] = {}
    own: list[dict[str, Any]] = [{}]
    for name, values in (("threshold", thresholds), ("block_size", block_sizes), ("coreset_top_p", coreset_top_ps)):
        if values:
            own = [{**o, name: v} for o in own for v in values]
            if not any(_acts(name, mode) for mode in modes):
                raise RequestError(name, f"--{name.replace('_', '-')} acts in none of the modes chosen; leave it out.")
    ordered = sorted(dict.fromkeys(modes), key=lambda mode: mode != "autoregressive")
    for mode in ordered:
        for chosen in own:
            acting = {name: value for name, value in chosen.items() if _acts(name, mode)}
            options = engine.options(mode=mode, max_new_tokens=max_new_tokens, **acting)
            label = mode
            if mode != "autoregressive":
                label += f" b{options.block_size} p{options.coreset_top_p:g}"
                label += "" if mode == "self-speculative" else f" t{options.threshold:g}"
            settings[label] = options
    if len(settings) > MAX_SETTINGS:
        raise RequestError("mode", f"{len(settings)} settings are too many; give at most {MAX_SETTINGS}.")
    return settings


def _acts(option: str, mode: str) -> bool:
    return option not in INERT.get(mode, ())


def bench_engine(
    bundle: Path,
    prompts: Path | None,
    load: Mapping[str, Any],
    *,
    modes: Sequence[str],
    thresholds: Sequence[float],
    block_sizes: Sequence[int],
    coreset_top_ps: Sequence[float],
    repeats: int,
    max_new_tokens: int,
    experts: bool = True,
    cards: Sequence[str] = (),
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> dict[str, Any]:
    """Measures and returns JSON data: conditions and one summary a setting. `experts`: also count them in an untimed pass,
    and compare with the roofline; `cards`: of which cards, default two. Raises CloverError."""
    if not 1 <= repeats <= 1000:
        raise RequestError("repeats", f"--repeats is {repeats}; it must be from 1 to 1000.")
    if cards and not experts:
        raise RequestError("roofline", "--roofline needs the experts counted; leave --no-experts out.")
    targets = [find_gpu(card, "--roofline") for card in cards or DEFAULT_CARDS] if experts else []
    chats = read_prompts(prompts) if prompts else [user_prompt(p, "prompts") for p in DEFAULT_PROMPTS]
    threads, plans = load.get("threads"), Plans()
    with Clover.load(bundle, **load) as engine:
        opened, context, most = engine.bundle, engine.session.max_context, engine.session.max_rows
        settings = make_settings(
            engine, modes or MODES, thresholds, block_sizes, coreset_top_ps, max_new_tokens
        )  # fmt: skip
        ids = [chat.encode(engine) for chat in chats]
        for chat, prompt in zip(chats, ids, strict=True):  # refused before anything is measured
            for options in settings.values():
                engine.decoder(prompt, options, chat.where)
        if experts:
            routing_graph(opened)  # raises now rather than when all is measured
        conditions = engine_conditions(opened, threads, load.get("provider"))
        on_cpu = experts and conditions["provider"] == "cpu"
        before = measure_cpu(conditions["threads"]) if on_cpu else None
        runs = measure(
            engine, ids, settings, repeats=repeats, plans=plans if experts else None,
            progress=lambda done, total: progress("replies", done, total),
        )  # fmt: skip
        speeds = before.best(measure_cpu(conditions["threads"])) if before else None
    # the engine is closed by now: a model is in memory once
    conditions |= {
        "prompts": len(ids),
        "prompt_tokens": round(sum(map(len, ids)) / len(ids), 1),
        "reply_tokens": _mean_tokens([r.tokens for own in runs.values() for r in own]),
        "max_new_tokens": max_new_tokens,
        "runs_per_setting": len(ids) * repeats,
        "order": "interleaved, shuffled, after one warm-up round",
    }
    rooflines: dict[str, Roofline] = {}
    if experts:
        steps = count_experts(
            opened, plans.found, max_context=context, max_rows=most, threads=threads,
            progress=lambda done, total: progress("experts", done, total),
        )  # fmt: skip
        here = this_machine(opened, conditions["activations"], speeds)
        machines, reasons = machines_on(opened, targets, load.get("max_context"))
        rooflines = against_roofline(runs, steps, here, machines)
        conditions |= {
            "experts": opened.manifest.config.num_experts,
            "roofline": _described_machine(here, speeds),
            "cards": {g.name: reasons.get(g.name, g.title) for g in targets},
        }
    return {"conditions": conditions, "settings": [_described(s, settings, rooflines) for s in summarise(runs)]}


def _mean_tokens(counts: Sequence[int]) -> float:
    return round(sum(counts) / len(counts), 1)


def this_machine(bundle: Bundle, activations: str, speeds: CpuSpeeds | None) -> Machine | None:
    """What the bundle ran on, None where that is a card that isn't known. speeds: of the CPU, where it ran there."""
    manifest = bundle.manifest
    if speeds is not None:
        return machine_on(manifest.config, manifest.precision_plan, speeds.target(int8=activations == "8-bit"))
    from clover.engines.gpu_driver import detected_gpu

    try:
        gpu: Gpu = detected_gpu()
        resident = manifest.engines[0].resident_experts if manifest.engines else None
        backend = manifest.target.backend if manifest.engines else "onnxruntime"
        return machine_on(
            manifest.config, manifest.precision_plan, gpu, backend=backend, resident_experts=resident
        )  # fmt: skip
    except CloverError:
        return None


def _described_machine(here: Machine | None, speeds: CpuSpeeds | None) -> dict[str, Any] | None:
    if here is None:
        return None
    found: dict[str, Any] = {
        "machine": here.gpu.title,
        "read_gbs": round(here.gpu.bandwidth_gbs, 1),
        "peak_gflops": round(1e3 * here.gpu.bf16_tflops, 1),
        "source": here.gpu.source,
    }
    if speeds is not None:
        found |= {"float32_gflops": round(speeds.float32_gflops, 1), "int8_gflops": round(speeds.int8_gflops, 1)}
    return found


def _described(
    summary: Summary, settings: Mapping[str, DecodeOptions], rooflines: Mapping[str, Roofline]
) -> dict[str, Any]:
    """A setting's numbers and the options that act in its mode."""
    options = settings[summary.name]
    kept = ["mode", "temperature", "presence_penalty", "repetition_penalty"]
    kept += [name for name in ("threshold", "block_size", "coreset_top_p") if _acts(name, options.mode)]
    roofline = roofline_json(rooflines[summary.name]) if rooflines else {}
    return {**summary.to_json(), **roofline, "options": {k: getattr(options, k) for k in kept}}
