"""`clover calibrate` and `clover build --calibration`: the statistics are the model's own, and only they change a build."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import NANO, bundle
from oracle_support import tiny_checkpoint
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from clover.cli import app
from clover.engines.build import BuildRequest, build_target
from clover.engines.calibrate import record as recording
from clover.engines.calibrate.record import CalibrationSession, record
from clover.engines.calibrate.taps import add_taps
from clover.engines.inspect import inspect_path
from clover.engines.observed_session import ObservedSession
from clover.engines.prompts import Prompt
from clover.engines.validate.bundle_tensors import BundleTensors, WeightStore
from clover.engines.validate.layers import Remembered
from clover.exporter.calibration import LEAST_ROWS, Calibration, load_calibration, save_calibration
from clover.exporter.checkpoint import Checkpoint
from clover.exporter.quantize import quantize_int4
from clover.exporter.reference import ReferenceModel
from clover.exporter.safetensors_file import SafetensorsFile
from clover.exporter.weighted_quantize import quantize_int4_weighted
from clover.exporter.weights import row_blocks
from clover.plugins.numerics import silu
from clover.runtime.errors import BundleError, CloverError
from clover.runtime.session import SequenceRows

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], list(range(20, 60)), [100]]
record_briefly = partial(record, max_new_tokens=12, threads=1)


def prompts(ids: Sequence[Sequence[int]] = PROMPTS) -> list[Prompt]:
    return [Prompt(f"line {n}", tokens=tokens) for n, tokens in enumerate(ids, 1)]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a tiny checkpoint, its calibration). Few prompts and 16 experts, so that some are hit too rarely."""
    checkpoint, out = tiny_checkpoint(2), tmp_path_factory.mktemp("calibration") / "c.safetensors"
    record_briefly(bundle(checkpoint), prompts(), out)
    return checkpoint, out


# -- what is recorded -------------------------------------------------------------------------------


class WatchedReference(ReferenceModel):
    """The NumPy model, which keeps every row that a matrix reads, by checkpoint name and expert."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: dict[Any, list[Any]] = defaultdict(list)
        self.valid: Any = None

    def _linear(self, x: Any, name: str) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        self.seen[name].append(rows)
        return super()._linear(x, name)

    def _moe(self, x: Any, p: str, rows: Any, top_p: Any, capture: Any, layer: str) -> Any:
        kept: dict[str, Any] = {}
        out = super()._moe(x, p, rows, top_p, kept, layer)
        for e in range(self.config.num_experts):
            own = x[(kept[layer + "experts"] == e).any(axis=-1)]
            gate, up = np.split(self._tensor(p + "experts.gate_up_proj")[e], 2)
            self.seen[p + "experts.gate_up_proj", e].append(own)
            self.seen[p + "experts.down_proj", e].append(silu(own @ gate.T) * (own @ up.T))
        return out


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int4"])
def test_statistics_are_those_of_the_reference_model_on_the_same_steps(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every matrix and expert, over prefills, denoise steps, commits with the next preview; in small buffers as well."""
    monkeypatch.setattr(recording, "rows_kept", lambda config: 8)
    monkeypatch.setattr(recording, "PREFILL_ROWS", 1)
    built = bundle(tiny_checkpoint(2), precision=precision)
    steps: list[SequenceRows | None] = []

    class Session(CalibrationSession):
        def observe(self, rows: Any, values: Any) -> None:
            steps.extend(rows)
            super().observe(rows, values)

        def reset(self, slot: int) -> None:
            steps.append(None)
            super().reset(slot)

    monkeypatch.setattr(recording, "CalibrationSession", Session)
    found = record_briefly(built, prompts([*PROMPTS, list(range(10, 150))]), tmp_path / "c.safetensors")
    assert {(s.commit > 0, len(s.tokens) > s.commit) for s in steps if s} == {
        (True, False),
        (True, True),
        (False, True),
    }
    model = WatchedReference(built.manifest.config, Remembered(BundleTensors(WeightStore(built))), np.float64)
    for s in steps:
        if s is None:
            state = model.initial_state(1)
            continue
        _, state = model.step(s.tokens[None], np.array([s.commit]), np.array([len(s.tokens)]), state, s.coreset_top_p)
        head = model.seen["lm_head.weight"]
        head[-1] = head[-1][s.logit_rows]
    names = {item.name: item.sources[0] for item in WeightStore(built).items}
    checked = 0
    for name, statistics in found.calibration.statistics.items():
        experts = range(built.manifest.config.num_experts) if "experts" in name.split(".") else [None]
        for e in experts:
            rows = np.concatenate(model.seen[names[name] if e is None else (names[name], e)])
            index = () if e is None else e
            assert statistics.count[index] == len(rows), (name, e)
            if len(rows):
                wanted = (rows**2).mean(0), np.abs(rows).mean(0)
                for got, want in zip((statistics.mean_square, statistics.mean_abs), wanted, strict=True):
                    np.testing.assert_allclose(got[index], want, rtol=2e-2 if precision == "int4" else 2e-3, atol=1e-6)
                checked += 1
    assert checked > 100
    rows_seen = found.calibration.recorded["rows"]
    assert rows_seen["commit"] == sum(s.commit for s in steps if s)
    assert rows_seen["commit"] + rows_seen["preview"] == sum(len(s.tokens) for s in steps if s)


def test_padding_behind_a_shorter_sequence_counts_nothing() -> None:
    import onnx

    built = bundle(tiny_checkpoint(2))
    model = onnx.load_model_from_string(built.graph_bytes)
    taps = add_taps(model, built.manifest.config, built.directory)
    graph, seen = model.SerializeToString(), list[dict[str, Any]]()

    class Session(ObservedSession):
        def observe(self, rows: Any, values: Any) -> None:
            seen.append(values)

    texts = [np.arange(5, 10), np.arange(40, 57)]
    for slots in ([0, 1], [0], [1]):
        session = Session(graph, built.directory, taps.outputs, sequences=2, max_context=64, threads=1)
        session.step([SequenceRows(n, texts[n], len(texts[n]), np.zeros(0, np.int64)) for n in slots])
        session.close()
    both, *alone = seen
    names = {name for item, pair in taps.sums.items() if item != "lm_head" for name in pair}
    for name in names:
        np.testing.assert_allclose(both[name], alone[0][name] + alone[1][name], rtol=1e-4, atol=1e-5)
    assert len(names) > 10


def test_a_run_that_broke_off_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the third prompt: nothing stands at the output path, and the next run ends with the same file."""
    monkeypatch.setattr(recording, "rows_kept", lambda config: 8)
    built, out = bundle(tiny_checkpoint(2)), tmp_path / "c.safetensors"
    whole = record_briefly(built, prompts(), tmp_path / "whole.safetensors")
    assert whole.resumed == 0

    def interrupt(what: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    def broken_off() -> None:
        with pytest.raises(KeyboardInterrupt):
            record_briefly(built, prompts(), out, progress=interrupt)
        assert [p.name for p in tmp_path.glob("*c.safetensors*")] == [".c.safetensors.partial"]

    broken_off()
    with pytest.raises(CloverError, match="was not made by"):
        load_calibration(tmp_path / ".c.safetensors.partial")
    resumed = record_briefly(built, prompts(), out)
    assert resumed.resumed == 2 and not (tmp_path / ".c.safetensors.partial").exists()
    assert resumed.calibration.sha256 == whole.calibration.sha256
    out.unlink()
    broken_off()
    other = record_briefly(built, prompts(PROMPTS[::-1]), out)  # other prompts: not a continuation
    assert other.resumed == 0
    broken = out.with_name(".c.safetensors.partial")
    broken.write_bytes(b"torn")
    assert record_briefly(built, prompts(), out).resumed == 0 and not broken.exists()


# -- what it changes in a build ---------------------------------------------------------------------


def stored(directory: Path, name: str) -> tuple[Any, Any]:
    """An INT4 matrix of a bundle: bytes [rows, K / 2] and scales [rows, K / group]."""
    for file in ("weights/dense.safetensors", "weights/experts.safetensors"):
        tensors = SafetensorsFile(directory / file)
        if f"{name}.scales" in tensors.tensors:
            scales = tensors.read(f"{name}.scales")
            scales = scales.reshape(-1, scales.shape[-1])
            return tensors.read(f"{name}.qweight").reshape(len(scales), -1), scales
    raise KeyError(name)


def test_a_calibrated_build_weighs_errors_where_it_may_and_says_where(
    calibrated: tuple[Path, Path], tmp_path: Path
) -> None:
    """Every matrix row by row: weighted where its inputs are known, by the weights alone for rare experts and the embedding."""
    checkpoint, file = calibrated
    built = build_target(BuildRequest(checkpoint, tmp_path / "b", calibration=file))
    calibration, source = load_calibration(file), Checkpoint.open(checkpoint)
    plan = built.manifest.precision_plan
    kinds = {"weighted": 0, "weights alone": 0}
    for item in WeightStore(built).items:
        if item.precision != "int4":
            continue
        values, scales = stored(built.directory, item.name)
        for first, block in row_blocks(source, item):
            expert = first // item.shape[1] if item.tensor_class == "experts" else None
            options: dict[str, Any] = {"signed_scales": item.tensor_class == "experts"}
            importance = calibration.importance(item, expert)
            if item.tensor_class == "embed":
                assert importance is None
            elif expert is not None:
                assert (importance is None) == (calibration.statistics[item.name].count[expert] < LEAST_ROWS)
            kinds["weights alone" if importance is None else "weighted"] += 1
            packed, expected = (
                quantize_int4(block, plan.group_size, **options)
                if importance is None
                else quantize_int4_weighted(block, importance, plan.group_size, **options)
            )
            rows = slice(first, first + len(block))
            np.testing.assert_array_equal(values[rows], packed)
            np.testing.assert_array_equal(scales[rows], expected)
    assert min(kinds.values()) > 5, kinds

    used = built.manifest.calibration
    assert (
        used is not None and used.sha256 == calibration.sha256 == inspect_path(built.directory)["calibration"]["sha256"]
    )
    assert "embed" not in used.tensors and "lm_head" in used.tensors and "layers.0.experts.down" in used.tensors
    assert {int(n): list(e) for n, e in used.weight_only_experts.items()} == {
        n: rare for n in range(built.manifest.config.num_hidden_layers) if (rare := calibration.rare_experts(n))
    }
    again = build_target(BuildRequest(checkpoint, tmp_path / "again", calibration=file))
    assert again.manifest.files == built.manifest.files
    plain = bundle(checkpoint, precision="int4")
    assert plain.manifest.calibration is None
    assert {n for n in plain.manifest.files if plain.manifest.files[n] != built.manifest.files[n]} == {
        "weights/dense.safetensors",
        "weights/experts.safetensors",
        "graphs/step.onnx",  # which says where in them a tensor lies
    }
    shown = CliRunner().invoke(app, ["inspect", str(built.directory)]).stdout
    assert f"calibration: {used.sha256[:16]} (3 prompts" in shown
    told = CliRunner().invoke(app, ["validate", str(built.directory), "--checkpoint", str(checkpoint), "--no-trace"])
    assert told.exit_code == 0, told.output


def test_unfinished_and_reused_weights_must_be_of_the_same_calibration(
    calibrated: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, file = calibrated
    other = tmp_path / "other.safetensors"
    found = load_calibration(file)
    save_calibration(
        other, Calibration(found.statistics, found.checkpoint, found.model, {**found.recorded, "prompts": 9})
    )
    expected = build_target(BuildRequest(checkpoint, tmp_path / "expected", calibration=file))

    def stop(what: str, done: int, total: int) -> None:
        if done > 0.9 * total:  # the dense file is whole, of the experts' only the last tensors are missing
            raise KeyboardInterrupt

    for first in (other, None):
        with pytest.raises(KeyboardInterrupt):
            build_target(BuildRequest(checkpoint, tmp_path / "b", calibration=first, replace=True), stop)
        assert (tmp_path / ".b.partial").is_dir()
        built = build_target(BuildRequest(checkpoint, tmp_path / "b", calibration=file, replace=True))
        assert built.manifest.files == expected.manifest.files
        assert load_file(built.directory / "weights/experts.safetensors").keys()
    for calibration, says in ((other, "another calibration"), (None, "another calibration")):
        with pytest.raises(BundleError, match=says):
            build_target(BuildRequest(checkpoint, tmp_path / "c", calibration=calibration, reuse=tmp_path / "b"))
    with pytest.raises(BundleError, match="no calibration"):
        plain = bundle(checkpoint, precision="int4").directory
        build_target(BuildRequest(checkpoint, tmp_path / "c", calibration=file, reuse=plain))
    reused = build_target(BuildRequest(checkpoint, tmp_path / "c", calibration=file, reuse=tmp_path / "b"))
    assert reused.manifest.files == expected.manifest.files


# -- the command line, and what is refused ----------------------------------------------------------


def clover(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(result: Result) -> str:
    """The one sentence of a refusal."""
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    (line,) = result.stderr.strip().splitlines()
    assert not result.stdout and line.startswith("clover: ") and line.endswith("."), line
    return line


def test_the_verb_calibrates_nano_for_a_build(tmp_path: Path) -> None:
    file, out = tmp_path / "p.jsonl", tmp_path / "c.safetensors"
    lines: list[Any] = [
        {"prompt": "Send UAV7 to Cedar, priority high."},
        {"messages": [{"role": "user", "content": "Weather for Oslo?"}, {"role": "assistant", "content": "Cold."},
                      {"role": "user", "content": "And Lima?"}]},
        {"text": "Alder Birch Cedar"},
        {"tokens": [5, 6, 7]},
    ]  # fmt: skip
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    arguments: list[str | Path] = [
        "calibrate",
        bundle(NANO).directory,
        "--prompts",
        file,
        "-o",
        out,
        "--max-new-tokens",
        "24",
        "--threads",
        "1",
    ]
    data = json.loads(clover(*arguments, "--json").stdout)
    assert data["recorded"]["prompts"] == 4 and data["recorded"]["rows"]["preview"] > 0
    found = load_calibration(out)
    assert data["sha256"] == found.sha256
    for x in data["layers"]:
        counts = found.statistics[f"layers.{x['layer']}.experts.down"].count
        assert x["rows"] == counts.tolist() and sum(x["rows"]) == 2 * sum(data["recorded"]["rows"].values())
        assert x["never"] == np.flatnonzero(counts == 0).tolist()
        assert x["rare"] == np.flatnonzero((counts > 0) & (counts < LEAST_ROWS)).tolist()
    assert any(x["rare"] or x["never"] for x in data["layers"])
    assert "already exists" in refused(clover(*arguments))
    shown = clover(*arguments, "--force", "--mode", "autoregressive")
    assert shown.exit_code == 0 and "4 prompts" in shown.stdout and "0 previewed" in shown.stdout
    assert "never hit" in shown.stdout and "weight-only" in shown.stdout
    built = clover("build", NANO, "-o", tmp_path / "b", "--int4", "--calibration", out, "--json")
    assert json.loads(built.stdout)["manifest"]["calibration"]["prompts"] == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "c.safetensors", "p.jsonl"], "nothing is left beside"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "a"}\n\n{broken', "line 3 is no JSON"),
        ('{"prompt": "a", "text": "b"}', "line 1 must be an object with one of"),
        ('{"tokens": [1, "x"]}', "line 1 must be"),
        ('{"tokens": []}', "line 1 holds no tokens"),
        ('{"text": "a"}\n{"tokens": [99999]}', "line 2 holds token 99999"),
        ('{"tokens": [3]}', "line 1"),
        (json.dumps({"tokens": [5] * 4096}), "line 1 has 4096 tokens and the context holds 4096"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": [{"role": 1}]}', "line 2"),
    ],
)
def test_prompts_that_can_not_be_run_are_refused_by_line(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    line = refused(clover("calibrate", bundle(NANO).directory, "--prompts", file, "-o", tmp_path / "c.safetensors"))
    assert told in line and f"--prompts {file}" in line
    assert [p.name for p in tmp_path.iterdir()] == ["p.jsonl"]


def test_other_mistakes_with_calibrate_are_sentences(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("Hello\n")
    nano = bundle(NANO).directory
    mistakes: list[tuple[list[str | Path], str]] = [
        ([nano, "--prompts", tmp_path / "none.txt", "-o", tmp_path / "c"], "No such file"),
        ([nano, "--prompts", file, "-o", tmp_path / "none" / "c"], "is not a directory"),
        ([nano, "--prompts", file, "-o", tmp_path], "is a directory"),
        ([nano, "--prompts", file, "-o", tmp_path / "c", "--mode", "quick"], "mode"),
        ([nano, "--prompts", file, "-o", tmp_path / "c", "--max-new-tokens", "0"], "max-new-tokens"),
        ([nano, "--prompts", file, "-o", tmp_path / "c", "--threads", "0"], "threads is 0"),
        ([bundle(tiny_checkpoint(2)).directory, "--prompts", file, "-o", tmp_path / "c"], "takes only `tokens`"),
        ([NANO, "--prompts", file, "-o", tmp_path / "c"], "is not a bundle"),
    ]
    for arguments, told in mistakes:
        assert told in refused(clover("calibrate", *arguments)), arguments
    assert [p.name for p in tmp_path.iterdir()] == ["p.txt"]


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def rewritten(**metadata: str) -> Callable[[Path], None]:
    """The same tensors under other metadata, as another program would write them."""

    def change(path: Path) -> None:
        save_file(load_file(path), path, {**SafetensorsFile(path).metadata, **metadata})

    return change


def without_a_matrix(path: Path) -> None:
    found = load_calibration(path)
    kept = {n: s for n, s in found.statistics.items() if n != "lm_head"}
    save_calibration(path, Calibration(kept, found.checkpoint, found.model, found.recorded))


def not_finite(path: Path) -> None:
    found = load_calibration(path)
    found.statistics["lm_head"].mean_square[0] = np.nan
    save_calibration(path, found)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (Path.unlink, "does not exist"),
        (flipped, "is damaged"),
        (cut, "is damaged"),
        (lambda path: path.write_text("{}"), "is damaged, or no calibration"),
        (lambda path: save_file({"a": np.zeros(1)}, path), "was not made by `clover calibrate`"),
        (rewritten(version="2"), "has format version 2"),
        (rewritten(checkpoint="0" * 64), "is damaged"),
        (without_a_matrix, "has nothing for lm_head"),
        (not_finite, "no numbers"),
    ],
)
def test_a_calibration_that_can_not_be_used_is_refused(
    change: Callable[[Path], Any], told: str, calibrated: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, file = calibrated[0], tmp_path / "c.safetensors"
    shutil.copyfile(calibrated[1], file)
    change(file)
    line = refused(clover("build", checkpoint, "-o", tmp_path / "b", "--int4", "--calibration", file))
    assert told in line and f"--calibration {file}" in line
    assert not (tmp_path / "b").exists() and not (tmp_path / ".b.partial").exists()


def test_a_calibration_without_a_use_is_refused_by_name(calibrated: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, file = calibrated
    out: list[str | Path] = ["-o", tmp_path / "b", "--calibration", file]
    assert "recorded with another checkpoint" in refused(clover("build", tiny_checkpoint(3), *out))
    assert "--calibration acts on integer weights, and bf16 has none" in refused(
        clover("build", checkpoint, *out, "--bf16")
    )
    for precision in ("int8", "fp32,embed=int4"):
        assert "has nothing to act on" in refused(clover("build", checkpoint, *out, "--precision", precision))
    assert not (tmp_path / "b").exists()
