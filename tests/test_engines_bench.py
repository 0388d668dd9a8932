"""`clover bench` of an engine: settings, prompts from files, interleaved runs, numbers with their conditions."""

from __future__ import annotations

import io
import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_support import NANO, bundle
from rich.console import Console
from serve_support import chat_ids, nano
from typer.testing import CliRunner

from clover.cli import app
from clover.engines.bench.command import bench_engine, make_settings, this_machine
from clover.engines.bench.machine import CpuSpeeds
from clover.engines.bench.measure import Plans, Run, Spread, measure, run_once, summarise
from clover.engines.bench.roofline import against_roofline, count_experts
from clover.engines.bench.tables import render
from clover.engines.gpus import find_gpu
from clover.engines.planner.full_size import FULL_SIZE
from clover.engines.planner.measured import MeasuredStep, floor_seconds, machine_on
from clover.engines.planner.plan import plan
from clover.engines.prompts import read_prompts
from clover.engines.trace.record import record
from clover.exporter.precision import plan_precision
from clover.runtime.errors import CloverError, RequestError
from clover.runtime.terminal.progress import Progress


def test_an_engine_is_measured_under_every_setting(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Repeat: Alder Birch"}, {"messages": [{"role": "user", "content": "Repeat: Cedar"}]}]
    prompts.write_text("\n\n".join(map(json.dumps, lines)))
    told: list[tuple[str, int, int]] = []
    result = bench_engine(
        bundle(NANO).directory, prompts, {"threads": 1, "max_context": 256, "cache": False},
        modes=("fill", "autoregressive", "self-speculative"), thresholds=(0.5, 0.95), block_sizes=(8, 32),
        coreset_top_ps=(), repeats=2, max_new_tokens=12, cards=("h200",),
        progress=lambda *seen: told.append(seen),
    )  # fmt: skip
    assert json.loads(json.dumps(result)) == result
    for phase in ("replies", "experts"):  # each begins anew and comes to its end
        seen = [(done, total) for what, done, total in told if what == phase]
        assert [done for done, _ in seen] == list(range(seen[0][0], seen[0][1] + 1)) and seen[0][0] <= 1
    names = [s["name"] for s in result["settings"]]
    assert names[0] == "autoregressive" and len(names) == len(set(names)) == 1 + 4 + 2
    by_name = {s["name"]: s for s in result["settings"]}
    base = by_name["autoregressive"]
    assert base["ratio"]["median"] == 1.0 and base["steps_per_block"] is None and base["runs"] == 4
    for name, s in by_name.items():
        assert s["options"]["mode"] == name.split()[0] and s["runs"] == 4
        if name.startswith("self-speculative"):
            assert s["tokens"] == base["tokens"]  # the same replies
        if name.startswith("fill"):
            assert f"t{s['options']['threshold']:g}" in name and s["steps_per_block"] >= 1
        spreads = [
            "tokens_per_second", "first_token_ms", "ratio", "experts_per_layer", "roofline_percent",
        ]  # fmt: skip
        assert s["tokens_per_step_spread"]["low"] <= s["tokens_per_step"] <= s["tokens_per_step_spread"]["high"]
        assert (s["steps_per_block_spread"] is None) == (s["steps_per_block"] is None)
        if s["steps_per_block"] is not None:
            spreads.append("steps_per_block_spread")
        for spread in (s[key] for key in spreads):
            assert (
                0 < spread["low"] <= spread["quarter"] <= spread["median"] <= spread["three_quarters"] <= spread["high"]
            )
        assert 0 < s["python_share"] < 1
        least = 2.0 if name == "autoregressive" else 2.1  # a row takes two experts; a block's rows differ
        assert least <= s["experts_per_layer"]["median"] <= 16
        assert list(s["roofline_tokens_per_second"]) == ["h200"] and s["roofline_tokens_per_second"]["h200"] > 1e5
    assert base["experts_per_layer"]["high"] == 2.0
    page = shown(result)
    assert all(page.count(name) >= 3 for name in names)
    for condition in (
        "model nano", "threads 1", "prompts 2", "max new tokens 12", "runs per setting 4", "interleaved", "batch 1",
        "clover 0.", "backend onnxruntime 1.", "precision fp32", "prompt tokens", "reply tokens", "target cpu", "GB/s", "GFLOP/s",
    ):  # fmt: skip
        assert condition in page, condition


def shown(result: Any) -> str:
    out = io.StringIO()
    Console(width=200, file=out).print(render(result))
    return " ".join(out.getvalue().split())


def test_without_experts_nothing_is_said_of_a_roofline() -> None:
    result = bench_engine(
        bundle(NANO).directory, None, {"threads": 1, "max_context": 256, "cache": False}, modes=("autoregressive",),
        thresholds=(), block_sizes=(), coreset_top_ps=(), repeats=1, max_new_tokens=2, experts=False,
    )  # fmt: skip
    assert not {"roofline", "cards"} & set(result["conditions"]) and "experts_per_layer" not in result["settings"][0]
    assert "roofline" not in shown(result).lower()


def test_a_graph_that_hides_its_routing_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clover.engines.trace.routing.routing_values", lambda layers: ["layers.0.nothing"])
    monkeypatch.setattr("clover.engines.bench.command.measure", lambda *a, **k: pytest.fail("it was measured"))
    result = CliRunner().invoke(app, ["bench", str(bundle(NANO).directory), "--max-context", "256"])
    assert result.exit_code == 2 and "does not show layers.0.nothing" in result.output


@pytest.mark.parametrize("mode", ["fill", "autoregressive", "self-speculative", "adaptive"])
def test_the_counted_steps_are_those_that_ran(mode: str) -> None:
    """Rows, context and experts of a reply run again are those of the reply: its tokens are all accounted for."""
    engine, plans = nano(), Plans()
    prompt = chat_ids(engine, "Parse the dispatch: Send UAV7 to Cedar, priority high.")
    options = engine.options(mode=mode, max_new_tokens=40, **({} if mode == "autoregressive" else {"block_size": 16}))
    runs = [run_once(engine, prompt, options, 0, plans) for _ in range(2)]
    assert len(plans.found) == 1 + runs[1].plan  # a reply that ran the same steps is kept once
    if mode != "adaptive":
        assert len(plans.found) == 1
    counted = count_experts(engine.bundle, plans.found, max_context=512, max_rows=0, threads=1)
    for rows, plan_ in zip(plans.found, counted, strict=True):
        committed = 0
        for r, step in zip(rows, plan_.steps, strict=True):
            assert (step.commit, step.preview, step.logit_rows) == (
                r.commit,
                len(r.tokens) - r.commit,
                len(r.logit_rows),
            )
            if not r.undo:
                assert step.context == committed
            committed = step.context + step.commit
            assert 2 <= step.distinct <= min(16, 2 * len(r.tokens))
        assert len(prompt) <= committed <= len(prompt) + 40 + 16
    if mode == "fill":
        traced = record(engine, prompt, options, threads=1)
        assert statistics.mean(counted[0].developing) == pytest.approx(statistics.mean(e.mean for e in traced.experts))
    told = against_roofline(
        {"a": runs},
        counted,
        None,
        {"h200": machine_on(engine.bundle.manifest.config, engine.bundle.manifest.precision_plan, find_gpu("h200"))},
    )
    assert told["a"].percent is None and told["a"].cards["h200"] > 0


@pytest.mark.parametrize("card", ["rtx-5070-ti", "h200"])
def test_measured_steps_cost_what_the_plan_says_of_the_same_steps(card: str) -> None:
    precision = plan_precision(FULL_SIZE, "int4")
    (costs,) = plan(FULL_SIZE, find_gpu(card), precision, max_context=4096).performance
    machine = machine_on(FULL_SIZE, precision, find_gpu(card), max_context=4096)
    for cost, (commit, preview, logits) in (
        (costs.autoregressive, (1, 0, 1)), (costs.denoise, (0, 32, 32)), (costs.commit_and_preview, (32, 32, 32)),
        (costs.verify, (32, 0, 32)), (costs.prefill, (512, 0, 0)),
    ):  # fmt: skip
        step = MeasuredStep(commit, preview, logits, 4096, cost.distinct)
        assert floor_seconds(machine, [step, step]) == pytest.approx(2 * cost.seconds)
    here = replace(find_gpu("cpu"), bandwidth_gbs=10.0, bf16_tflops=1e6)  # bytes alone decide
    on_cpu = machine_on(FULL_SIZE, precision, here)
    slower = floor_seconds(on_cpu, [MeasuredStep(1, 0, 1, 0, 16.0)]) - floor_seconds(
        on_cpu, [MeasuredStep(1, 0, 1, 0, 8.0)]
    )
    assert slower == pytest.approx(8 * 40 * on_cpu.weights.per_expert / 10e9)


def test_what_ran_on_a_card_is_held_against_the_card_that_the_driver_names(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = nano().bundle.manifest
    engine = SimpleNamespace(resident_experts=20)
    target = manifest.target.model_copy(update={"backend": "tensorrt", "name": "h200", "sm": 90})
    gpu_bundle: Any = SimpleNamespace(manifest=manifest.model_copy(update={"engines": (engine,), "target": target}))
    monkeypatch.setattr("clover.engines.gpu_driver.detected_gpu", lambda: find_gpu("h200"))
    machine = this_machine(gpu_bundle, "bfloat16", None)
    assert machine is not None and (machine.gpu.name, machine.experts_resident, machine.backend) == (
        "h200",
        20,
        "tensorrt",
    )

    def none() -> None:
        raise CloverError("no driver")

    monkeypatch.setattr("clover.engines.gpu_driver.detected_gpu", none)
    assert this_machine(gpu_bundle, "bfloat16", None) is None
    speeds = CpuSpeeds(10.0, 50.0, 200.0)
    for activations, peak in (("8-bit", 0.2), ("float32", 0.05)):
        machine = this_machine(nano().bundle, activations, speeds)
        assert machine is not None and (machine.gpu.bandwidth_gbs, machine.gpu.bf16_tflops) == (10.0, peak)
    assert speeds.best(CpuSpeeds(9.0, 60.0, 100.0)) == CpuSpeeds(10.0, 60.0, 200.0)


def test_a_card_that_is_too_small_is_a_sentence() -> None:
    with pytest.raises(CloverError, match="What would fit"):
        machine_on(FULL_SIZE, plan_precision(FULL_SIZE, "fp32"), find_gpu("rtx-5070"))


def test_runs_are_interleaved_and_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt meets every setting before the next prompt does, in changing order; the warm-up round doesn't count."""
    seen: list[tuple[int, str]] = []

    def run_once(engine: Any, prompt: Any, options: Any, number: int, plans: Any) -> Run:
        seen.append((number, options))
        return Run(number, 4, 10, 5, 2, {"a": 1.0, "b": 0.5}[options], 0.25, 0.1)

    monkeypatch.setattr("clover.engines.bench.measure.run_once", run_once)
    runs = measure(None, [[1], [2], [3]], {"a": "a", "b": "b"}, repeats=8)  # type: ignore[arg-type,dict-item]
    assert [n for n, _ in seen] == [0, 0, 1, 1, 2, 2] * 9
    assert all({o for _, o in seen[i : i + 2]} == {"a", "b"} for i in range(0, len(seen), 2))
    assert len({tuple(o for _, o in seen[i : i + 2]) for i in range(0, len(seen), 2)}) == 2
    a, b = summarise(runs)
    assert (a.runs, a.tokens, a.tokens_per_step, a.steps_per_block) == (24, 240, 2.0, 2.5)
    assert a.tokens_per_step_spread == Spread(2.0, 2.0, 2.0, 2.0, 2.0) and a.steps_per_block_spread is not None
    assert a.steps_per_block_spread.median == 2.5
    assert b.ratio == Spread(2.0, 2.0, 2.0, 2.0, 2.0) and b.python_share == 0.5


def test_settings_hold_only_options_that_act() -> None:
    settings = make_settings(nano(), ("adaptive", "autoregressive"), (0.5,), (8, 16), (0.5, 1.0), 20)
    assert next(iter(settings)) == "autoregressive" and len(settings) == 5
    assert {(o.block_size, o.coreset_top_p) for n, o in settings.items() if n != "autoregressive"} == {
        (8, 0.5), (8, 1.0), (16, 0.5), (16, 1.0)
    }  # fmt: skip
    with pytest.raises(RequestError, match="too many"):
        make_settings(nano(), ("fill",), [n / 100 for n in range(1, 90)], (), (), 20)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("p.txt", "\n \n", "holds no prompts"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": 1}', "line 2"),
        ("p.jsonl", '{"prompt": "a"}\n\n{broken', "line 3"),
        ("p.jsonl", "[1]", "line 1"),
        ("p.txt", "\udcff", "UTF-8"),
    ],
)
def test_a_bad_prompt_file_is_refused_by_line(tmp_path: Path, name: str, text: str, told: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CloverError, match=told):
        read_prompts(path)


def test_bad_requests_are_sentences(tmp_path: Path) -> None:
    directory, run = str(bundle(NANO).directory), CliRunner()
    for arguments, told in (
        ([], "needs a bundle"),
        ([directory, "--mode", "quick"], "mode"),
        ([directory, "--repeats", "0"], "repeats"),
        ([directory, "--threshold", "2"], "threshold"),
        ([directory, "--block-size", "33"], "block_size"),
        ([directory, "--prompts", str(tmp_path / "none.txt")], "No such file"),
        ([directory, "--max-context", "8"], "context holds 8"),
        ([directory, "--roofline", "rtx-9999"], "--roofline 'rtx-9999' is no known target"),
        ([directory, "--roofline", "h200", "--no-experts"], "leave --no-experts out"),
        (["--compare", "http://a", "http://b", "--cases", "x", "--no-experts"], "--experts measures a bundle"),
        ([directory, "--mode", "autoregressive", "--block-size", "8"], "--block-size acts in none"),
        ([directory, "--mode", "self-speculative", "--threshold", "0.9"], "--threshold acts in none"),
    ):
        result = run.invoke(app, ["bench", *arguments])
        assert result.exit_code == 2 and told in result.output and "Traceback" not in result.output


BUNDLE_ALONE = (
    "prompts",
    "mode",
    "threshold",
    "block-size",
    "coreset-top-p",
    "repeats",
    "roofline",
    "max-context",
    "threads",
    "provider",
)
COMPARISON_ALONE = ("cases", "field-a", "field-b", "runs", "timeout", "out", "ledger", "api-key")


@pytest.mark.parametrize("option", [*BUNDLE_ALONE, *COMPARISON_ALONE])
def test_an_option_of_the_other_kind_of_bench_is_refused_by_name(option: str) -> None:
    what = ["--compare", "http://a", "http://b", "--cases", "x"] if option in BUNDLE_ALONE else ["bundle"]
    result = CliRunner().invoke(app, ["bench", *what, f"--{option}", "1"])
    assert result.exit_code == 2 and result.stderr.startswith(f"clover: --{option} "), result.output


def test_work_that_begins_anew_is_timed_anew(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 100.0, 100.0, 110.0]).__next__
    monkeypatch.setattr("clover.runtime.terminal.progress.time.monotonic", clock)
    progress = Progress("measuring", "")
    progress("replies", 50, 50)
    progress("experts", 0, 20)
    progress("experts", 20, 20)
    lines = capsys.readouterr().err.splitlines()
    assert "0.5 /s" in lines[0] and "2 /s, 0 s left" in lines[-1]


@pytest.mark.parametrize(
    ("unit", "done", "shown"),
    [(" prompts", 8, "8 prompts/s"), (" weights", 12_000_000, "12 M weights/s"), ("", 8, "8 /s"), ("", 8000, "8 k/s")],
)
def test_a_rate_has_one_space_where_it_needs_one(
    unit: str, done: int, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clover.runtime.terminal.progress.time.monotonic", iter([0.0, 1.0]).__next__)
    Progress("working", unit)("things", done, done)
    assert capsys.readouterr().err == f"working: 100 % (things), {shown}, 0 s left\n"
