"""The steps a validation runs: every kind of run the decode loop makes, two sequences of different lengths at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clover.engines.manifest import Manifest

Ints = npt.NDArray[np.int64]

DEFAULT_PROMPT = 37  # tokens of a random prompt: chunks of odd length, longer than the conv ring


@dataclass(frozen=True)
class Run:
    """One step: rows of every sequence, commit rows first. Rows from `rows[s]` on are padding."""

    name: str
    token_ids: Ints  # [S, T]
    commit: Ints  # [S]
    rows: Ints  # [S]

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """[S, T], False for padding."""
        return np.arange(self.token_ids.shape[1]) < self.rows[:, None]


def ordinary_ids(manifest: Manifest) -> Ints:
    """Ids that text may hold: neither the mask, nor vocabulary padding, nor an end of sequence."""
    special = {*manifest.excluded_token_ids, *manifest.eos_token_ids, manifest.mask_token_id}
    return np.array([i for i in range(manifest.config.vocab_size) if i not in special], np.int64)


def random_prompt(manifest: Manifest, seed: int) -> list[int]:
    """A prompt of random ordinary tokens, as long as the context allows up to DEFAULT_PROMPT."""
    longest = manifest.max_context - 2 * int(manifest.defaults["block_size"]) - 1
    rng = np.random.default_rng(seed)
    return rng.choice(ordinary_ids(manifest), max(1, min(DEFAULT_PROMPT, longest))).tolist()  # type: ignore[no-any-return]


def make_runs(manifest: Manifest, prompt: Sequence[int], block_size: int, seed: int) -> list[Run]:
    """Prefill in two chunks, denoise, commit with the next block's first preview, one autoregressive step.

    The second sequence holds the prompt's later part and half a block, so that every run but the last has padding.
    """
    rng = np.random.default_rng(seed + 1)
    ids, mask = ordinary_ids(manifest), manifest.mask_token_id
    prompts = [list(prompt), list(prompt[len(prompt) // 2 :])]
    sizes = [block_size, max(1, block_size // 2)]
    blocks = [rng.choice(ids, n).tolist() for n in sizes]

    def half_masked(block: list[int]) -> list[int]:
        return [mask if hidden else t for t, hidden in zip(block, rng.random(len(block)) < 0.5, strict=True)]

    cut = [(len(p) + 1) // 2 for p in prompts]
    runs = [
        _run("prefill", [p[:c] for p, c in zip(prompts, cut, strict=True)], [[], []]),
        _run("prefill, next chunk", [p[c:] for p, c in zip(prompts, cut, strict=True)], [[], []]),
        _run("denoise", [[], []], [half_masked(b) for b in blocks]),
        _run("commit + preview", blocks, [[mask] * n for n in sizes]),
        _run("autoregressive", [[int(t)] for t in rng.choice(ids, 2)], [[], []]),
    ]
    return [run for run in runs if run.rows.any()]


def _run(name: str, commit: list[list[int]], preview: list[list[int]]) -> Run:
    rows = [c + p for c, p in zip(commit, preview, strict=True)]
    token_ids = np.zeros((len(rows), max(1, *map(len, rows))), np.int64)
    for s, row in enumerate(rows):
        token_ids[s, : len(row)] = row
    return Run(
        name, token_ids, np.array([len(c) for c in commit], np.int64), np.array([len(r) for r in rows], np.int64)
    )
