"""What the block loop asks of a backend: run one step of rows for some sequences, keep their state.

A session owns the state of S slots (recurrent state, conv ring, KV cache, position). `step` is the only call
that advances it, or takes a tentative commit back; `reset` and `restore` are the only others that change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

NO_IDS: Ints = np.zeros(0, np.int64)
NO_FLOATS: Floats = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Changes to the logits of a few token ids, before the best are chosen.

    A positive logit is divided by `scale`, a negative one multiplied (repetition penalty, 1 = none); then
    `bias` is added. ids [P] int64 without duplicates, scale [P], bias [P] float32.
    """

    ids: Ints = field(default_factory=lambda: NO_IDS)
    scale: Floats = field(default_factory=lambda: NO_FLOATS)
    bias: Floats = field(default_factory=lambda: NO_FLOATS)


NO_ADJUSTMENT = Adjustment()


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's rows in a step: `tokens[:commit]` are committed, the rest are previewed.

    `logit_rows` lists the rows (indices into tokens) whose best candidates are wanted. `tentative`: the state before
    this commit is kept aside, so that the slot's next step may take it back. `undo`: the slot first returns, bit for bit,
    to the state before its last step, which was tentative.
    """

    slot: int
    tokens: Ints  # [rows]
    commit: int
    logit_rows: Ints  # [R]
    adjustment: Adjustment = NO_ADJUSTMENT
    coreset_top_p: float = 1.0
    tentative: bool = False
    undo: bool = False


@dataclass(frozen=True, slots=True)
class Candidates:
    """The K best tokens of one sequence's logit rows, by adjusted logit.

    ids [R, K] int64; logprobs [R, K] float32: raw log-softmax, before the adjustment; scores [R, K] float32:
    adjusted logits. The arrays are views that the next step overwrites.
    """

    ids: Ints
    logprobs: Floats
    scores: Floats
    logits: Floats | None = None  # [R, V], only from bundles built with logits


@dataclass(frozen=True)
class StateSnapshot:
    """A copy of one slot's committed state: tensors by name, and the tokens committed so far.

    `before` is what a tentative commit can still return to; it lists no KV cache, whose rows only grow.
    """

    position: int
    tensors: dict[str, npt.NDArray[Any]]
    before: StateSnapshot | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values()) + (self.before.nbytes if self.before else 0)


class Slots:
    """What every session knows of its slots: how many, how much they hold, and how much is committed in each."""

    def __init__(self, sequences: int, max_context: int, max_rows: int) -> None:
        self._sequences, self._max_context, self._max_rows = sequences, max_context, max_rows
        self._positions = np.zeros(sequences, np.int64)  # tokens committed, by slot

    @property
    def sequences(self) -> int:
        return self._sequences

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def max_rows(self) -> int:
        return self._max_rows

    def position(self, slot: int) -> int:
        return int(self._positions[slot])


class StepSession(Protocol):
    """A loaded engine. Not thread-safe: one caller steps it at a time."""

    @property
    def sequences(self) -> int:
        """Slots S."""

    @property
    def max_context(self) -> int:
        """Most tokens a slot can hold committed."""

    @property
    def max_rows(self) -> int:
        """Most rows per sequence in one step."""

    def position(self, slot: int) -> int:
        """Tokens committed in `slot`."""

    def step(self, rows: Sequence[SequenceRows], candidates: int = 1) -> list[Candidates]:
        """Runs one step; returns the candidates in the order of `rows`. Slots not named keep their state.

        Raises ValueError when a slot is to undo a step that was not tentative.
        """

    def reset(self, slot: int) -> None:
        """Empties a slot."""

    def snapshot(self, slot: int) -> StateSnapshot:
        """Copies a slot's committed state out."""

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        """Puts a copied state into a slot. Raises ValueError when its tensors are of another model."""

    def close(self) -> None:
        """Frees the engine and its state."""
