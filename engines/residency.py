"""Which routed experts stay on the card: a policy that follows use, and moves experts only between blocks.

A pure state machine: it neither copies nor allocates. The runtime tells it which experts a step touched, asks it
between blocks for moves, swaps the experts' bytes (the host's slot takes what the card's slot gives up), rewrites the
pointer table, and says so. During a step nothing moves, so the pointer table a captured graph reads never changes
under it; experts on the host are read in place over the link, which costs time and is never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clover.runtime.errors import CloverError

Mask = NDArray[np.bool_]  # [layers, experts]


@dataclass(frozen=True)
class Move:
    """Swap: `expert_in`'s bytes go from `host_slot` to `card_slot`, and `expert_out`'s the other way."""

    expert_in: tuple[int, int]  # (layer, expert)
    expert_out: tuple[int, int]
    card_slot: int
    host_slot: int


@dataclass(frozen=True)
class ResidencySettings:
    """How quickly the policy follows use.

    half_life: steps after which a touch counts half.
    payback: a move must save its own bytes within so many steps, at the rates of use seen lately.
    margin: and the newcomer must be used more than the one that leaves by this factor, so that two experts used
        alike do not change places for ever.
    """

    half_life: float = 32.0
    payback: float = 32.0
    margin: float = 1.5

    def __post_init__(self) -> None:
        if self.half_life <= 0 or self.payback <= 0 or self.margin < 1:
            raise CloverError("expert residency: half_life and payback must be positive, and margin at least 1.")


class ResidencyPolicy:
    """Keeps the most used experts of all layers in `capacity` equal slots on the card.

    `capacity` is clipped to the number of experts. At first every layer has its share of slots, filled with its
    lowest-numbered experts, or with those of the highest `initial_use` [layers, experts], when there is one.
    """

    def __init__(
        self,
        capacity: int,
        layers: int,
        experts: int,
        settings: ResidencySettings | None = None,
        initial_use: NDArray[np.float64] | None = None,
    ) -> None:
        if capacity < 0 or layers < 1 or experts < 1:
            raise CloverError(f"expert residency: {capacity} slots for {layers} x {experts} experts can't be.")
        self.settings = settings or ResidencySettings()
        self.layers, self.experts = layers, experts
        self.capacity = min(capacity, layers * experts)
        self._decay = 0.5 ** (1.0 / self.settings.half_life)
        self._use = np.zeros(layers * experts)  # decayed touches; index = layer * experts + expert
        if initial_use is not None:
            if initial_use.shape != (layers, experts):
                raise CloverError(
                    f"expert residency: initial use has shape {initial_use.shape}, not {(layers, experts)}."
                )
            self._use[:] = initial_use.ravel()
        # Most used first; ties go round the layers, so that each has its share.
        number = np.arange(layers * experts)
        order = np.lexsort((number // experts, number % experts, -self._use))
        self._on_card = np.zeros(layers * experts, dtype=np.bool_)
        self._on_card[order[: self.capacity]] = True
        self._slot = np.empty(layers * experts, dtype=np.int64)  # of the card where on the card, else of the host
        self._slot[order[: self.capacity]] = np.arange(self.capacity)
        self._slot[order[self.capacity :]] = np.arange(layers * experts - self.capacity)

    @property
    def resident(self) -> Mask:
        """Which experts are on the card: [layers, experts]."""
        return self._on_card.reshape(self.layers, self.experts).copy()

    @property
    def slots(self) -> NDArray[np.int64]:
        """Slot of every expert on the side it lies on: [layers, experts]."""
        return self._slot.reshape(self.layers, self.experts).copy()

    @property
    def use(self) -> NDArray[np.float64]:
        """Decayed touches per expert, to save and give back as `initial_use`: [layers, experts]."""
        return self._use.reshape(self.layers, self.experts).copy()

    def observe(self, touched: Mask) -> int:
        """Counts one step that touched the experts of the mask [layers, experts]. Returns how many were on the host."""
        flat = np.asarray(touched, dtype=np.bool_)
        if flat.shape != (self.layers, self.experts):
            raise ValueError(f"touched has shape {flat.shape}, not {(self.layers, self.experts)}")
        flat = flat.ravel()
        self._use *= self._decay
        self._use[flat] += 1.0
        return int(np.count_nonzero(flat & ~self._on_card))

    def plan_moves(self, max_moves: int) -> list[Move]:
        """The swaps worth making now, best first, at most `max_moves` (bytes allowed per block / bytes per expert).

        Changes nothing: call `apply` once the bytes have moved.
        """
        inside, outside = np.flatnonzero(self._on_card), np.flatnonzero(~self._on_card)
        n = min(max_moves, inside.size, outside.size)
        if n <= 0:
            return []
        # The n most used outside against the n least used inside. Stable sorts: the same history, the same moves.
        newcomers = outside[np.argsort(-self._use[outside], kind="stable")[:n]]
        leavers = inside[np.argsort(self._use[inside], kind="stable")[:n]]
        # A steady expert touched in a share r of the steps has use r / (1 - decay).
        gain = (self._use[newcomers] - self._use[leavers]) * (1.0 - self._decay) * self.settings.payback
        worth = (gain > 1.0) & (self._use[newcomers] > self.settings.margin * self._use[leavers])
        # Gains fall and thresholds rise along the pairs, so the first that is not worth it ends the list.
        count = n if worth.all() else int(np.argmin(worth))
        return [
            Move(self._name(i), self._name(o), int(self._slot[o]), int(self._slot[i]))
            for i, o in zip(newcomers[:count].tolist(), leavers[:count].tolist(), strict=True)
        ]

    def apply(self, moves: Sequence[Move]) -> None:
        """Records that `moves` have been made. Raises ValueError when they do not belong to the present state."""
        for move in moves:
            i, o = self._number(move.expert_in), self._number(move.expert_out)
            if self._on_card[i] or not self._on_card[o]:
                raise ValueError(f"{move} does not belong to the present state")
            if (self._slot[o], self._slot[i]) != (move.card_slot, move.host_slot):
                raise ValueError(f"{move} names other slots than {self._slot[o]} and {self._slot[i]}")
            self._on_card[i], self._on_card[o] = True, False
            self._slot[i], self._slot[o] = move.card_slot, move.host_slot

    def _name(self, number: int) -> tuple[int, int]:
        return divmod(number, self.experts)

    def _number(self, expert: tuple[int, int]) -> int:
        return expert[0] * self.experts + expert[1]


def touched_mask(experts_of_layers: Sequence[Sequence[int]], experts: int) -> Mask:
    """A mask [layers, experts] from the ids touched in every layer."""
    mask = np.zeros((len(experts_of_layers), experts), dtype=np.bool_)
    for layer, ids in enumerate(experts_of_layers):
        mask[layer, list(ids)] = True
    return mask
