"""Full-attention layers: projections with output gate, rotary positions, KV cache in place."""

from __future__ import annotations

from clover.exporter.config import ModelConfig
from clover.exporter.graph.builder import CONTRIB, GraphBuilder
from clover.exporter.graph.dense import Dense
from clover.exporter.graph.rows import Rows


def author_attention(
    b: GraphBuilder,
    c: ModelConfig,
    dense: Dense,
    rows: Rows,
    rope: tuple[str, str, str],
    layer: int,
    hidden: str,
    keys: str,
    values: str,
) -> tuple[str, str, str]:
    """hidden [S*T, H]; keys, values [S, kv_heads, capacity, head_dim] -> (output [S*T, H], new keys, new values).

    Every row of the step is written into the cache at position + row. Rows that are not committed lie past the
    committed length, where the next commit overwrites them.
    """
    g = f"layers.{layer}.attention."
    heads, kv_heads, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    q_width, kv_width = heads * d, kv_heads * d
    qkv = dense.linear(hidden, f"{g}qkv_proj", "attention")
    flat = b.op("Reshape", qkv, b.op("Concat", rows.sequences, rows.length, b.ints(-1), axis=0))  # [S, T, ...]
    q, gate, k, v = b.ops("Split", 4, flat, b.ints(q_width, q_width, kv_width, kv_width), axis=2)

    def rotated(x: str, count: str, n: int) -> str:  # -> [S, n, T, D]
        x = dense.rms_norm(b.reshape(x, 0, 0, n, d), f"{g}{count}_norm", c.rms_norm_eps)
        cos, sin, ids = rope
        x = b.op("Transpose", x, perm=[0, 2, 1, 3])
        partial = c.rotary_dim if c.rotary_dim != d else 0
        return b.op(
            "RotaryEmbedding",
            x,
            ids,
            cos,
            sin,
            domain=CONTRIB,
            num_heads=n if partial else 0,
            rotary_embedding_dim=partial,
        )

    q, k = rotated(q, "q", heads), rotated(k, "k", kv_heads)
    v = b.op("Transpose", b.reshape(v, 0, 0, kv_heads, d), perm=[0, 2, 1, 3])
    new_keys = b.op("TensorScatter", keys, k, rows.position, axis=2)
    new_values = b.op("TensorScatter", values, v, rows.position, axis=2)
    # only the live part of the cache is read, whatever its capacity
    live_keys = b.slice(new_keys, b.ints(0), rows.live_length, 2)
    live_values = b.slice(new_values, b.ints(0), rows.live_length, 2)
    mixed = b.op("Attention", q, live_keys, live_values, rows.visible, scale=d**-0.5)
    mixed = b.reshape(b.op("Transpose", mixed, perm=[0, 2, 1, 3]), 0, 0, q_width)
    gated = b.reshape(b.op("Mul", mixed, b.op("Sigmoid", gate)), -1, q_width)
    return dense.linear(gated, f"{g}o_proj", "attention"), new_keys, new_values
