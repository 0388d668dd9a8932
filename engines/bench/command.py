"""`clover bench BUNDLE`: every mode of one engine on prompts from a file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clover.engines.bench.measure import Spread, Summary, measure, summarise
from clover.runtime.clover import Clover
from clover.runtime.errors import CloverError, RequestError
from clover.runtime.options import MODES, DecodeOptions

MAX_SETTINGS = 64
DEFAULT_PROMPTS = (
    "Parse the dispatch: Send UAV7 to Cedar, priority high. UAV12: move waypoint 3 to 120,450.",
    "Explain in three sentences how a tide comes about.",
    "Write a Python function that returns the longest common prefix of a list of strings.",
)


def read_prompts(path: Path | None) -> list[Any]:
    """Chats from a file: a prompt a line, or JSON lines with `prompt` or `messages`. None: three of our own.

    Raises CloverError naming a line that can't be read.
    """
    if path is None:
        return [[{"role": "user", "content": p}] for p in DEFAULT_PROMPTS]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise CloverError(f"--prompts {path} is not UTF-8 text; save it as UTF-8.") from None
    chats = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            chats.append(_chat(line, f"--prompts {path}, line {number}"))
        else:
            chats.append([{"role": "user", "content": line}])
    if not chats:
        raise CloverError(f"--prompts {path} holds no prompts; write one a line.")
    return chats


def _chat(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CloverError(f"{where} is no JSON ({error}); mend or remove it.") from None
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return [{"role": "user", "content": value["prompt"]}]
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return value["messages"]
    raise CloverError(f"{where} must be an object with a text `prompt` or a list `messages`; mend or remove it.")


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
    """Whether a mode uses an option: all three are of blocks, and a verified draft needs no threshold."""
    return mode != "autoregressive" and not (mode == "self-speculative" and option == "threshold")


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
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measures and returns JSON data: conditions and one summary a setting. Raises CloverError."""
    if not 1 <= repeats <= 1000:
        raise RequestError("repeats", f"--repeats is {repeats}; it must be from 1 to 1000.")
    chats = read_prompts(prompts)
    with Clover.load(bundle, **load) as engine:
        if engine.template is None or engine.tokenizer is None:
            raise RequestError("prompts", "this bundle has no tokenizer or chat template, so it can't answer prompts.")
        settings = make_settings(
            engine, modes or MODES, thresholds, block_sizes, coreset_top_ps, max_new_tokens
        )  # fmt: skip
        ids = [engine.tokenizer.encode_prompt(engine.template.render(chat)) for chat in chats]
        for prompt in ids:  # refused before anything is measured
            for options in settings.values():
                engine.decoder(prompt, options, "prompts")
        summaries = summarise(measure(engine, ids, settings, repeats=repeats, progress=progress))
        manifest = engine.bundle.manifest
        conditions = {
            "model": manifest.model.name,
            "checkpoint": manifest.model.checkpoint[:12],
            "clover": manifest.clover_version,
            "target": manifest.target.name,
            "backend": f"{manifest.target.backend} {manifest.target.backend_version}",
            "precision": manifest.precision["classes"]["experts"],
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "threads": load.get("threads") or "one a core",
            "prompts": len(ids),
            "prompt_tokens": round(sum(map(len, ids)) / len(ids), 1),
            "max_new_tokens": max_new_tokens,
            "runs_per_setting": len(ids) * repeats,
            "order": "interleaved, shuffled, after one warm-up round",
        }
    return {"conditions": conditions, "settings": [_described(s, settings[s.name]) for s in summaries]}


def _described(summary: Summary, options: DecodeOptions) -> dict[str, Any]:
    kept = ("mode", "block_size", "threshold", "coreset_top_p", "temperature", "presence_penalty", "repetition_penalty")
    return {**summary.to_json(), "options": {k: getattr(options, k) for k in kept}}


def render(result: Mapping[str, Any]) -> str:
    """A table, its conditions above it."""
    lines = [", ".join(f"{k.replace('_', ' ')} {v}" for k, v in result["conditions"].items())]
    widest = max(len(s["name"]) for s in result["settings"])
    first = result["settings"][0]["name"]
    lines.append(
        f"{'setting':<{widest}}  {'tokens/s':>8} {'quartiles':>13} {'first ms':>9} {'quartiles':>13} {'tok/step':>9} "
        f"{'step/block':>10} {'ratio':>6} {'quartiles':>11}"
    )
    for s in result["settings"]:
        rate, ttft, ratio = (s[k] for k in ("tokens_per_second", "first_token_ms", "ratio"))
        blocks = "-" if s["steps_per_block"] is None else f"{s['steps_per_block']:.2f}"
        lines.append(
            f"{s['name']:<{widest}}  {_median(rate, 0):>8} {_quartiles(rate, 0):>13} {_median(ttft, 1):>9} {_quartiles(ttft, 1):>13} "
            f"{s['tokens_per_step']:>9.2f} {blocks:>10} {_median(ratio, 2):>6} {_quartiles(ratio, 2):>11}"
        )
    lines.append(f"medians over runs; ratio: tokens/s of the same prompt and round against {first}")
    return "\n".join(lines)


def _median(spread: Mapping[str, float] | Spread | None, digits: int) -> str:
    return "-" if spread is None else f"{_as_map(spread)['median']:.{digits}f}"


def _quartiles(spread: Mapping[str, float] | Spread | None, digits: int) -> str:
    if spread is None:
        return "-"
    values = _as_map(spread)
    return f"{values['quarter']:.{digits}f}-{values['three_quarters']:.{digits}f}"


def _as_map(spread: Mapping[str, float] | Spread) -> Mapping[str, float]:
    return vars(spread) if isinstance(spread, Spread) else spread
