"""Packs tokenized examples into fixed-shape rows, and draws the noise of the previewed blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import data
import torch
from batch import Packed
from config import BLOCK
from tokenizer import END_OF_TEXT, MASK
from tokenizers import Tokenizer
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """A tokenized example, laid out in whole chunks: prompt padded on the left, answer on the right."""

    prompt: list[int]
    answer: list[int]  # ends with <|im_end|>

    @property
    def prompt_chunks(self) -> int:
        return -(-len(self.prompt) // BLOCK)

    @property
    def chunks(self) -> int:
        return self.prompt_chunks - (-len(self.answer) // BLOCK)


@dataclass
class TrainingBatch:
    packed: Packed
    causal_weight: Tensor  # [N, T]: weight of predicting the token in this column from those before it
    targets: Tensor  # [N, J, B]: clean tokens of the previewed blocks
    noisy: Tensor  # [N, J, B]: the same with masks
    masked: Tensor  # [N, J, B] bool


def encode(tokenizer: Tokenizer, prompt: str, answer: str) -> Document:
    prompt_ids = tokenizer.encode(data.render_prompt(prompt)).ids
    return Document(prompt_ids, tokenizer.encode(answer + "<|im_end|>").ids)


def pack(rows: list[list[Document]], chunks: int, prompt_weight: float) -> tuple[Packed, Tensor, list[list[int]]]:
    """Lays out rows of documents; also returns causal weights and every row's answer chunks."""
    n, t = len(rows), chunks * BLOCK
    tokens = torch.full((n, t), END_OF_TEXT)
    document = torch.full((n, t), -1)
    position, weight = torch.zeros(n, t), torch.zeros(n, t)
    answer_chunks: list[list[int]] = []
    for r, row in enumerate(rows):
        answer_chunks.append([])
        chunk = 0
        for index, doc in enumerate(row):
            end = (chunk + doc.chunks) * BLOCK
            answer = (chunk + doc.prompt_chunks) * BLOCK
            first = answer - len(doc.prompt)
            ids = doc.prompt + doc.answer
            tokens[r, first : first + len(ids)] = torch.tensor(ids)
            document[r, first:end] = index
            position[r, first:end] = torch.arange(end - first, dtype=torch.float32)
            weight[r, first + 1 : answer] = prompt_weight
            weight[r, answer:end] = 1.0
            answer_chunks[r] += range(chunk + doc.prompt_chunks, chunk + doc.chunks)
            chunk += doc.chunks
    return Packed(tokens, document, position, torch.zeros(n, 0, dtype=torch.int64)), weight, answer_chunks


def fill_row(pending: list[Document], chunks: int) -> list[Document]:
    """Takes the oldest document and then, largest first, whatever still fits."""
    row: list[Document] = []
    left = chunks
    while True:
        fitting = [d for d in pending if d.chunks <= left]
        if not fitting:
            return row
        doc = fitting[0] if not row else max(fitting, key=lambda d: d.chunks)
        pending.remove(doc)
        row.append(doc)
        left -= doc.chunks


def noise(blocks: Tensor, generator: torch.Generator) -> Tensor:
    """Which tokens to mask; blocks [N, J, B]. A quarter wholly masked, a quarter with a clean beginning, else uniform."""
    shape, per_block = blocks.shape, (*blocks.shape[:2], 1)
    kind = torch.rand(per_block, generator=generator)
    ratio = torch.rand(per_block, generator=generator) * 0.95 + 0.05
    uniform = torch.rand(shape, generator=generator) < ratio
    cut = torch.randint(0, BLOCK, per_block, generator=generator)
    after = torch.arange(BLOCK) >= cut
    # behind a clean beginning, some rows are filled already, as the threshold leaves them
    tail = after & (torch.rand(shape, generator=generator) < torch.rand(per_block, generator=generator).sqrt())
    return torch.where(kind < 0.25, True, torch.where(kind < 0.5, tail, uniform))


def batches(
    draw: Callable[[], tuple[str, str]],
    tokenizer: Tokenizer,
    seed: int,
    rows: int,
    chunks: int,
    blocks: int,
    prompt_weight: float,
) -> Iterator[TrainingBatch]:
    """Endless fixed-shape batches: `rows` rows of `chunks` chunks, `blocks` previewed blocks per row."""
    assert seed != data.HELD_OUT_SEED, "this seed is reserved for evaluation"
    r, generator = Random(seed), torch.Generator().manual_seed(seed)
    pending: list[Document] = []
    while True:
        while len(pending) < 8 * rows:
            doc = encode(tokenizer, *draw())
            if r.random() < 0.2:  # speculative decoding starts blocks inside an answer, too
                cut = r.randrange(min(BLOCK, len(doc.answer)))
                doc = Document(doc.prompt + doc.answer[:cut], doc.answer[cut:])
            if doc.chunks <= chunks:
                pending.append(doc)
        packed, weight, answers = pack([fill_row(pending, chunks) for _ in range(rows)], chunks, prompt_weight)
        # every answer chunk equally often, the remainder at random
        choice = [r.sample(a, len(a)) * (blocks // len(a)) + r.sample(a, blocks % len(a)) for a in answers]
        packed.block_chunk = torch.tensor(choice)
        targets = packed.tokens.view(rows, -1, BLOCK)[torch.arange(rows)[:, None], packed.block_chunk]
        masked = noise(targets, generator)
        yield TrainingBatch(packed, weight, targets, torch.where(masked, MASK, targets), masked)
