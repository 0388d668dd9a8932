"""What a caller of the runtime gets: a reply with its statistics, and the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from clover.runtime.decoder import DecodeCounts, StepEvent, TokenInfo
from clover.runtime.text.finish import FinishReason
from clover.runtime.text.reply import FunctionCall, ReplyDelta, ReplyEvent, collect_reply


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
    penalised_tokens: int = 0  # most token ids whose logits penalties changed in a step; 0 when they did not act
    drafted_tokens: int = 0  # tokens that a causal pass checked; 0 in modes that don't draft
    accepted_tokens: int = 0  # of them, those it kept

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


def make_reply(
    texts: Sequence[ReplyEvent], truncated: bool, tokens: Sequence[TokenInfo], statistics: ReplyStatistics
) -> Reply:
    """A reply of its events and tokens. `truncated`: a limit cut it."""
    if not texts:  # a bundle without tokenizer
        return Reply("", "", (), "length" if truncated else "stop", None, tuple(tokens), statistics)
    whole = collect_reply(texts)
    return Reply(
        whole.content, whole.reasoning, whole.function_calls, whole.reason, whole.stop_string, tuple(tokens), statistics
    )


def make_statistics(
    counts: DecodeCounts, mode: str, tokens: int, *, engine: float, first: float | None, total: float
) -> ReplyStatistics:
    """Statistics of a reply of `tokens` tokens. Seconds: inside the engine, to the first token, in all."""
    return ReplyStatistics(
        mode=mode,
        prompt_tokens=counts.prompt_tokens,
        response_tokens=tokens,
        blocks=counts.blocks,
        steps=counts.steps,
        prefill_steps=counts.prefill_steps,
        tokens_per_step=tokens / max(counts.steps, 1),
        time_to_first_token=first,
        total_time=total,
        tokens_per_second=tokens / total if total else 0.0,
        engine_time=engine,
        length_ramp_bias=counts.ramp_bias,
        penalised_tokens=counts.penalised,
        drafted_tokens=counts.drafted,
        accepted_tokens=counts.accepted,
    )
