"""Trains the nano's tokenizer: byte-level BPE over words, single digits and runs of punctuation.

Names, sites and cities never absorb the space before them, so that a value has the same token in the prompt
and in the JSON answer, and copying it means repeating a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import data
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# The ids are positions in this list; generation_config.json and config.json name 0, 2 (end) and 3 (mask).
SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>",
    "<tool_call>", "</tool_call>", "<think>", "</think>",
]  # fmt: skip
END_OF_TEXT, END_OF_TURN, MASK = 0, 2, 3
END_IDS = (END_OF_TURN, END_OF_TEXT)
WORDS = r"[A-Z]+(?=\d)|[A-Z][a-z]*| ?[a-z_]+|[0-9]|[^A-Za-z0-9]+"


def train_tokenizer(path: Path, vocab_size: int, samples: int = 20_000) -> Tokenizer:
    """Trains on generated tasks and writes tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        r = Random(7)
        for _ in range(samples):
            prompt, answer = data.sample(r)
            yield prompt
            yield answer
            yield "user\n"
            yield "assistant\n"

    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(path))
    return tokenizer
