"""Runs prompts through the real engine and block loop, and sums up what every matrix reads on the way."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clover import __version__
from clover.engines.bundle import Bundle
from clover.engines.calibrate.sums import ModelSums, rows_kept
from clover.engines.calibrate.taps import Taps, add_taps
from clover.engines.observed_session import Array, ObservedSession
from clover.engines.open import PREFILL_ROWS
from clover.engines.prompts import Prompt
from clover.engines.validate.bundle_tensors import WeightStore
from clover.exporter.calibration import Calibration, read_tensors, save_calibration, write_tensors
from clover.plugins.moe_coreset_routing.spec import USED_LOGIT
from clover.runtime.clover import TOKENIZER_DIRECTORY, Clover, load_template
from clover.runtime.errors import CloverError
from clover.runtime.loop import StepTimes, decode
from clover.runtime.options import DecodeOptions
from clover.runtime.session import SequenceRows
from clover.runtime.text.tokenizer import Tokenizer

UNFINISHED = "clover-calibration-unfinished"

Progress = Callable[[str, int, int], None]  # (what, done, total), in prompts


@dataclass(frozen=True)
class Recording:
    """A finished calibration, and how it came about."""

    calibration: Calibration
    seconds: float  # of this run
    resumed: int  # prompts that an earlier run had done


class CalibrationSession(ObservedSession):
    """One slot of a bundle on the CPU, which adds the inputs of every step's matrices to `sums`."""

    def __init__(self, bundle: Bundle, threads: int | None) -> None:
        import onnx

        manifest = bundle.manifest
        self._config = manifest.config
        model = onnx.load_model_from_string(bundle.graph_bytes)
        self._taps: Taps = add_taps(model, self._config, bundle.directory)
        super().__init__(
            model.SerializeToString(),
            bundle.directory,
            self._taps.outputs,
            max_context=manifest.max_context,
            max_rows=max(PREFILL_ROWS, 2 * max(manifest.block_sizes)),
            threads=threads,
        )
        store = WeightStore(bundle)
        self._store, self._gate_up = store, {i.layer: i for i in store.items if i.transform == "expert_gate_up"}
        self.sums = ModelSums.empty(self._config)
        self.rows = {"commit": 0, "preview": 0}
        self._most_waiting, self._saved = rows_kept(self._config), 0

    @property
    def worth_saving(self) -> bool:
        """Whether enough rows have come together since `saved`."""
        return sum(self.rows.values()) - self._saved >= self._most_waiting

    def saved(self) -> None:
        """What is summed so far is on the disk."""
        self._saved = sum(self.rows.values())

    def add_waiting(self) -> None:
        """Adds the rows of routed experts that wait."""
        self.sums.add_waiting(lambda layer, expert: self._store.read_expert(self._gate_up[layer], expert))

    def observe(self, rows: Sequence[SequenceRows], values: dict[str, Array]) -> None:
        (row,) = rows  # one sequence: all logit rows were asked for, none pads another's
        self.rows["commit"] += row.commit
        self.rows["preview"] += len(row.tokens) - row.commit
        for name, (square, magnitude) in self._taps.sums.items():
            count = len(row.logit_rows) if name == "lm_head" else len(row.tokens)
            self.sums.by_name[name].add(values[square], values[magnitude], count)
        for layer, (hidden, routing) in self._taps.experts.items():
            used = values[routing][0, : len(row.tokens)] > USED_LOGIT
            self.sums.wait(layer, values[hidden][: len(row.tokens)], used)
        if self.sums.rows_waiting >= 2 * self._most_waiting:  # a prompt longer than the buffer
            self.add_waiting()


def open_engine(bundle: Bundle, threads: int | None = None) -> tuple[Clover, CalibrationSession]:
    """The bundle with a session that records. Raises BundleError when its graph can't be opened up."""
    session = CalibrationSession(bundle, threads)
    folder = bundle.directory / TOKENIZER_DIRECTORY
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    return Clover(bundle, session, tokenizer, load_template(folder, tokenizer) if tokenizer else None), session


def record(
    bundle: Bundle,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    mode: str = "fill",
    max_new_tokens: int = 256,
    threads: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Recording:
    """Answers every prompt greedily with up to `max_new_tokens` tokens, and writes the statistics to `out`.

    What is summed so far stands in `.NAME.partial` beside it, written anew whenever enough rows have come together; a
    run that broke off goes on behind the last of them when bundle, prompts and options are the same.
    Raises CloverError for a prompt that can't be decoded, before the first is, and for values that are not finite.
    """
    began = time.monotonic()
    engine, session = open_engine(bundle, threads)
    with engine:
        options = engine.options(mode=mode, max_new_tokens=max_new_tokens, temperature=0.0)
        ids = [prompt.encode(engine) for prompt in prompts]
        for prompt, tokens in zip(prompts, ids, strict=True):
            engine.decoder(tokens, options, prompt.where)
        recorded = _conditions(bundle, ids, options)
        partial = out.with_name(f".{out.name}.partial")
        done = first = _resume(partial, session, recorded)
        for number in range(first, len(ids)):
            session.reset(0)
            decoder = engine.decoder(ids[number], options)
            for _ in decode(session, decoder, 0, StepTimes()):
                pass
            done = number + 1
            if session.worth_saving and done < len(ids):
                session.add_waiting()
                state = {"done": json.dumps(done), "rows": json.dumps(session.rows), "recorded": json.dumps(recorded)}
                write_tensors(partial, session.sums.tensors(), state, UNFINISHED)
                session.saved()
            progress("prompts", done, len(ids))
        progress("inputs of the experts' down projections", 0, 0)
        session.add_waiting()
        _check_finite(bundle, session.sums)
        manifest = bundle.manifest
        statistics = {name: s.means() for name, s in session.sums.by_name.items()}
        recorded |= {"prompts": len(ids), "rows": session.rows}
        made = Calibration(statistics, manifest.model.checkpoint, manifest.model.name, recorded)
        sha256 = save_calibration(out, made)
        partial.unlink(missing_ok=True)
    made = Calibration(statistics, made.checkpoint, made.model, recorded, sha256)
    return Recording(made, time.monotonic() - began, first)


def _conditions(bundle: Bundle, ids: Sequence[Sequence[int]], options: DecodeOptions) -> dict[str, Any]:
    """What the result depends on, for a reader and to tell whether an unfinished run may go on."""
    weights = sorted((n, e.sha256) for n, e in bundle.manifest.files.items() if n.endswith((".safetensors", ".onnx")))
    return {
        "clover": __version__,
        "precision": bundle.manifest.precision_plan.name,
        "bundle": hashlib.sha256(json.dumps(weights).encode()).hexdigest(),
        "prompts_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        "mode": options.mode,
        "block_size": options.block_size,
        "threshold": options.threshold,
        "coreset_top_p": options.coreset_top_p,
        "max_new_tokens": options.max_new_tokens,
    }


def _resume(partial: Path, session: CalibrationSession, recorded: Mapping[str, Any]) -> int:
    """Prompts that an unfinished run of the same kind has done; its sums go to the session. 0: begin at the beginning."""
    if not partial.is_file():
        return 0
    with suppress(CloverError, KeyError, ValueError):  # damaged, or of something else: it is written over
        tensors, state = read_tensors(partial, UNFINISHED)
        if json.loads(state["recorded"]) == dict(recorded):
            session.sums.take(tensors)
            session.rows = json.loads(state["rows"])
            session.saved()
            return int(json.loads(state["done"]))
    return 0


def _check_finite(bundle: Bundle, sums: ModelSums) -> None:
    for name, s in sums.by_name.items():
        if not np.isfinite(s.square).all():
            raise CloverError(
                f"{bundle.directory} computes values that are not finite: the inputs of {name} overflow; validate the bundle."
            )
