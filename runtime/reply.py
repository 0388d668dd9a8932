"""What a caller of the runtime gets: a reply with its statistics, and the events of a stream."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from clover.runtime.decoder import StepEvent, TokenInfo
from clover.runtime.text.finish import FinishReason
from clover.runtime.text.reply import FunctionCall, ReplyDelta


@dataclass(frozen=True)
class ReplyStatistics:
    """Numbers of one reply. Times in seconds, from the call to `stream`, `chat` or `generate`."""

    mode: str
    prompt_tokens: int
    response_tokens: int
    blocks: int
    steps: int  # steps that could produce response tokens
    prefill_steps: int  # steps that only committed prompt tokens
    tokens_per_step: float
    time_to_first_token: float | None  # None: the reply is empty
    total_time: float
    tokens_per_second: float
    engine_time: float  # inside the engine; the rest is Python
    length_ramp_bias: float  # the strongest bias the length ramp added; 0 when it did not act

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Reply:
    """A whole reply. `text` is the content without reasoning; `tokens` are the response's, in order."""

    text: str
    reasoning: str
    tool_calls: tuple[FunctionCall, ...]
    finish_reason: FinishReason
    stop_string: str | None
    tokens: tuple[TokenInfo, ...]
    statistics: ReplyStatistics = field(repr=False)


@dataclass(frozen=True)
class ReplyFinished:
    """Last event of a stream."""

    reply: Reply


StreamItem = ReplyDelta | StepEvent | ReplyFinished
