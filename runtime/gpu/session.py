"""A step session over a GPU engine: state stays on the card, a step is one captured graph, little crosses the link."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.engines.manifest import Engine
from clover.exporter.config import ModelConfig
from clover.runtime.errors import CloverError
from clover.runtime.gpu.buffers import Block, Field
from clover.runtime.gpu.device import CardMemoryError, Device, DeviceBuffer, PinnedBuffer
from clover.runtime.gpu.engine import DECODE, PREFILL, StepEngine
from clover.runtime.gpu.experts import ExpertStore
from clover.runtime.gpu.shapes import ShapeLimits, StepShape
from clover.runtime.gpu.tensors import ON_HOST, bound_tensors, state_tensors, step_inputs, step_outputs
from clover.runtime.session import Candidates, SequenceRows, Slots, StateSnapshot

log = logging.getLogger("clover")

GRAPHS_KEPT = 32


@dataclass
class _Prepared:
    """Everything of one shape: the memory its inputs and outputs go through, and its graph once captured."""

    inputs: Block
    outputs: Block
    candidates: PinnedBuffer
    profile: int
    shapes: dict[str, tuple[int, ...]]
    addresses: dict[str, int]
    graph: Any = None
    graphs_fail: bool = False


class GpuSession(Slots):
    """Implements StepSession on one card.

    The first step of a shape runs as it is, so that kernels get compiled and loaded, and is then captured as a CUDA
    graph; from then on a step is one launch: inputs to the card, the engine, results back.
    """

    def __init__(
        self,
        device: Device,
        engine: StepEngine,
        experts: Callable[[int], ExpertStore],
        config: ModelConfig,
        built: Engine,
        limits: ShapeLimits,
        *,
        sequences: int,
        max_context: int,
        with_logits: bool,
        decode_rows: int,
    ) -> None:
        """experts: makes the expert store once the state has its memory, leaving free the bytes it is told. built: the
        engine's manifest entry. decode_rows: most rows of the engine's decode profile.

        Raises BundleError when the engine's tensors are others than the session's."""
        self._device, self._engine = device, engine
        self._config, self._built, self._limits = config, built, limits
        super().__init__(sequences, max_context, limits.rows)
        self._with_logits, self._decode_rows = with_logits, decode_rows
        fields = state_tensors(config, sequences, built.capacity)
        engine.check_tensors(bound_tensors(config, limits.largest(sequences), built.capacity, with_logits))
        engine.check_in_place(fields)
        self._state = {name: _State(device, field) for name, field in fields.items()}
        self._before: dict[int, int] = {}  # slot -> the position a tentative commit returns to
        self._aside: dict[str, _State] = {}  # and the state there, once a commit was tentative
        # tentative commits take as much again as the state without its caches, later
        self._experts = experts(sum(s.buffer.nbytes for n, s in self._state.items() if not _is_cache(n)))
        self._prepared: OrderedDict[StepShape, _Prepared] = OrderedDict()
        self._committed = 0  # rows, since experts last moved
        for slot in range(sequences):
            self.reset(slot)

    # -- StepSession -----------------------------------------------------------------------------

    def step(self, rows: Sequence[SequenceRows], candidates: int = 1) -> list[Candidates]:
        self._device.activate()
        shape = self._limits.shape_of(rows, candidates)
        if self._committed >= self._config.block_size:  # about a block ended: the moment for experts to move
            self._experts.follow_use()
            self._committed = 0
        for r in rows:
            self._take_back_or_keep(r)
        ready = self._ready(shape)
        self._fill(ready.inputs, rows)
        ready.candidates.array.view(np.int64)[0] = shape.candidates
        self._run(ready)
        self._device.synchronize()
        out = ready.outputs.arrays
        self._experts.observe(out["expert_rows"])
        results = []
        for r in rows:
            n, s = len(r.logit_rows), r.slot
            self._positions[s] += r.commit
            self._committed += r.commit
            logits = out["logits"][s, :n] if self._with_logits else None
            results.append(
                Candidates(
                    out["candidate_ids"][s, :n, :candidates],
                    out["candidate_logprobs"][s, :n, :candidates],
                    out["candidate_scores"][s, :n, :candidates],
                    logits,
                )
            )
        return results

    def reset(self, slot: int) -> None:
        self._device.activate()
        for name, state in self._state.items():
            if not _is_cache(name):
                self._device.clear(state.slot(slot), state.slot_bytes)
        self._positions[slot] = 0
        self._before.pop(slot, None)

    def snapshot(self, slot: int) -> StateSnapshot:
        self._device.activate()
        before = None
        if slot in self._before:
            before = StateSnapshot(self._before[slot], self._download(self._aside, slot, 0))
        position = int(self._positions[slot])
        return StateSnapshot(position, self._download(self._state, slot, position), before)

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        if snapshot.tensors.keys() != self._state.keys() or snapshot.position > self._max_context:
            raise ValueError("the snapshot is of another model, or longer than this session's context")
        self._device.activate()
        self._upload(self._state, slot, snapshot.position, snapshot.tensors)
        self._positions[slot] = snapshot.position
        self._before.pop(slot, None)
        if snapshot.before is not None:
            self._upload(self._set_aside(), slot, 0, snapshot.before.tensors)
            self._before[slot] = snapshot.before.position

    def close(self) -> None:
        self._device.activate()
        for ready in self._prepared.values():
            if ready.graph is not None:
                self._device.destroy(ready.graph)
        self._prepared.clear()
        self._engine.close()
        self._device.close()

    # -- state -----------------------------------------------------------------------------------

    def _set_aside(self) -> dict[str, _State]:
        """Memory for what tentative commits return to: all state but the KV caches, whose rows only grow."""
        if not self._aside:
            self._aside = {
                name: _State(self._device, s.field) for name, s in self._state.items() if not _is_cache(name)
            }
        return self._aside

    def _take_back_or_keep(self, r: SequenceRows) -> None:
        """Takes a tentative commit back, or keeps aside what one needs."""
        before = self._before.pop(r.slot, None)
        if r.undo:
            if before is None:
                raise ValueError(f"slot {r.slot} is to undo a step that was not tentative")
            for name, kept in self._aside.items():
                self._device.copy(self._state[name].slot(r.slot), kept.slot(r.slot), kept.slot_bytes)
            self._positions[r.slot] = before
        if r.tentative:
            for name, kept in self._set_aside().items():
                self._device.copy(kept.slot(r.slot), self._state[name].slot(r.slot), kept.slot_bytes)
            self._before[r.slot] = int(self._positions[r.slot])

    def _download(self, states: Mapping[str, _State], slot: int, position: int) -> dict[str, npt.NDArray[Any]]:
        tensors: dict[str, npt.NDArray[Any]] = {}
        for name, state in states.items():
            target = np.empty(state.committed_shape(name, position), state.field.dtype)
            for at, address, nbytes in state.pieces(name, slot, position):
                self._device.download(target.ctypes.data + at, address, nbytes)
            tensors[name] = target
        self._device.synchronize()
        return tensors

    def _upload(
        self, states: Mapping[str, _State], slot: int, position: int, tensors: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        for name, state in states.items():
            source = np.ascontiguousarray(tensors[name], state.field.dtype)
            if source.shape != state.committed_shape(name, position):
                raise ValueError(f"the snapshot's {name} has shape {source.shape}; it is of another model")
            for at, address, nbytes in state.pieces(name, slot, position):
                self._device.upload(address, source.ctypes.data + at, nbytes)
            self._device.synchronize()  # before `source` goes

    # -- one step ----------------------------------------------------------------------------------

    def _fill(self, block: Block, rows: Sequence[SequenceRows]) -> None:
        """Writes a step's inputs; sequences without rows, and padding, change nothing."""
        a = block.arrays
        for name in ("token_ids", "commit_length", "row_length", "logit_rows", "adjust_ids", "adjust_bias"):
            a[name][...] = 0
        a["adjust_scale"][...] = 1.0
        a["coreset_top_p"][...] = 1.0
        a["position"][...] = self._positions[: len(a["position"])]
        for r in rows:
            s, n, p = r.slot, len(r.tokens), len(r.adjustment.ids)
            a["token_ids"][s, :n] = r.tokens
            a["commit_length"][s], a["row_length"][s] = r.commit, n
            a["coreset_top_p"][s] = r.coreset_top_p
            a["logit_rows"][s, : len(r.logit_rows)] = r.logit_rows
            for name, given in (
                ("adjust_ids", r.adjustment.ids),
                ("adjust_scale", r.adjustment.scale),
                ("adjust_bias", r.adjustment.bias),
            ):
                a[name][s, :p] = given
                if p:  # the rest repeats the first: equal updates of one id do no harm
                    a[name][s, p:] = given[0]

    def _run(self, ready: _Prepared) -> None:
        """Queues a step. The first of a shape is run as it is, and then captured, before another shape is set."""
        if ready.graph is not None:
            self._device.launch(ready.graph)
            return
        self._engine.set_shape(ready.profile, ready.shapes, ready.addresses)
        self._queue(ready)
        if ready.graphs_fail or not self._engine.can_be_captured(ready.profile):
            return
        self._device.synchronize()
        try:
            with self._device.capture() as graphs:
                self._queue(ready)
            ready.graph = graphs[0]
        except CloverError as error:
            ready.graphs_fail = True
            log.warning("a step of %s runs without a CUDA graph (%s)", ready.shapes["token_ids"], error)

    def _queue(self, ready: _Prepared) -> None:
        ready.inputs.upload()
        self._engine.enqueue(ready.profile)
        ready.outputs.download()

    def _ready(self, shape: StepShape) -> _Prepared:
        if shape in self._prepared:
            self._prepared.move_to_end(shape)
            return self._prepared[shape]
        if len(self._prepared) >= GRAPHS_KEPT:
            self._drop_oldest()
        while shape not in self._prepared:
            try:
                self._prepared[shape] = self._prepare(shape)
            except CardMemoryError:
                if not self._prepared:
                    raise
                self._drop_oldest()  # it comes back when it is asked for again
        return self._prepared[shape]

    def _drop_oldest(self) -> None:
        _, old = self._prepared.popitem(last=False)
        if old.graph is not None:
            self._device.destroy(old.graph)
        old.inputs.free()
        old.outputs.free()
        self._device.free(old.candidates)

    def _prepare(self, shape: StepShape) -> _Prepared:
        config = self._config
        inputs = Block(self._device, step_inputs(shape))
        try:
            outputs = Block(self._device, step_outputs(config, shape, self._with_logits))
        except CloverError:
            inputs.free()
            raise
        candidates = self._device.pin(8)
        shapes: dict[str, tuple[int, ...]] = {name: field.shape for name, field in inputs.fields.items()}
        addresses = {**inputs.addresses, **outputs.addresses, ON_HOST: candidates.address}
        shapes[ON_HOST] = (1,)
        for name, state in self._state.items():
            shapes[name] = (shape.sequences, *state.field.shape[1:])
            addresses[name] = addresses[f"next.{name}"] = state.buffer.address  # the same memory: updated in place
        for layer in range(config.num_hidden_layers):
            shapes[f"expert_table.{layer}"] = (4, config.num_experts)
            addresses[f"expert_table.{layer}"] = self._experts.table(layer)
        profile = DECODE if shape.rows <= self._decode_rows else PREFILL
        return _Prepared(inputs, outputs, candidates, profile, shapes, addresses)


class _State:
    """One state tensor of all slots [S, ...] on the card."""

    def __init__(self, device: Device, field: Field) -> None:
        self.field = field
        self.slot_bytes = field.nbytes // field.shape[0]
        self.buffer: DeviceBuffer = device.allocate(field.nbytes)
        # keys past the committed ones are masked, but not-a-number times zero would still be one
        device.clear(self.buffer.address, self.buffer.nbytes)

    def slot(self, slot: int) -> int:
        """Address of one slot's part."""
        return self.buffer.address + slot * self.slot_bytes

    def committed_shape(self, name: str, position: int) -> tuple[int, ...]:
        """Shape of a slot's committed part: of a KV cache [heads, capacity, dim] only the committed tokens."""
        if _is_cache(name):
            _, heads, _, dim = self.field.shape
            return heads, position, dim
        return self.field.shape[1:]

    def pieces(self, name: str, slot: int, position: int) -> list[tuple[int, int, int]]:
        """The contiguous pieces of a slot's committed part: (offset in a copy of it, address, bytes)."""
        base = self.slot(slot)
        if not _is_cache(name):
            return [(0, base, self.slot_bytes)]
        _, heads, capacity, dim = self.field.shape
        row = dim * self.field.dtype.itemsize
        return [(h * position * row, base + h * capacity * row, position * row) for h in range(heads)]


def _is_cache(name: str) -> bool:
    """A KV cache, whose rows only grow; other state is replaced by every commit."""
    return name.startswith(("keys", "values"))
