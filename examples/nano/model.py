"""The nano Clover in PyTorch: a causal pass and a block-preview pass over one set of weights, for training.

Formulas: tests/oracle/oracle.py. Batches are packed rows, see batch.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from batch import Masks, Packed
from config import BLOCK, Config
from experts import MoE
from mixers import Attention, GatedDeltaNet, LayerContext
from modules import Linear, RmsNorm, linear
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, c: Config, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.input_layernorm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(c)
        else:
            self.self_attn = Attention(c)
        self.mlp = MoE(c)

    def commit(self, h: Tensor, position: Tensor, masks: Masks) -> tuple[Tensor, Tensor, LayerContext]:
        """The residual stream after the token mixer, the MoE's input, and the context for previews."""
        x = self.input_layernorm(h)
        if self.kind == "linear_attention":
            y, context = self.linear_attn.commit(x, masks)
        else:
            y, context = self.self_attn.commit(x, position, masks)
        return h + y, self.post_attention_layernorm(h + y), context

    def preview(
        self, g: Tensor, position: Tensor, context: LayerContext, masks: Masks, block_chunk: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = self.input_layernorm(g)
        if self.kind == "linear_attention":
            y = self.linear_attn.preview(x, context, block_chunk)
        else:
            y = self.self_attn.preview(x, position, context, masks)
        return g + y, self.post_attention_layernorm(g + y)


FULL_PRECISION = ("mlp.gate", "shared_expert_gate", "lm_head", "in_proj_a", "in_proj_b")


def set_half(model: nn.Module, half: bool) -> None:
    """Switches the layers' large products between bfloat16 and float32; router, head and gates stay float32.

    The experts stay float32, too: their slices have a new length at every step, for which oneDNN would build a new
    bfloat16 kernel each time.
    """
    for name, module in model.named_modules():
        if isinstance(module, Linear) and not name.endswith(FULL_PRECISION):
            module.half_precision = half


class Decoder(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c.layer_types)
        self.norm = RmsNorm(c.hidden_size, c.rms_norm_eps)


@dataclass
class Commit:
    """Result of the causal pass."""

    hidden: Tensor  # [N, T, hidden], after the final norm
    contexts: list[LayerContext] = field(default_factory=list)
    balance: list[Tensor] = field(default_factory=list)


class NanoClover(nn.Module):
    """Parameter names are the checkpoint's tensor names."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.model = Decoder(c)
        self.lm_head = linear(c.hidden_size, c.vocab_size)

    def commit(self, batch: Packed, masks: Masks) -> Commit:
        h = self.model.embed_tokens(batch.tokens)
        result = Commit(h)
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            h, x, context = layer.commit(h, batch.position, masks)
            y, balance = layer.mlp(x, coreset=False)
            h = h + y
            result.contexts.append(context)
            result.balance.append(balance)
        result.hidden = self.model.norm(h)
        return result

    def preview(self, noisy: Tensor, batch: Packed, masks: Masks, commit: Commit) -> tuple[Tensor, list[Tensor]]:
        """Hidden rows [N, J, B, hidden] of the previewed blocks `noisy` [N, J, B], and the balance losses."""
        g = self.model.embed_tokens(noisy)
        row = torch.arange(noisy.shape[0])[:, None]
        position = torch.unflatten(batch.position, 1, (-1, BLOCK))[row, batch.block_chunk].flatten(1)
        balances = []
        for layer, context in zip(self.model.layers, commit.contexts, strict=True):
            assert isinstance(layer, Layer)
            g, x = layer.preview(g, position, context, masks, batch.block_chunk)
            y, balance = layer.mlp(x, coreset=True)
            g = g + y
            balances.append(balance)
        hidden: Tensor = self.model.norm(g)
        return hidden, balances
