"""States of earlier conversations, kept by the tokens they hold.

A recurrent state can't be cut back: it stands for exactly the tokens that were committed. So states are kept where a later
prompt is likely to continue: at turn borders inside the prompt, and where the reply's last whole block ended.

Attention's keys and values only grow: those of a state are the first rows of its continuation's. So a conversation's
states share the arrays of its longest one, and an earlier state costs only its recurrent part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.runtime.session import StateSnapshot

Array = npt.NDArray[Any]
_ID_BYTES = 8


def token_key(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes: comparing them is comparing the sequences."""
    return np.asarray(tokens, np.int64).tobytes()


@dataclass
class CacheCounts:
    """What the cache did so far."""

    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    evictions: int = 0


@dataclass
class _Kept:
    state: StateSnapshot
    line: tuple[bytes, ...]  # the states it was computed from, oldest first


class ConversationCache:
    """Least recently used states go first once `max_bytes` are exceeded; 0 keeps none. Used by one thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # least recently used first
        self.counts = CacheCounts()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def enabled(self) -> bool:
        return self._max_bytes > 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, each counted once, and of the keys."""
        return self._bytes

    def find(self, prompt: Sequence[int], limit: int) -> StateSnapshot | None:
        """The longest kept state of at most `limit` tokens that `prompt` begins with."""
        tokens = token_key(prompt)
        best: bytes | None = None
        for key in self._kept:
            if len(key) <= limit * _ID_BYTES and (best is None or len(key) > len(best)) and tokens.startswith(key):
                best = key
        if best is None:
            self.counts.misses += 1
            return None
        self._kept.move_to_end(best)
        self.counts.hits += 1
        self.counts.reused_tokens += len(best) // _ID_BYTES
        return self._kept[best].state

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether the state of exactly these tokens is kept."""
        return token_key(tokens) in self._kept

    def keep(self, tokens: Sequence[int], state: StateSnapshot, since: Sequence[int] = ()) -> None:
        """Keeps the state that holds exactly `tokens`. `since`: the tokens of the kept state it was computed from; empty
        when there is none. A state that is larger than the whole cache is not kept."""
        if state.position != len(tokens):
            raise ValueError(f"a state of {state.position} tokens can't stand for {len(tokens)}")
        key, parent = token_key(tokens), self._kept.get(token_key(since))
        if state.nbytes + len(key) > self._max_bytes:
            return
        line = (*parent.line, token_key(since)) if parent else ()
        for earlier in line:
            if (kept := self._kept.get(earlier)) is not None:
                kept.state = _share(kept.state, state)
        self._kept.pop(key, None)
        self._kept[key] = _Kept(state, line)
        self._count()
        while self._bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._trim(oldest.state)
            self.counts.evictions += 1
            self._count()

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0

    def _trim(self, gone: StateSnapshot) -> None:
        """Cuts the arrays that only `gone` needed in full down to the longest of the states that still share them."""
        wholes = {id(_whole(array)) for array in _arrays(gone)}
        sharing = [k for k in self._kept.values() if any(id(_whole(a)) in wholes for a in _arrays(k.state))]
        longest = max((k.state for k in sharing), key=lambda state: state.position, default=None)
        if longest is None or longest.position > gone.position:
            return
        owned = replace(longest, tensors={name: array.copy() for name, array in longest.tensors.items()})
        for kept in sharing:
            kept.state = owned if kept.state is longest else _share(kept.state, owned)

    def _count(self) -> None:
        arrays = {id(whole): whole.nbytes for kept in self._kept.values() for whole in map(_whole, _arrays(kept.state))}
        self._bytes = sum(arrays.values()) + sum(map(len, self._kept))


def _arrays(state: StateSnapshot) -> list[Array]:
    return list(state.tensors.values())


def _whole(array: Array) -> Array:
    """The array that owns the memory of a view."""
    return array.base if isinstance(array.base, np.ndarray) else array


def _share(old: StateSnapshot, new: StateSnapshot) -> StateSnapshot:
    """`old` with views of `new`'s arrays wherever they only grew: one axis, from old's position to new's."""
    tensors = dict(old.tensors)
    for name, mine in old.tensors.items():
        other = new.tensors.get(name)
        if other is None or other.dtype != mine.dtype or other.ndim != mine.ndim:
            continue
        grown = [axis for axis in range(mine.ndim) if mine.shape[axis] != other.shape[axis]]
        if len(grown) == 1 and (mine.shape[grown[0]], other.shape[grown[0]]) == (old.position, new.position):
            tensors[name] = other[(slice(None),) * grown[0] + (slice(old.position),)]
    return replace(old, tensors=tensors)


def turn_borders(prompt: Sequence[int], opener: int | None, least: int) -> tuple[int, ...]:
    """Prompt lengths at which a later prompt may branch off: behind the first turn (a system prompt and tools, which
    many conversations share) and before the last one (what the model answers). `opener` begins every turn. Borders
    nearer than `least` tokens to the one before are left out: computing so few again costs less than keeping them.
    """
    starts = [] if opener is None else np.flatnonzero(np.asarray(prompt) == opener).tolist()
    borders: list[int] = []
    for border in sorted({*starts[1:2], *starts[1:][-1:]}):
        if border - (borders[-1] if borders else 0) >= least:
            borders.append(border)
    return tuple(borders)
