"""`clover calibrate` and `clover build --calibration`: the statistics are the model's own, and only they change a build."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrate_support import PROMPTS, calibrated, prompts, record_briefly
from engine_support import bundle
from oracle_support import tiny_checkpoint
from safetensors.numpy import load_file
from typer.testing import CliRunner

from clover.cli import app
from clover.engines.build import BuildRequest, build_target
from clover.engines.calibrate import record as recording
from clover.engines.calibrate.record import CalibrationSession
from clover.engines.calibrate.taps import add_taps
from clover.engines.inspect import inspect_path
from clover.engines.observed_session import ObservedSession
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
    tmp_path: Path,
) -> None:
    """Every matrix row by row: weighted where its inputs are known, by the weights alone for rare experts and the embedding."""
    checkpoint, file = calibrated()
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
    tmp_path: Path,
) -> None:
    checkpoint, file = calibrated()
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
