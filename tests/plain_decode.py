"""The decode loop in plain NumPy over the float64 oracle: what threshold fill is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from oracle_support import load_oracle

from clover.runtime.options import DecodeOptions

Array = npt.NDArray[Any]


@dataclass
class Expected:
    tokens: list[int]
    steps_per_block: list[int]
    truncated: bool
    fills: list[list[int]]  # positions filled at each step
    margin: float  # the closest decision: below float32's rounding either outcome is right


class PlainDecode:
    """ARCHITECTURE's decode loop, one statement a step, over the float64 oracle. Shares no code with the runtime."""

    def __init__(self, checkpoint: Path) -> None:
        self.oracle = load_oracle(checkpoint)
        self.mask = self.oracle.root["mask_token_id"]
        self._previews: dict[Any, Array] = {}

    def run(self, prompt: Sequence[int], o: DecodeOptions, eos: Sequence[int], limit: int) -> Expected:
        start = len(prompt) - (len(prompt) % o.block_size if o.align_blocks else 0)
        history, carried = list(prompt[:start]), list(prompt[start:])
        state = self.oracle.initial_state()
        if history:
            _, state = self.oracle.commit(history, state)
        response: list[int] = []
        out = Expected([], [], False, [], 1.0)
        while True:
            block: list[int | None] = [*carried, *[None] * (o.block_size - len(carried))]
            first, steps = len(carried), 0
            while None in block:
                raw = self.preview(history, block, state)
                raw[:, self.mask] = -np.inf
                chosen, confidence = {}, {}
                filled = [t for t in block[first:] if t is not None]
                for i in (i for i, t in enumerate(block) if t is None):
                    scores = penalised(raw[i], [*response, *filled], o)
                    best = np.sort(scores)[-2:]
                    out.margin = min(out.margin, float(best[1] - best[0]))
                    chosen[i] = int(np.argmax(scores))
                    confidence[i] = float(np.exp(raw[i] - logsumexp(raw[i]))[chosen[i]])
                    out.margin = min(out.margin, abs(confidence[i] - o.threshold))
                sure = [i for i in chosen if confidence[i] > o.threshold]
                if not sure:
                    ranked = sorted(chosen, key=lambda i: -confidence[i])  # stable: the lowest position first
                    sure = ranked[:1]
                    if len(ranked) > 1:
                        out.margin = min(out.margin, confidence[ranked[0]] - confidence[ranked[1]])
                for i in sure:
                    block[i] = chosen[i]
                steps += 1
                out.fills.append(sure)
                # the reply may be known before the block is full
                known = block[first : block.index(None) if None in block else None]
                whole = response + [t for t in known if t is not None]
                end = next((i for i, t in enumerate(whole) if t in eos), None)
                if end is not None or len(whole) >= limit:
                    out.steps_per_block.append(steps)
                    out.tokens = whole[:end][:limit]
                    out.truncated = end is None or end >= limit  # an end beyond the limit is not kept
                    return out
            out.steps_per_block.append(steps)
            full = [t for t in block if t is not None]
            response += full[first:]
            _, state = self.oracle.commit(full, state)
            history += full
            carried = []

    def preview(self, history: Sequence[int], block: Sequence[int | None], state: Any) -> Array:
        key = (tuple(history), tuple(block))
        if key not in self._previews:
            self._previews[key] = self.oracle.preview([self.mask if t is None else t for t in block], state)
        return self._previews[key].copy()


def logsumexp(x: Array) -> float:
    peak = x.max()
    return float(peak + np.log(np.exp(x - peak).sum()))


def penalised(logits: Array, seen: Sequence[int], o: DecodeOptions) -> Array:
    """Repetition, then presence and frequency, for tokens of the response; then the biases."""
    out = logits.copy()
    for token in set(seen):
        out[token] = out[token] / o.repetition_penalty if out[token] > 0 else out[token] * o.repetition_penalty
        out[token] -= o.presence_penalty + o.frequency_penalty * list(seen).count(token)
    for token, bias in o.logit_bias.items():
        out[token] += bias
    return out


plain_decode = lru_cache(maxsize=8)(PlainDecode)
