"""Packed rows and their masks.

A row holds C chunks of 32 columns; a document occupies whole chunks: its prompt, padded on the left to a chunk
boundary, then its answer, padded on the right with end-of-text. So every answer block is exactly one chunk, and the
state a preview of that block reads is the state at the chunk's start.

Letters in shape comments: N rows, T columns (= 32 C), J previewed blocks per row, B = 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from config import BLOCK
from torch import Tensor


@dataclass
class Packed:
    """A packed batch. Columns of no document (padding on the left, unused chunks) have document -1."""

    tokens: Tensor  # [N, T] int64
    document: Tensor  # [N, T] int64, -1 for padding
    position: Tensor  # [N, T] float32, 0 at the document's first token
    block_chunk: Tensor  # [N, J] int64: the chunk each previewed block stands in for


@dataclass
class Masks:
    """Masks both passes share; computed once per batch."""

    same_document: Tensor  # [3, N, T, 1] float: is the row 1, 2, 3 columns back in the same document
    valid: Tensor  # [N, T, 1] float
    keep_state: Tensor  # [N, C, 1, 1, 1] float: 0 where a document starts
    causal: Tensor  # [N, 1, T, T] float, additive
    preview: Tensor  # [N, 1, J*B, T] float, additive: clean keys visible to each previewed row


def make_masks(batch: Packed) -> Masks:
    document, (n, t) = batch.document, batch.document.shape
    column = torch.arange(t)
    shifted = [F.pad(document, (d, 0), value=-2)[:, :t] for d in (1, 2, 3)]
    same = torch.stack([(s == document) & (document >= 0) for s in shifted])[..., None].float()
    last = document.view(n, -1, BLOCK)[:, :, -1]  # every document ends at a chunk's end
    keep = (F.pad(last, (1, 0), value=-2)[:, :-1] == last) & (last >= 0)
    visible = (
        (document[:, :, None] == document[:, None, :]) & (column[:, None] >= column[None]) & (document >= 0)[:, None]
    )
    visible |= torch.eye(t, dtype=torch.bool)  # a padding row sees itself, so that its softmax is defined
    start = (batch.block_chunk * BLOCK).repeat_interleave(BLOCK, 1)  # [N, J*B]
    owner = last.gather(1, batch.block_chunk).repeat_interleave(BLOCK, 1)
    clean = (document[:, None] == owner[..., None]) & (column < start[..., None]) & (owner >= 0)[..., None]
    return Masks(
        same_document=same,
        valid=(document >= 0)[..., None].float(),
        keep_state=keep.float()[:, :, None, None, None],
        causal=torch.where(visible, 0.0, -1e9)[:, None],
        preview=torch.where(clean, 0.0, -1e9)[:, None],
    )
