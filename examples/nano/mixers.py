"""Token mixers: gated delta net and attention, each with a causal pass (`commit`) and a block preview.

Formulas: tests/oracle/oracle.py (an independent float64 form) and Qwen3.5-MoE in transformers.
Letters in shape comments: N rows, T columns, C = T / 32 chunks, J previewed blocks, B = 32, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from batch import Masks
from config import BLOCK, Config
from modules import GatedNorm, RmsNorm, linear
from torch import Tensor, nn


@dataclass
class LayerContext:
    """What the causal pass of one layer leaves for previews."""

    states: Tensor | None = None  # [N, C, Hv, Dk, Dv]: the recurrent state at the start of each chunk
    projected: Tensor | None = None  # [N, T, channels]: rows before the convolution
    keys: Tensor | None = None  # [N, Hkv, T, D], rotated
    values: Tensor | None = None  # [N, Hkv, T, D]


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, position: Tensor, theta: float, size: int) -> Tensor:
    """RoPE on the first `size` dimensions; x [N, T, H, D], position [N, T]."""
    frequency = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = position[:, :, None, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)^-1 for strictly lower-triangular a [..., 32, 32].

    By substitution: the product (I - a)(I + a^2)(I + a^4)... is exact, too, but cancels badly where keys repeat.
    """
    eye = torch.eye(a.shape[-1], dtype=a.dtype)
    inverse: Tensor = torch.linalg.solve_triangular(eye + a, eye.expand_as(a), upper=False, unitriangular=True)
    return inverse


class Conv(nn.Module):
    """Holds `conv1d.weight` [channels, 1, kernel]; the sum itself is in GatedDeltaNet."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        taps = torch.randn(channels, 1, kernel) * 0.2
        taps[..., -1] = 1.0
        self.weight = nn.Parameter(taps)


class GatedDeltaNet(nn.Module):
    """Gated delta rule in the causal pass; block softmax with a history slot in the preview."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        heads, values = c.linear_num_value_heads, c.linear_num_value_heads * c.linear_value_head_dim
        self.in_proj_qkv = linear(c.hidden_size, c.conv_channels)
        self.in_proj_z = linear(c.hidden_size, values)
        self.in_proj_b = linear(c.hidden_size, heads)
        self.in_proj_a = linear(c.hidden_size, heads)
        self.conv1d = Conv(c.conv_channels, c.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.5, 4.0).log())
        self.dt_bias = nn.Parameter(torch.linspace(-8.0, -4.0, heads))  # slow decay: keep the whole prompt
        self.norm = GatedNorm(c.linear_value_head_dim, c.rms_norm_eps)
        self.out_proj = linear(values, c.hidden_size, 0.5)
        self.conv_right_weight = nn.Parameter(torch.zeros(c.conv_channels, c.linear_conv_kernel_dim - 1))
        self.bd_softmax_logit_scale = nn.Parameter(torch.full((heads,), 8.0))
        self.bd_softmax_history_bias = nn.Parameter(torch.full((heads,), 2.0))
        self.bd_softmax_history_c = nn.Parameter(torch.ones(heads))

    def heads(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits [..., T, channels] into q, k, v, each [..., Hv, T, D]; key heads repeated."""
        c = self.c
        keys = c.linear_num_key_heads * c.linear_key_head_dim
        q, k, v = torch.split(u, [keys, keys, u.shape[-1] - 2 * keys], -1)
        group = c.linear_num_value_heads // c.linear_num_key_heads
        size = (c.linear_num_key_heads, c.linear_key_head_dim)
        q, k = (l2norm(torch.unflatten(y, -1, size)).repeat_interleave(group, -2).transpose(-2, -3) for y in (q, k))
        return q, k, torch.unflatten(v, -1, (c.linear_num_value_heads, -1)).transpose(-2, -3)

    def output(self, o: Tensor, x: Tensor) -> Tensor:
        """Gated norm and output projection; o [..., T, Hv, Dv], x [..., T, hidden]."""
        z = torch.unflatten(self.in_proj_z(x), -1, o.shape[-2:])
        out: Tensor = self.out_proj(self.norm(o, z).flatten(-2))
        return out

    def commit(self, x: Tensor, masks: Masks) -> tuple[Tensor, LayerContext]:
        """The causal pass, chunk-wise: within a chunk in closed form, between chunks by the state."""
        c, (n, t, _) = self.c, x.shape
        chunks = t // BLOCK
        projected = self.in_proj_qkv(x) * masks.valid
        taps = self.conv1d.weight[:, 0]  # [channels, 4], the last for the current row
        u = projected * taps[:, 3]
        for back in (1, 2, 3):
            shifted = F.pad(projected, (0, 0, back, 0))[:, :t]
            u = u + shifted * taps[:, 3 - back] * masks.same_document[back - 1]
        q, k, v = self.heads(F.silu(u).view(n, chunks, BLOCK, -1))  # [N, C, H, B, D]
        q = q * c.linear_key_head_dim**-0.5
        beta = torch.sigmoid(self.in_proj_b(x)) * masks.valid  # [N, T, H]
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias) * masks.valid
        beta = beta.view(n, chunks, BLOCK, -1).transpose(2, 3)[..., None]  # [N, C, H, B, 1]
        total = decay.view(n, chunks, BLOCK, -1).transpose(2, 3).cumsum(-1)[..., None]
        lower = torch.ones(BLOCK, BLOCK).tril()
        between = torch.exp((total - total.transpose(-1, -2)).clamp(max=0)) * lower  # [N, C, H, B, B]
        kb = k * beta
        inverse = unit_lower_inverse(((kb @ k.transpose(-1, -2)) * between).tril(-1))
        fresh = inverse @ (v * beta)
        erase = inverse @ (kb * total.exp())
        inside = (q @ k.transpose(-1, -2)) * between
        q = q * total.exp()
        end = total[..., -1:, :]
        k_end = (k * torch.exp(end - total)).transpose(-1, -2)
        carry = end.exp()
        state = x.new_zeros(n, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        states, outputs = [], []
        for i in range(chunks):
            state = state * masks.keep_state[:, i]
            states.append(state)
            new = fresh[:, i] - erase[:, i] @ state
            outputs.append(q[:, i] @ state + inside[:, i] @ new)
            state = state * carry[:, i] + k_end[:, i] @ new
        o = torch.stack(outputs, 1).transpose(2, 3).reshape(n, t, c.linear_num_value_heads, -1)
        return self.output(o, x), LayerContext(states=torch.stack(states, 1), projected=projected)

    def preview(self, y: Tensor, context: LayerContext, block_chunk: Tensor) -> Tensor:
        """Block softmax over the block's rows and the history; y [N, J, B, hidden]."""
        assert context.states is not None and context.projected is not None
        n, j = block_chunk.shape
        row = torch.arange(n)[:, None]
        chunks = torch.unflatten(context.projected, 1, (-1, BLOCK))
        ring = chunks[:, :, BLOCK - 3 :][row, (block_chunk - 1).clamp(min=0)]  # [N, J, 3, channels]
        own = self.in_proj_qkv(y)
        line = F.pad(torch.cat([ring, own], 2), (0, 0, 0, 3))
        taps = torch.cat([self.conv1d.weight[:, 0], self.conv_right_weight], 1)  # [channels, 7]
        u = line[:, :, :BLOCK] * taps[:, 0]
        for tap in range(1, 7):
            u = u + line[:, :, tap : tap + BLOCK] * taps[:, tap]
        q, k, v = self.heads(F.silu(u))  # [N, J, H, B, D]
        logits = (q @ k.transpose(-1, -2)) * self.bd_softmax_logit_scale[:, None, None]
        # history_c multiplies ln(n / 32), which is 0 for whole blocks: it keeps its initial value
        history = self.bd_softmax_history_bias[:, None, None].expand(n, j, -1, BLOCK, 1)
        share = torch.softmax(torch.cat([history, logits], -1), -1)
        readout = (q @ context.states[row, block_chunk]) * self.c.linear_key_head_dim**-0.5
        o = share[..., :1] * readout + share[..., 1:] @ v
        return self.output(o.transpose(2, 3), y)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys, partial RoPE and an output gate."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        h, heads, kv, d = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = linear(h, 2 * heads * d)
        self.k_proj = linear(h, kv * d)
        self.v_proj = linear(h, kv * d)
        self.o_proj = linear(heads * d, h, 0.5)
        self.q_norm = RmsNorm(d, c.rms_norm_eps)
        self.k_norm = RmsNorm(d, c.rms_norm_eps)

    def project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [N, Hkv, G*T, D] with the query heads of a group stacked, k and v [N, Hkv, T, D], gate [N, T, Hq*D]."""
        c, (n, t, _) = self.c, x.shape
        heads, kv, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        rotary = int(d * c.partial_rotary_factor)
        q, gate = torch.split(self.q_proj(x).view(n, t, heads, 2 * d), d, -1)
        q = rotate(self.q_norm(q), position, c.rope_theta, rotary)
        k = rotate(self.k_norm(self.k_proj(x).view(n, t, kv, d)), position, c.rope_theta, rotary)
        v = self.v_proj(x).view(n, t, kv, d)
        grouped = q.view(n, t, kv, heads // kv, d).permute(0, 2, 3, 1, 4).reshape(n, kv, -1, d)
        return grouped, k.transpose(1, 2), v.transpose(1, 2), gate.flatten(-2)

    def output(self, o: Tensor, gate: Tensor) -> Tensor:
        """o [N, Hkv, G*T, D] back to rows, gated and projected."""
        n, t, _ = gate.shape
        rows = o.view(n, o.shape[1], -1, t, self.c.head_dim).permute(0, 3, 1, 2, 4).reshape(n, t, -1)
        out: Tensor = self.o_proj(rows * torch.sigmoid(gate))
        return out

    def commit(self, x: Tensor, position: Tensor, masks: Masks) -> tuple[Tensor, LayerContext]:
        q, k, v, gate = self.project(x, position)
        group = self.c.num_attention_heads // self.c.num_key_value_heads
        scores = (q * self.c.head_dim**-0.5) @ k.transpose(-1, -2)
        scores = torch.unflatten(scores, 2, (group, -1)) + masks.causal[:, :, None]
        o = torch.softmax(scores, -1).flatten(2, 3) @ v
        return self.output(o, gate), LayerContext(keys=k, values=v)

    def preview(self, y: Tensor, position: Tensor, context: LayerContext, masks: Masks) -> Tensor:
        """Rows of each block attend to the document's clean keys before the block and to the whole block."""
        assert context.keys is not None and context.values is not None
        n, j = y.shape[:2]
        kv, d = self.c.num_key_value_heads, self.c.head_dim
        group = self.c.num_attention_heads // kv
        q, k, v, gate = self.project(y.flatten(1, 2), position)
        q = q * d**-0.5
        past = q @ context.keys.transpose(-1, -2)  # [N, Hkv, G*J*B, T]
        past = torch.unflatten(past, 2, (group, -1)) + masks.preview[:, :, None]
        k, v = k.view(n, kv, 1, j, BLOCK, d), v.view(n, kv, 1, j, BLOCK, d)
        own = q.view(n, kv, group, j, BLOCK, d) @ k.transpose(-1, -2)  # [N, Hkv, G, J, B, B]
        share = torch.softmax(torch.cat([past, own.flatten(3, 4)], -1), -1)
        inside = torch.unflatten(share[..., -BLOCK:], 3, (j, BLOCK)) @ v
        o = share[..., :-BLOCK].flatten(2, 3) @ context.values + inside.reshape(n, kv, -1, d)
        return self.output(o, gate).view_as(y)
