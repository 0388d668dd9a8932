"""Muon for matrices, Adam for the rest (K. Jordan et al., "Muon: an optimizer for hidden layers", 2024)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix, batched over leading dimensions."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.shape[-2] > g.shape[-1]
    x = g.transpose(-1, -2) if tall else g
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()  # the iteration corrects its own rounding
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.transpose(-1, -2) if tall else x).float()


class Muon:
    """Momentum, then orthogonalization; same-shaped matrices are processed as one batch."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.02) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for p in parameters:
            groups.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
        self.groups = list(groups.values())
        self.buffers = [[torch.zeros_like(p) for p in group] for group in self.groups]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group, buffers in zip(self.groups, self.buffers, strict=True):
            updates = []
            for p, buffer in zip(group, buffers, strict=True):
                assert p.grad is not None
                buffer.lerp_(p.grad, 1 - self.momentum)
                updates.append(p.grad.lerp(buffer, self.momentum).view(-1, *p.shape[-2:]))
            rows, columns = group[0].shape[-2:]
            scale = max(1.0, rows / columns) ** 0.5
            step = orthogonalize(torch.cat(updates)) * (lr * scale)
            for p, u in zip(group, step.split([len(u) for u in updates]), strict=True):
                p.mul_(1 - lr * self.weight_decay).sub_(u.view_as(p))
