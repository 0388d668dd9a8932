"""Norms and matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RmsNorm(nn.Module):
    """x / rms(x) · (1 + w), Qwen3.5's zero-centred form."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class GatedNorm(nn.Module):
    """x / rms(x) · w · SiLU(z)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight * F.silu(z)


class Linear(nn.Linear):
    """A matrix without bias; with `half_precision` the product runs in bfloat16, 2-5 times faster on CPUs with AVX512-BF16."""

    half_precision = False

    def forward(self, x: Tensor) -> Tensor:
        if self.half_precision:
            return F.linear(x.bfloat16(), self.weight.bfloat16()).float()
        return F.linear(x, self.weight)


def linear(inputs: int, outputs: int, gain: float = 1.0) -> Linear:
    layer = Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain * inputs**-0.5)
    return layer
