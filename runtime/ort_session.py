"""A step session over ONNX Runtime: state bound once, updated in place, no logits on the host."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from clover.runtime.session import Candidates, Floats, Ints, SequenceRows, Slots, StateSnapshot

# Bindings are kept for shapes (sequences, rows, logit rows, candidates, adjusted ids) that were used last. A greedy step's
# buffers take some KB, one that samples (1024 candidates a row) half a MB a sequence: so all shapes of ordinary traffic
# fit. What does not is bound again when it comes back, which costs far less than the step.
BINDINGS_KEPT = 128
BINDING_BYTES = 64 * 2**20
STATE_KINDS = ("recurrent", "conv", "keys", "values")


@dataclass(frozen=True)
class _Binding:
    """Buffers of one shape of step, bound to the engine once and refilled for every run."""

    io: Any  # onnxruntime.IOBinding
    token_ids: Ints  # [S, T]
    commit_length: Ints  # [S]
    row_length: Ints  # [S]
    position: Ints  # [S]
    live_length: Ints  # [1]
    top_p: Floats  # [S]
    logit_rows: Ints  # [S, R]
    adjust_ids: Ints  # [S, P]
    adjust_scale: Floats  # [S, P]
    adjust_bias: Floats  # [S, P]
    ids: Ints  # [S, R, K]
    logprobs: Floats
    scores: Floats
    logits: Floats | None

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers; the state, which all bindings share, is not among them."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))


class OrtSession(Slots):
    """Implements StepSession with onnxruntime.InferenceSession."""

    def __init__(
        self,
        model: bytes | Path,
        weights: Path | None,
        *,
        sequences: int = 1,
        max_context: int,
        max_rows: int = 256,
        threads: int | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        prepack: bool = True,
        profile: Path | None = None,
    ) -> None:
        """`model` is the graph's bytes, its external data relative to `weights`; or an optimised model's path.
        `prepack`: rearrange the weights for this CPU, into private memory where the model does not bring them along.
        `profile`: how the path of a file begins that takes the time of every node (see `end_profile`)."""
        self._session = create_session(
            model, weights, threads=threads, providers=providers, prepack=prepack, profile=profile
        )
        super().__init__(sequences, max_context, max_rows)
        self._before: dict[int, StateSnapshot] = {}  # by slot: where a tentative commit returns to
        self._state: dict[str, npt.NDArray[np.float32]] = {}
        self._vocab = 0
        # rows that are not committed lie past the last committed one, so the cache has room for a step more
        capacity = max_context + max_rows
        for value in self._session.get_inputs():
            if value.name.split(".")[0] in STATE_KINDS:
                named = {"S": sequences, "capacity": capacity}
                shape = [named.get(d, d) for d in value.shape]
                self._state[value.name] = np.zeros(shape, np.float32)  # pages are taken when first written
        for value in self._session.get_outputs():
            if value.name == "logits":
                self._vocab = value.shape[2]
        self._values: dict[int, dict[str, Any]] = {}
        self._bindings: OrderedDict[tuple[int, ...], _Binding] = OrderedDict()  # least recently used first
        self._binding_bytes = 0

    # -- StepSession -----------------------------------------------------------------------------

    def step(self, rows: Sequence[SequenceRows], candidates: int = 1) -> list[Candidates]:
        for r in rows:
            self._prepare(r)
        active = 1 + max(r.slot for r in rows)
        length = max(len(r.tokens) for r in rows)
        asked = max(len(r.logit_rows) for r in rows)
        adjusted = _bucket(max(len(r.adjustment.ids) for r in rows))
        binding = self._binding(active, length, asked, candidates, adjusted)
        self._fill(binding, rows)
        self._session.run_with_iobinding(binding.io)
        out = []
        for r in rows:
            n = len(r.logit_rows)
            self._positions[r.slot] += r.commit
            logits = None if binding.logits is None else binding.logits[r.slot, :n]
            out.append(
                Candidates(binding.ids[r.slot, :n], binding.logprobs[r.slot, :n], binding.scores[r.slot, :n], logits)
            )
        return out

    def reset(self, slot: int) -> None:
        for name, array in self._state.items():
            if name.startswith(("recurrent", "conv")):
                array[slot] = 0.0
        self._positions[slot] = 0
        self._before.pop(slot, None)

    def snapshot(self, slot: int) -> StateSnapshot:
        position = int(self._positions[slot])
        tensors = {}
        for name, array in self._state.items():
            cached = name.startswith(("keys", "values"))  # [S, heads, capacity, dim]: only committed rows
            tensors[name] = (array[slot, :, :position] if cached else array[slot]).copy()
        return StateSnapshot(position, tensors, self._before.get(slot))

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        if snapshot.tensors.keys() != self._state.keys() or snapshot.position > self._max_context:
            raise ValueError("the snapshot is of another model, or longer than this session's context")
        for name, array in self._state.items():
            if name.startswith(("keys", "values")):
                array[slot, :, : snapshot.position] = snapshot.tensors[name]
            else:
                array[slot] = snapshot.tensors[name]
        self._positions[slot] = snapshot.position
        self._before.pop(slot, None)
        if snapshot.before is not None:
            self._before[slot] = snapshot.before

    def close(self) -> None:
        self._bindings.clear()
        self._binding_bytes = 0
        self._values.clear()
        self._state.clear()
        del self._session

    def end_profile(self) -> Path:
        """Ends the profile that the session was opened with and returns its file."""
        return Path(self._session.end_profiling())

    def _prepare(self, r: SequenceRows) -> None:
        """Takes a tentative commit back, or keeps aside what one needs: KV rows past the position don't matter."""
        before = self._before.pop(r.slot, None)
        if r.undo:
            if before is None:
                raise ValueError(f"slot {r.slot} is to undo a step that was not tentative")
            for name, array in before.tensors.items():
                self._state[name][r.slot] = array
            self._positions[r.slot] = before.position
        if r.tentative:
            kept = {n: a[r.slot].copy() for n, a in self._state.items() if n.startswith(("recurrent", "conv"))}
            self._before[r.slot] = StateSnapshot(int(self._positions[r.slot]), kept)

    # -- buffers ---------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Bytes reserved for the state of all slots; untouched KV pages take no memory yet."""
        return sum(a.nbytes for a in self._state.values())

    @property
    def binding_bytes(self) -> int:
        """Bytes of the buffers kept for steps to come."""
        return self._binding_bytes

    def _fill(self, b: _Binding, rows: Sequence[SequenceRows]) -> None:
        active = len(b.token_ids)
        b.commit_length[:] = 0
        b.row_length[:] = 0
        b.position[:] = self._positions[:active]
        b.live_length[0] = int(b.position.max()) + b.token_ids.shape[1]
        if len(rows) < active or len(rows) > 1:
            b.token_ids[:] = 0
            b.logit_rows[:] = 0
            b.top_p[:] = 1.0
            b.adjust_ids[:] = 0
            b.adjust_scale[:] = 1.0
            b.adjust_bias[:] = 0.0
        for r in rows:
            s, n, p = r.slot, len(r.tokens), len(r.adjustment.ids)
            b.token_ids[s, :n] = r.tokens
            b.commit_length[s] = r.commit
            b.row_length[s] = n
            b.top_p[s] = r.coreset_top_p
            b.logit_rows[s, : len(r.logit_rows)] = r.logit_rows
            if b.adjust_ids.shape[1]:
                b.adjust_ids[s, :p] = r.adjustment.ids
                b.adjust_scale[s, :p] = r.adjustment.scale
                b.adjust_bias[s, :p] = r.adjustment.bias
                if p < b.adjust_ids.shape[1]:
                    _pad_adjustment(b, s, p)

    def _binding(self, active: int, length: int, asked: int, candidates: int, adjusted: int) -> _Binding:
        key = (active, length, asked, candidates, adjusted)
        if key in self._bindings:
            self._bindings.move_to_end(key)
            return self._bindings[key]
        binding = self._bind(*key)
        self._bindings[key] = binding
        self._binding_bytes += binding.nbytes
        while len(self._bindings) > 1 and (len(self._bindings) > BINDINGS_KEPT or self._binding_bytes > BINDING_BYTES):
            _, oldest = self._bindings.popitem(last=False)
            self._binding_bytes -= oldest.nbytes
        return binding

    def _bind(self, s: int, t: int, r: int, k: int, p: int) -> _Binding:
        def ints(*shape: int) -> Ints:
            return np.zeros(shape, np.int64)

        def floats(*shape: int) -> Floats:
            return np.zeros(shape, np.float32)

        io = self._session.io_binding()
        binding = _Binding(
            io=io,
            token_ids=ints(s, t),
            commit_length=ints(s),
            row_length=ints(s),
            position=ints(s),
            live_length=ints(1),
            top_p=floats(s),
            logit_rows=ints(s, r),
            adjust_ids=ints(s, p),
            adjust_scale=floats(s, p),
            adjust_bias=floats(s, p),
            ids=ints(s, r, k),
            logprobs=floats(s, r, k),
            scores=floats(s, r, k),
            logits=floats(s, r, self._vocab) if self._vocab else None,
        )
        inputs: dict[str, npt.NDArray[Any]] = {
            "token_ids": binding.token_ids,
            "commit_length": binding.commit_length,
            "row_length": binding.row_length,
            "position": binding.position,
            "live_length": binding.live_length,
            "coreset_top_p": binding.top_p,
            "logit_rows": binding.logit_rows,
            "candidates": np.array([k], np.int64),
            "adjust_ids": binding.adjust_ids,
            "adjust_scale": binding.adjust_scale,
            "adjust_bias": binding.adjust_bias,
        }
        outputs: dict[str, npt.NDArray[Any]] = {
            "candidate_ids": binding.ids,
            "candidate_logprobs": binding.logprobs,
            "candidate_scores": binding.scores,
        }
        if binding.logits is not None:
            outputs["logits"] = binding.logits
        for name, array in inputs.items():
            io.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        for name, array in outputs.items():
            io.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
        for name, value in self._state_values(s).items():
            io.bind_ortvalue_input(name, value)
            io.bind_ortvalue_output(f"next.{name}", value)  # the same memory: updated in place
        return binding

    def _state_values(self, active: int) -> dict[str, Any]:
        """The state of the first `active` slots as engine values over the session's own memory."""
        if active not in self._values:
            self._values[active] = {n: ort.OrtValue.ortvalue_from_numpy(a[:active]) for n, a in self._state.items()}
        return self._values[active]


def _bucket(count: int) -> int:
    """Adjusted ids are padded to a power of two, so that few shapes of step occur."""
    return 0 if count == 0 else max(16, 1 << (count - 1).bit_length())


def _pad_adjustment(b: _Binding, s: int, used: int) -> None:
    """Fills the rest of a row with the first id again: equal updates of one id do no harm."""
    if used:
        b.adjust_ids[s, used:] = b.adjust_ids[s, 0]
        b.adjust_scale[s, used:] = b.adjust_scale[s, 0]
        b.adjust_bias[s, used:] = b.adjust_bias[s, 0]
    else:
        b.adjust_ids[s, :] = 0
        b.adjust_scale[s, :] = 1.0
        b.adjust_bias[s, :] = 0.0


def create_session(
    model: bytes | Path,
    weights: Path | None,
    *,
    threads: int | None,
    providers: Sequence[str],
    prepack: bool = True,
    profile: Path | None = None,
) -> Any:  # onnxruntime.InferenceSession
    """Opens a model whose external data lies in `weights`. Warnings are ours to give, not the library's."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if threads:
        options.intra_op_num_threads = threads
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if weights is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
    source = model if isinstance(model, bytes) else str(model)
    return ort.InferenceSession(source, options, providers=list(providers))
