"""States of earlier conversations, kept by the tokens they hold.

A recurrent state can't be cut back: it stands for exactly the tokens that were committed. So states are kept where a later
prompt is likely to continue: at turn borders inside the prompt, and where the reply's last whole block ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clover.runtime.scheduler.job import token_key
from clover.runtime.session import StateSnapshot

_ID_BYTES = 8


@dataclass
class CacheCounts:
    """What the cache did so far."""

    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    evictions: int = 0


class ConversationCache:
    """Least recently used states go first once `max_bytes` are exceeded; 0 keeps none. Used by one thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._states: OrderedDict[bytes, StateSnapshot] = OrderedDict()  # least recently used first
        self.counts = CacheCounts()

    def __len__(self) -> int:
        return len(self._states)

    @property
    def enabled(self) -> bool:
        return self._max_bytes > 0

    @property
    def nbytes(self) -> int:
        return self._bytes

    def find(self, prompt: Sequence[int], limit: int) -> StateSnapshot | None:
        """The longest kept state of at most `limit` tokens that `prompt` begins with."""
        tokens = token_key(prompt)
        best: bytes | None = None
        for key in self._states:
            if len(key) <= limit * _ID_BYTES and (best is None or len(key) > len(best)) and tokens.startswith(key):
                best = key
        if best is None:
            self.counts.misses += 1
            return None
        self._states.move_to_end(best)
        self.counts.hits += 1
        self.counts.reused_tokens += len(best) // _ID_BYTES
        return self._states[best]

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether the state of exactly these tokens is kept."""
        return token_key(tokens) in self._states

    def keep(self, tokens: Sequence[int], state: StateSnapshot) -> None:
        """Keeps the state that holds exactly `tokens`. One that is larger than the whole cache is not kept."""
        if state.position != len(tokens):
            raise ValueError(f"a state of {state.position} tokens can't stand for {len(tokens)}")
        key = token_key(tokens)
        size = state.nbytes + len(key)
        if size > self._max_bytes:
            return
        self._drop(key)
        while self._bytes + size > self._max_bytes:
            self._drop(next(iter(self._states)))
            self.counts.evictions += 1
        self._states[key] = state
        self._bytes += size

    def clear(self) -> None:
        self._states.clear()
        self._bytes = 0

    def _drop(self, key: bytes) -> None:
        state = self._states.pop(key, None)
        if state is not None:
            self._bytes -= state.nbytes + len(key)


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
