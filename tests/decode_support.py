"""Random and nano models to decode with in tests, and a session whose steps take as long as they are said to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from engine_support import NANO, bundle
from hypothesis import strategies as st
from oracle_support import tiny_checkpoint
from serve_support import nano

from clover.engines.open import open_session
from clover.runtime.decoder import Decoder, TokenInfo, TokensEvent
from clover.runtime.loop import StepTimes, decode
from clover.runtime.session import Candidates, SequenceRows, StepSession

sys.path.insert(0, str(NANO))
from data import held_out

VOCAB, MASK = 320, 319
NANO_IDS: dict[str, Any] = {"mask_id": 3, "eos_ids": (2, 0), "vocab_size": 768}
TINY_IDS: dict[str, Any] = {"mask_id": MASK, "eos_ids": (), "vocab_size": VOCAB}
PENALTIES = st.sampled_from(
    [
        {"presence_penalty": 0.0, "repetition_penalty": 1.0},
        {"presence_penalty": 0.9, "repetition_penalty": 1.05},
        {"presence_penalty": 2.0, "repetition_penalty": 3.0, "frequency_penalty": 0.7},
        {"presence_penalty": -0.4, "repetition_penalty": 0.8, "frequency_penalty": -0.2},
        {"presence_penalty": 0.5, "repetition_penalty": 1.0, "logit_bias": {5: 2.0, 9: 2.0, 11: -1.0}},
    ]
)
DRAWN = st.sampled_from(
    [{}, {"temperature": 0.8}, {"temperature": 2.0, "top_k": 5}, {"temperature": 1.0, "top_p": 0.7}]
)


@lru_cache(maxsize=4)
def tiny(seed: int) -> StepSession:
    return open_session(bundle(tiny_checkpoint(seed)), max_context=512, threads=1, cache=False)


def drive(session: StepSession, decoder: Decoder) -> list[TokenInfo]:
    session.reset(0)
    events = decode(session, decoder, 0, StepTimes())
    return [t for e in events if isinstance(e, TokensEvent) for t in e.tokens]


def nano_prompts(count: int) -> list[list[int]]:
    engine = nano()
    assert engine.template is not None and engine.tokenizer is not None
    questions = [q for task in ("dispatch", "tool", "decide") for q, _ in held_out(task, count)]
    return [engine.tokenizer.encode_prompt(engine.template.render([{"role": "user", "content": q}])) for q in questions]


class PricedSession:
    """A session whose steps take as long as they are said to."""

    def __init__(self, inner: StepSession, price: Callable[[bool], float]) -> None:
        self._inner, self._price, self.now = inner, price, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, step_rows: Sequence[SequenceRows], candidates: int = 1) -> list[Candidates]:
        previews = any(len(r.tokens) > r.commit for r in step_rows)
        self.now += self._price(previews)
        return self._inner.step(step_rows, candidates)
