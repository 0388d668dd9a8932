"""`clover bench` of an engine: settings, prompts from files, interleaved runs, numbers with their conditions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_support import NANO, bundle
from serve_support import nano
from typer.testing import CliRunner

from clover.cli import app
from clover.engines.bench.command import bench_engine, make_settings, read_prompts, render
from clover.engines.bench.measure import Run, Spread, measure, summarise
from clover.runtime.errors import CloverError, RequestError


def test_an_engine_is_measured_under_every_setting(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Repeat: Alder Birch"}, {"messages": [{"role": "user", "content": "Repeat: Cedar"}]}]
    prompts.write_text("\n\n".join(map(json.dumps, lines)))
    result = bench_engine(
        bundle(NANO).directory, prompts, {"threads": 1, "max_context": 256, "cache": False},
        modes=("fill", "autoregressive", "self-speculative"), thresholds=(0.5, 0.95), block_sizes=(8, 32),
        coreset_top_ps=(), repeats=2, max_new_tokens=12,
    )  # fmt: skip
    assert json.loads(json.dumps(result)) == result
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
        for spread in (s["tokens_per_second"], s["first_token_ms"], s["ratio"]):
            assert (
                0 < spread["low"] <= spread["quarter"] <= spread["median"] <= spread["three_quarters"] <= spread["high"]
            )
        assert 0 < s["python_share"] < 1
    told = render(result)
    assert all(name in told for name in names)
    for condition in ("model nano", "threads 1", "prompts 2", "max new tokens 12", "runs per setting 4", "interleaved"):
        assert condition in told


def test_runs_are_interleaved_and_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt meets every setting before the next prompt does, in changing order; the warm-up round doesn't count."""
    seen: list[tuple[int, str]] = []

    def run_once(engine: Any, prompt: Any, options: Any, number: int) -> Run:
        seen.append((number, options))
        return Run(number, 4, 10, 5, 2, {"a": 1.0, "b": 0.5}[options], 0.25, 0.1)

    monkeypatch.setattr("clover.engines.bench.measure.run_once", run_once)
    runs = measure(None, [[1], [2], [3]], {"a": "a", "b": "b"}, repeats=8)  # type: ignore[arg-type,dict-item]
    assert [n for n, _ in seen] == [0, 0, 1, 1, 2, 2] * 9
    assert all({o for _, o in seen[i : i + 2]} == {"a", "b"} for i in range(0, len(seen), 2))
    assert len({tuple(o for _, o in seen[i : i + 2]) for i in range(0, len(seen), 2)}) == 2
    a, b = summarise(runs)
    assert (a.runs, a.tokens, a.tokens_per_step, a.steps_per_block) == (24, 240, 2.0, 2.5)
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
    "max-context",
    "threads",
    "provider",
)
COMPARISON_ALONE = ("cases", "runs", "timeout", "out", "ledger", "api-key")


@pytest.mark.parametrize("option", [*BUNDLE_ALONE, *COMPARISON_ALONE])
def test_an_option_of_the_other_kind_of_bench_is_refused_by_name(option: str) -> None:
    what = ["--compare", "http://a", "http://b", "--cases", "x"] if option in BUNDLE_ALONE else ["bundle"]
    result = CliRunner().invoke(app, ["bench", *what, f"--{option}", "1"])
    assert result.exit_code == 2 and result.stderr.startswith(f"clover: --{option} "), result.output
