"""`clover logits`: raw logits of a committed prompt and of a previewed block, for comparisons with other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.engines.bundle import Bundle
from clover.engines.open import open_session
from clover.runtime.errors import BundleError, RequestError
from clover.runtime.session import SequenceRows, StepSession
from clover.runtime.terminal.output import check_out, write_out

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Logits:
    """prompt [n], block [B] int64; commit_logits [n, V], preview_logits [B, V] float32, before any penalty."""

    prompt: npt.NDArray[np.int64]
    block: npt.NDArray[np.int64]
    commit_logits: Floats
    preview_logits: Floats

    def save(self, path: Path) -> None:
        """Writes the arrays as .npz beside `path` and renames it there. Raises CloverError when that fails."""

        def write(work: Path) -> None:
            with work.open("wb") as file:
                np.savez_compressed(
                    file, prompt=self.prompt, block=self.block,
                    commit_logits=self.commit_logits, preview_logits=self.preview_logits,
                )  # fmt: skip

        write_out(path, write)


def parse_ids(text: str, option: str) -> list[int]:
    """Token ids in `1,2,3`; an empty text is no ids. Raises RequestError naming what is no number."""
    ids = []
    for part in (p.strip() for p in text.split(",") if p.strip()):
        if not part.isascii() or not part.isdigit():
            raise RequestError(option, f"--{option}: {part!r} is no token id; write ids as 1,2,3.")
        ids.append(int(part))
    return ids


def check_ids(ids: Sequence[int], option: str, vocab_size: int) -> None:
    """Raises RequestError for an id outside the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(option, f"--{option} holds token {token}; ids go from 0 to {vocab_size - 1}.")


def compute_logits(
    bundle: Bundle, prompt: Sequence[int], block: Sequence[int], coreset_top_p: float | None = None
) -> Logits:
    """Commits `prompt` (it may be empty) in an empty slot, then previews `block` once.

    Masks and excluded ids may stand in both; their logits are given as they are. Raises BundleError for a bundle built
    without logits, RequestError for ids, a block or a top_p that can't be honoured.
    """
    manifest = bundle.manifest
    if not manifest.graph.with_logits:
        raise BundleError(
            f"{bundle.directory} keeps its logits to itself; build it with `clover build … --with-logits` to see them."
        )
    vocab, largest = manifest.config.vocab_size, max(manifest.block_sizes)
    check_ids(prompt, "prompt", vocab)
    check_ids(block, "block", vocab)
    if not 1 <= len(block) <= largest:
        raise RequestError(
            "block", f"--block holds {len(block)} tokens; a block of this bundle has 1 to {largest} (the mask is {manifest.mask_token_id})."
        )  # fmt: skip
    if len(prompt) > manifest.max_context:
        raise RequestError(
            "prompt", f"--prompt holds {len(prompt)} tokens; this bundle's context holds {manifest.max_context}."
        )
    top_p = manifest.defaults["coreset_top_p"] if coreset_top_p is None else coreset_top_p
    if not 0.0 < top_p <= 1.0:
        raise RequestError("coreset_top_p", f"--coreset-top-p is {top_p:g}; it must be above 0 and at most 1.")
    # GPU engines give no logits out, the graph beside them does
    session = open_session(bundle, max_context=max(1, len(prompt)), cache=False, provider="cpu")
    try:
        commit = np.zeros((len(prompt), vocab), np.float32)
        for start in range(0, len(prompt), session.max_rows):
            chunk = prompt[start : start + session.max_rows]
            commit[start : start + len(chunk)] = _run(session, chunk, len(chunk), top_p)
        preview = _run(session, block, 0, top_p)
    finally:
        session.close()
    return Logits(np.array(prompt, np.int64), np.array(block, np.int64), commit, preview)


def _run(session: StepSession, tokens: Sequence[int], commit: int, top_p: float) -> Floats:
    """Logits [rows, V] of one step of one sequence."""
    every = np.arange(len(tokens), dtype=np.int64)
    rows = SequenceRows(0, np.array(tokens, np.int64), commit, every, coreset_top_p=top_p)
    (candidates,) = session.step([rows])
    assert candidates.logits is not None  # the manifest promised them
    return candidates.logits.copy()  # the next step overwrites the session's


def logits_command(bundle: Path, prompt: str, block: str, out: Path, coreset_top_p: float | None) -> dict[str, Any]:
    """The verb: writes `out` and returns what was written, as JSON data."""
    check_out(out)
    result = compute_logits(Bundle.open(bundle), parse_ids(prompt, "prompt"), parse_ids(block, "block"), coreset_top_p)
    result.save(out)
    return {
        "out": str(out),
        "prompt_tokens": len(result.prompt),
        "block_size": len(result.block),
        "vocab_size": result.preview_logits.shape[1],
    }
