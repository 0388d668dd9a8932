"""The whole model in NumPy: the step graph's numbers, without a graph.

It runs the same rows the step graph runs (commit rows, then preview rows, then padding, several sequences at
once) on the reference implementations of the three custom ops, and can hand out its intermediates, so that a
backend is validated layer by layer. float64 for exactness, float32 for what deployment computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.exporter.config import ModelConfig
from clover.plugins.bidirectional_gdn.reference import bidirectional_gated_delta_net
from clover.plugins.bidirectional_gdn.spec import GatedDeltaNetAttributes
from clover.plugins.moe_coreset_routing.reference import moe_coreset_routing
from clover.plugins.moe_coreset_routing.spec import CoresetAttributes
from clover.plugins.moe_experts.reference import moe_experts, pair_rows, route
from clover.plugins.moe_experts.spec import ExpertsAttributes
from clover.plugins.numerics import BoolArray, FloatArray, IntArray, rms_normalize, row_ranges, sigmoid, silu, softmax

Capture = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class ReferenceState:
    """Clean state of S sequences. Keyed by layer index; a step returns a new one and changes no array of it.

    position [S] int64: tokens committed. recurrent [S, Hv, Dk, Dv], conv [S, K-1, C]. keys (rotated) and values
    [S, L, kv_heads, head_dim] with L the longest position; rows from a sequence's own position on are zero.
    """

    position: npt.NDArray[np.int64]
    recurrent: Mapping[int, FloatArray]
    conv: Mapping[int, FloatArray]
    keys: Mapping[int, FloatArray]
    values: Mapping[int, FloatArray]


@dataclass(frozen=True)
class _Rows:
    """Which rows of a step are what."""

    commit_length: IntArray  # [S]
    row_length: IntArray  # [S]
    ranges: list[tuple[int, int]]  # per sequence: end of its commit rows, end of its rows
    valid: BoolArray  # [S, T], False for padding


class ReferenceModel:
    """A Clover model on NumPy.

    tensors: canonical names (`model.layers.N.…`, `model.embed_tokens.weight`, …), experts fused
    (`mlp.experts.gate_up_proj` with gate rows first). It may load lazily: each name is looked up when it is
    needed and not kept, and experts are indexed before they are converted to dtype.
    """

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, npt.NDArray[Any]], dtype: npt.DTypeLike = np.float64
    ) -> None:
        """Raises ValueError when dtype is neither float32 nor float64."""
        self.config = config
        self.tensors = tensors
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ValueError(f"the reference computes in float32 or float64, not {self.dtype}")

    def initial_state(self, sequences: int = 1) -> ReferenceState:
        """The state before any token."""
        c = self.config
        recurrent = (sequences, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        conv = (sequences, c.conv_history, c.conv_channels)
        cache = (sequences, 0, c.num_key_value_heads, c.head_dim)
        return ReferenceState(
            position=np.zeros(sequences, np.int64),
            recurrent={i: np.zeros(recurrent, self.dtype) for i in c.gdn_layers},
            conv={i: np.zeros(conv, self.dtype) for i in c.gdn_layers},
            keys={i: np.zeros(cache, self.dtype) for i in c.attention_layers},
            values={i: np.zeros(cache, self.dtype) for i in c.attention_layers},
        )

    def step(
        self,
        token_ids: IntArray,  # [S, T]
        commit_length: IntArray,  # [S]
        row_length: IntArray,  # [S]
        state: ReferenceState,
        coreset_top_p: npt.ArrayLike,  # [S], or one number for all
        capture: Capture | None = None,
    ) -> tuple[FloatArray, ReferenceState]:
        """Runs one step; returns (logits [S, T, vocab], the state after the commit rows).

        Padding rows' tokens are not read; their logits and captured rows are zeros. `capture`, when given, is
        filled with, per layer N: `layers.N.mixer` (the token mixer's output), `layers.N.router_logits` (before
        the coreset, [S, T, E]), `layers.N.experts` (each row's experts ascending, -1 in padding rows,
        [S, T, top_k]), `layers.N.hidden` (the residual stream after the layer, [S, T, hidden]); and `logits`.
        Raises ValueError when the lengths are not 0 ≤ commit_length ≤ row_length ≤ T.
        """
        width = token_ids.shape[1]
        ranges = row_ranges(commit_length, row_length, width)
        rows = _Rows(commit_length, row_length, ranges, np.arange(width) < np.asarray(row_length)[:, None])
        embedding = self.tensors["model.embed_tokens.weight"]
        h = embedding[np.where(rows.valid, token_ids, 0)].astype(self.dtype)  # [S, T, hidden]
        h[~rows.valid] = 0  # and stays 0: mixers and experts write nothing there
        recurrent, conv, keys, values = dict(state.recurrent), dict(state.conv), dict(state.keys), dict(state.values)
        for i, kind in enumerate(self.config.layer_types):
            p = f"model.layers.{i}."
            x = self._norm(h, p + "input_layernorm.weight")
            if kind == "linear_attention":
                mixed, conv[i], recurrent[i] = self._gdn(x, p + "linear_attn.", rows, conv[i], recurrent[i])
            else:
                mixed, keys[i], values[i] = self._attention(
                    x, p + "self_attn.", rows, state.position, keys[i], values[i]
                )
            h = h + mixed
            x = self._norm(h, p + "post_attention_layernorm.weight")
            h = h + self._moe(x, p + "mlp.", rows, coreset_top_p, capture, f"layers.{i}.")
            if capture is not None:
                capture[f"layers.{i}.mixer"], capture[f"layers.{i}.hidden"] = mixed, h
        head = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        logits = self._linear(self._norm(h, "model.norm.weight"), head)
        if capture is not None:
            capture["logits"] = logits
        position = state.position + np.asarray(commit_length, np.int64)
        return logits, ReferenceState(position, recurrent, conv, keys, values)

    # -- small pieces ---------------------------------------------------------------------------

    def _tensor(self, name: str) -> FloatArray:
        return np.asarray(self.tensors[name]).astype(self.dtype, copy=False)

    def _linear(self, x: FloatArray, name: str) -> FloatArray:
        out: FloatArray = x @ self._tensor(name).T
        return out

    def _norm(self, x: FloatArray, name: str) -> FloatArray:
        return rms_normalize(x, self.config.rms_norm_eps) * (1 + self._tensor(name))

    def _rotate(self, x: FloatArray, positions: IntArray) -> FloatArray:
        """RoPE on a head's first rotary_dim dimensions: x [n, heads, head_dim] at positions [n]."""
        d = self.config.rotary_dim
        frequency = self.config.rope_theta ** -(np.arange(0, d, 2) / d)
        angle = np.concatenate([positions[:, None] * frequency] * 2, axis=-1)[:, None]  # [n, 1, d]
        turned, rest = x[..., :d], x[..., d:]
        half = np.concatenate([-turned[..., d // 2 :], turned[..., : d // 2]], axis=-1)
        cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
        return np.concatenate([turned * cos + half * sin, rest], axis=-1)

    # -- token mixers ---------------------------------------------------------------------------

    def _gdn(
        self, x: FloatArray, p: str, rows: _Rows, conv: FloatArray, recurrent: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """x [S, T, hidden] -> (mixed [S, T, hidden], new conv, new recurrent)."""
        c = self.config
        o, new_conv, new_recurrent = bidirectional_gated_delta_net(
            self._linear(x, p + "in_proj_qkv.weight"),
            self._linear(x, p + "in_proj_a.weight"),
            self._linear(x, p + "in_proj_b.weight"),
            conv,
            recurrent,
            self._tensor(p + "conv1d.weight")[:, 0],
            self._tensor(p + "conv_right_weight").reshape(c.conv_channels, c.conv_history),
            -np.exp(self._tensor(p + "A_log")),
            self._tensor(p + "dt_bias"),
            self._tensor(p + "bd_softmax_logit_scale"),
            self._tensor(p + "bd_softmax_history_bias"),
            self._tensor(p + "bd_softmax_history_c"),
            rows.commit_length,
            rows.row_length,
            attributes=GatedDeltaNetAttributes.from_config(c),
        )
        heads = (*x.shape[:2], c.linear_num_value_heads, c.linear_value_head_dim)
        z = self._linear(x, p + "in_proj_z.weight").reshape(heads)
        y = rms_normalize(o.reshape(heads), c.rms_norm_eps) * self._tensor(p + "norm.weight") * silu(z)
        return self._linear(y.reshape(o.shape), p + "out_proj.weight"), new_conv, new_recurrent

    def _attention(
        self, x: FloatArray, p: str, rows: _Rows, position: IntArray, keys: FloatArray, values: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """x [S, T, hidden] -> (mixed [S, T, hidden], new keys, new values)."""
        c = self.config
        heads, kv, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        query_gate = self._linear(x, p + "q_proj.weight").reshape(*x.shape[:2], heads, 2 * d)
        q = self._norm(query_gate[..., :d], p + "q_norm.weight")
        gate = query_gate[..., d:].reshape(*x.shape[:2], heads * d)
        k = self._norm(self._linear(x, p + "k_proj.weight").reshape(*x.shape[:2], kv, d), p + "k_norm.weight")
        v = self._linear(x, p + "v_proj.weight").reshape(*x.shape[:2], kv, d)
        length = max((int(start) + commit for start, (commit, _) in zip(position, rows.ranges, strict=True)), default=0)
        new_keys, new_values = (np.zeros((len(x), length, kv, d), self.dtype) for _ in range(2))
        o = np.zeros((*x.shape[:2], heads * d), self.dtype)
        for s, (commit, n) in enumerate(rows.ranges):
            start = int(position[s])
            positions = np.arange(start, start + n)
            all_keys = np.concatenate([keys[s, :start], self._rotate(k[s, :n], positions)])  # [start+n, kv, d]
            all_values = np.concatenate([values[s, :start], v[s, :n]])
            # Commit rows are causal; preview rows see the clean past and every row of the step.
            visible = (np.arange(start + n) <= positions[:, None]) | (np.arange(n) >= commit)[:, None]
            if n:
                o[s, :n] = grouped_attention(self._rotate(q[s, :n], positions), all_keys, all_values, visible)
            new_keys[s, : start + commit] = all_keys[: start + commit]
            new_values[s, : start + commit] = all_values[: start + commit]
        return self._linear(o * sigmoid(gate), p + "o_proj.weight"), new_keys, new_values

    # -- mixture of experts ---------------------------------------------------------------------

    def _moe(
        self, x: FloatArray, p: str, rows: _Rows, top_p: npt.ArrayLike, capture: Capture | None, layer: str
    ) -> FloatArray:
        """x [S, T, hidden] -> [S, T, hidden]: routed experts plus the gated shared expert."""
        c = self.config
        logits = self._linear(x, p + "gate.weight")  # [S, T, E]
        routed = logits
        if c.coreset_enabled:
            routed = moe_coreset_routing(
                logits, rows.commit_length, rows.row_length, top_p, attributes=CoresetAttributes.from_config(c)
            )
        valid = x[rows.valid]  # [N, hidden]
        out = moe_experts(
            valid,
            routed[rows.valid],
            pair_rows(self.tensors[p + "experts.gate_up_proj"]),
            None,
            self.tensors[p + "experts.down_proj"],
            None,
            attributes=ExpertsAttributes.from_config(c, group_size=0),
        )
        s = p + "shared_expert."
        inner = silu(self._linear(valid, s + "gate_proj.weight")) * self._linear(valid, s + "up_proj.weight")
        shared = self._linear(inner, s + "down_proj.weight")
        mixed = np.zeros_like(x)
        mixed[rows.valid] = out + sigmoid(self._linear(valid, p + "shared_expert_gate.weight")) * shared
        if capture is not None:
            ids = np.sort(route(routed, c.num_experts_per_tok)[0], axis=-1)
            capture[layer + "router_logits"] = logits
            capture[layer + "experts"] = np.where(rows.valid[..., None], ids, -1)
        return mixed


def grouped_attention(q: FloatArray, k: FloatArray, v: FloatArray, visible: BoolArray) -> FloatArray:
    """Softmax attention, scaled by head_dim^-½, each key head serving heads / kv_heads query heads.

    q [n, heads, d], k and v [m, kv_heads, d], visible [n, m] -> [n, heads*d].
    """
    n, heads, d = q.shape
    kv = k.shape[1]
    grouped = q.reshape(n, kv, heads // kv, d).transpose(1, 2, 0, 3)  # [kv, group, n, d]
    logits = grouped @ k.transpose(1, 2, 0)[:, None] * d**-0.5  # [kv, group, n, m]
    weights = softmax(np.where(visible, logits, np.asarray(-np.inf, q.dtype)))
    o: FloatArray = weights @ v.swapaxes(0, 1)[:, None]  # [kv, group, n, d]
    return o.transpose(2, 0, 1, 3).reshape(n, heads * d)
