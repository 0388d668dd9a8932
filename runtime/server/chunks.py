"""What OpenAI's chat and text completions share in their replies: usage, steps, log-probabilities, a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

from clover.runtime.decoder import StepEvent
from clover.runtime.server import sse
from clover.runtime.server.errors import ApiError
from clover.runtime.server.generation import Ended, Generation, Piece, Usage
from clover.runtime.server.request import CompletionRequest
from clover.runtime.text.tokenizer import Tokenizer

# -inf is not JSON: this stands for it, as OpenAI does it
LEAST_LOGPROB = -9999.0


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage, and what a block-diffusion model adds to it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "blocks": usage.blocks,
        "steps": usage.steps,
        "tokens_per_step": usage.tokens_per_step,
    }


def token_text(id_: int, tokenizer: Tokenizer) -> str:
    """A token's text as log-probabilities and steps show it, control tokens included."""
    return tokenizer.decode([id_], keep_control_tokens=True)


def logprob_json(logprob: float) -> float:
    """A log-probability as a JSON number."""
    return max(logprob, LEAST_LOGPROB)


def step_json(step: StepEvent, choice: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """A denoise step: which positions of the block it filled, with what, and how sure the model was."""
    ids = [step.tokens[position] for position in step.filled]
    return {
        "index": choice,
        "block": step.block,
        "step": step.step,
        "size": len(step.tokens),
        "filled": list(step.filled),
        "tokens": ids,
        "texts": [token_text(id_, tokenizer) for id_ in ids if id_ is not None],
        "confidence": [round(c, 4) for c in step.confidence],
    }


class ChunkWriter(Protocol):
    """Writes one choice as server-sent events; empty bytes where there is nothing to say."""

    def begin(self) -> bytes:
        """What comes before the reply."""

    def piece(self, piece: Piece) -> bytes:
        """More of the reply."""

    def end(self, end: Ended) -> bytes:
        """The last chunk, which says why the reply ended."""


async def chunk_stream(
    request: CompletionRequest,
    generation: Generation,
    head: Mapping[str, Any],
    make_writer: Callable[[Mapping[str, Any], int], ChunkWriter],
    tokenizer: Tokenizer,
) -> AsyncIterator[bytes]:
    """A response as server-sent events. `head`: what every chunk holds; `make_writer`: of a head and a choice's index."""
    if request.include_usage:
        head = {**head, "usage": None}
    writers = [make_writer(head, index) for index in range(generation.choices)]
    if begun := b"".join(writer.begin() for writer in writers):
        yield begun
    try:
        async for item in generation:
            if item is None:
                yield sse.WAITING
                continue
            writer = writers[item.choice]
            if isinstance(item, Ended):
                yield writer.end(item)
                continue
            steps = [{**head, "choices": [], "denoise": step_json(s, item.choice, tokenizer)} for s in item.steps]
            if chunks := b"".join(map(sse.data, steps)) + writer.piece(item):
                yield chunks
    except ApiError as error:
        yield sse.data(error.body("openai"))
        return
    if request.include_usage:
        yield sse.data({**head, "choices": [], "usage": usage_json(generation.usage)})
    yield sse.DONE
