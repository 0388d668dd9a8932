"""Scores a checkpoint on held-out prompts: exact match by threshold fill and autoregressively, and tokens per step.

python evaluate.py CHECKPOINT [--count 100] [--threshold 0.95]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import data
import torch
from batch import Packed, make_masks
from config import BLOCK, Config
from model import NanoClover
from packing import Document, encode, pack
from safetensors.torch import load_file
from tokenizer import END_IDS, MASK
from tokenizers import Tokenizer
from torch import Tensor


@dataclass(frozen=True)
class Score:
    count: int
    fill_exact: float
    causal_exact: float
    tokens_per_step: float

    def __str__(self) -> str:
        return (
            f"n {self.count} fill {self.fill_exact:.3f} autoregressive {self.causal_exact:.3f} "
            f"tokens/step {self.tokens_per_step:.2f}"
        )


def load(directory: Path) -> tuple[NanoClover, Tokenizer]:
    model = NanoClover(Config.load(directory))
    model.load_state_dict({k: v.float() for k, v in load_file(directory / "model.safetensors").items()})
    return model, Tokenizer.from_file(str(directory / "tokenizer.json"))


def one_per_row(docs: list[Document]) -> Packed:
    packed, _, _ = pack([[doc] for doc in docs], max(doc.chunks for doc in docs), 0.0)
    return packed


def ends(block: list[int], masked: list[bool]) -> int | None:
    """Where the response ends: the first end id with no mask before it."""
    for i, token in enumerate(block):
        if masked[i]:
            return None
        if token in END_IDS:
            return i
    return None


def fill_step(logits: Tensor, block: Tensor, masked: Tensor, threshold: float) -> None:
    """One denoise step in place: fills every confident masked position, or else the most confident one."""
    logits[..., MASK] = -torch.inf
    confidence, ids = torch.softmax(logits, -1).max(-1)  # [N, B]
    confidence = torch.where(masked, confidence, -1.0)
    chosen = confidence > threshold
    best = torch.zeros_like(chosen).scatter(1, confidence.argmax(1, keepdim=True), True)
    chosen = torch.where(chosen.any(1, keepdim=True), chosen, best) & masked
    block[chosen] = ids[chosen]
    masked[chosen] = False


@torch.no_grad()
def fill(
    model: NanoClover, prompts: list[list[int]], threshold: float, max_blocks: int = 4
) -> tuple[list[list[int]], int]:
    """Threshold fill for many prompts at once; returns the responses and the total number of denoise steps."""
    answers: list[list[int]] = [[] for _ in prompts]
    active, steps = list(range(len(prompts))), 0
    for _ in range(max_blocks):
        if not active:
            break
        docs = [Document(prompts[i], answers[i] + [MASK] * BLOCK) for i in active]  # the block lies in the last chunk
        packed = one_per_row(docs)
        packed.block_chunk = torch.tensor([[d.chunks - 1] for d in docs])
        masks = make_masks(packed)
        commit = model.commit(packed, masks)
        block = torch.full((len(docs), BLOCK), MASK)
        masked = torch.ones(len(docs), BLOCK, dtype=torch.bool)
        done: dict[int, int] = {}
        while len(done) < len(docs):
            hidden, _ = model.preview(block[:, None], packed, masks, commit)
            running = [i for i in range(len(docs)) if i not in done]
            steps += len(running)
            part_block, part_masked = block[running], masked[running]
            fill_step(model.lm_head(hidden[running, 0]), part_block, part_masked, threshold)
            block[running], masked[running] = part_block, part_masked
            for i in running:
                end = ends(block[i].tolist(), masked[i].tolist())
                if end is not None or not masked[i].any():
                    done[i] = BLOCK if end is None else end
        for i, length in done.items():
            answers[active[i]] += block[i, :length].tolist()
        active = [active[i] for i, length in sorted(done.items()) if length == BLOCK]
    return answers, steps


@torch.no_grad()
def causal_exact(model: NanoClover, docs: list[Document]) -> list[bool]:
    """Whether greedy autoregressive decoding gives exactly the answer.

    It does if and only if, with the answer as input, the arg max is the next answer token everywhere; so one pass decides.
    """
    packed = one_per_row(docs)
    logits = model.lm_head(model.commit(packed, make_masks(packed)).hidden)
    logits[..., MASK] = -torch.inf
    right = logits.argmax(-1)[:, :-1] == packed.tokens[:, 1:]
    result = []
    for i, doc in enumerate(docs):
        first = doc.prompt_chunks * BLOCK - 1
        result.append(bool(right[i, first : first + len(doc.answer)].all()))
    return result


def causal_score(model: NanoClover, tokenizer: Tokenizer, task: str, count: int) -> float:
    docs = [encode(tokenizer, *example) for example in data.held_out(task, count)]
    return sum(causal_exact(model, docs)) / count


def score(model: NanoClover, tokenizer: Tokenizer, task: str, count: int, threshold: float = 0.95) -> Score:
    model.eval()
    docs = [encode(tokenizer, *example) for example in data.held_out(task, count)]
    answers, steps = fill(model, [d.prompt for d in docs], threshold)
    exact = sum(a == d.answer[:-1] for a, d in zip(answers, docs, strict=True))
    model.train()
    return Score(
        count,
        exact / count,
        sum(causal_exact(model, docs)) / count,
        sum(len(a) + 1 for a in answers) / steps,
    )


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("checkpoint", type=Path)
    a.add_argument("--count", type=int, default=100)
    a.add_argument("--threshold", type=float, default=0.95)
    a.add_argument("--threads", type=int, default=1)
    args = a.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load(args.checkpoint)
    for task in data.TASKS_BY_NAME:
        print(f"{task}: {score(model, tokenizer, task, args.count, args.threshold)}", flush=True)


if __name__ == "__main__":
    main()
