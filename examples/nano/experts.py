"""Mixture of experts: top-k routing, the block coreset of previews, and a grouped matrix product.

Rows are sorted by expert once; every expert then is one contiguous slice, so no row is padded or computed twice.
Formulas: `block_coreset` in tests/oracle/oracle.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from config import BLOCK, Config
from modules import linear
from torch import Tensor, nn


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        k, experts = ids.shape[1], len(gate_up)
        order = ids.flatten().argsort()
        ends = torch.bincount(ids.flatten(), minlength=experts).cumsum(0).tolist()
        slices = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        xs = x[order // k]
        hidden = xs.new_empty(len(order), gate_up.shape[1])
        for e, s in enumerate(slices):
            torch.mm(xs[s], gate_up[e].T, out=hidden[s])
        gate, up = hidden.chunk(2, -1)
        act = F.silu(gate) * up
        y = xs.new_empty(len(order), x.shape[1])
        for e, s in enumerate(slices):
            torch.mm(act[s], down[e].T, out=y[s])
        ws = weights.flatten()[order, None]
        ctx.save_for_backward(xs, hidden, act, y, ws, order, inverse, gate_up, down)
        ctx.slices, ctx.k = slices, k
        return (y * ws)[inverse].view(len(x), k, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        xs, hidden, act, y, ws, order, inverse, gate_up, down = ctx.saved_tensors
        out_grad, k, slices = grads[0], ctx.k, ctx.slices
        dout = out_grad[order // k]
        dweights = (dout * y).sum(-1)[inverse].view(-1, k)
        dy = dout * ws
        dact, dx = torch.empty_like(act), torch.empty_like(xs)
        ddown, dgate_up = torch.empty_like(down), torch.empty_like(gate_up)
        for e, s in enumerate(slices):
            torch.mm(dy[s], down[e], out=dact[s])
            torch.mm(dy[s].T, act[s], out=ddown[e])
        gate, up = hidden.chunk(2, -1)
        sig = torch.sigmoid(gate)
        dhidden = torch.cat([dact * up * sig * (1 + gate * (1 - sig)), dact * gate * sig], -1)
        for e, s in enumerate(slices):
            torch.mm(dhidden[s], gate_up[e], out=dx[s])
            torch.mm(dhidden[s].T, xs[s], out=dgate_up[e])
        return dx[inverse].view(-1, k, xs.shape[1]).sum(1), None, dweights, dgate_up, ddown


def expert_mlp(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Σ_j weights[r, j] · down_e · (SiLU(gate_e x_r) * (up_e x_r)) with e = ids[r, j]; x [R, hidden], ids [R, k]."""
    out = _ExpertMlp.apply(x, ids, weights, gate_up, down)  # type: ignore[no-untyped-call]
    assert isinstance(out, Tensor)
    return out


class Experts(nn.Module):
    """Holds the stacked expert weights."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        e, h, i = c.num_experts, c.hidden_size, c.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.randn(e, 2 * i, h) * h**-0.5)
        self.down_proj = nn.Parameter(torch.randn(e, h, i) * i**-0.5 * 0.5)


class SharedExpert(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = linear(c.hidden_size, c.shared_expert_intermediate_size)
        self.up_proj = linear(c.hidden_size, c.shared_expert_intermediate_size)
        self.down_proj = linear(c.shared_expert_intermediate_size, c.hidden_size, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def block_coreset(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Boolean [blocks, experts]: the experts each block may use; probs [blocks, B, experts].

    Rows vote with their top-k probabilities; experts are taken in descending share up to and including the first
    whose cumulative share reaches top_p, never fewer than top_k.
    """
    values, ids = probs.topk(top_k, -1)
    votes = torch.zeros_like(probs).scatter(-1, ids, values).sum(1)
    share, order = torch.sort(votes / votes.sum(-1, keepdim=True), descending=True, stable=True)
    before = share.cumsum(-1) - share
    taken = (before < top_p) | (torch.arange(share.shape[-1]) < top_k)
    return torch.zeros_like(taken).scatter(-1, order, taken)


class MoE(nn.Module):
    """Top-k routed experts plus a gated shared expert."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.gate = linear(c.hidden_size, c.num_experts)
        self.experts = Experts(c)
        self.shared_expert = SharedExpert(c)
        self.shared_expert_gate = linear(c.hidden_size, 1)

    def route(self, x: Tensor, coreset: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For rows x [R, hidden]: expert ids and weights [R, k], the shared expert's output, the balance loss."""
        c = self.c
        probs = torch.softmax(self.gate(x), -1)
        scores = probs
        if coreset:
            blocks = probs.detach().view(-1, BLOCK, c.num_experts)
            allowed = block_coreset(blocks, c.num_experts_per_tok, c.coreset_top_p)
            scores = torch.where(allowed.repeat_interleave(BLOCK, 0), probs, -1.0)
        ids = scores.topk(c.num_experts_per_tok, -1).indices
        weights = probs.gather(-1, ids)
        weights = weights / weights.sum(-1, keepdim=True)
        used = F.one_hot(ids, c.num_experts).float().sum(1).mean(0)
        balance = (probs.mean(0) * used).sum() * c.num_experts / c.num_experts_per_tok
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return ids, weights, shared, balance

    def forward(self, x: Tensor, coreset: bool) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        ids, weights, shared, balance = self.route(rows, coreset)
        routed = expert_mlp(rows, ids, weights, self.experts.gate_up_proj, self.experts.down_proj)
        return (routed + shared).view_as(x), balance
