"""A CPU bundle's weights as a GGUF file for llama.cpp (its architecture `qwen35moe`), without the block-diffusion tensors.

The same integers and scales go in: an INT4 group becomes Q4_0 blocks of 32 that repeat the group's scale, INT8 becomes
Q8_0, floats stay float32. llama.cpp keeps scales in float16, which holds most of a bundle's scales exactly; the number
printed is the largest relative change of the others. Left out, as llama.cpp has no place for them: conv_right_weight and
bd_softmax_*, which only previews use. Needs the package gguf (`pip install gguf`).

    python benchmarks/gguf_bundle.py BUNDLE OUT.gguf
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.engines.bundle import Bundle
from clover.exporter.config import ModelConfig
from clover.exporter.quantize import unpack_int4
from clover.exporter.safetensors_file import SafetensorsFile
from clover.exporter.store_plan import store_plan

Array = npt.NDArray[Any]
BLOCK = 32  # columns of a Q4_0 or Q8_0 block, which share a float16 scale
ARCHITECTURE = "qwen35moe"


@dataclass(frozen=True)
class Matrix:
    """A matrix [..., rows, columns] as the store has it: float32, or integers around 0 with a scale per 32 columns."""

    values: Array
    scales: Array | None = None  # [..., rows, columns / 32]
    bits: int = 32

    def rows(self, index: Any) -> Matrix:
        scales = None if self.scales is None else self.scales[..., index, :]
        return Matrix(self.values[..., index, :], scales, self.bits)

    def columns(self, order: Array) -> Matrix:
        """Whole blocks of 32 columns reordered. order: [columns / 32]."""
        shape = self.values.shape
        blocks = self.values.reshape(*shape[:-1], -1, BLOCK)[..., order, :]
        return Matrix(blocks.reshape(shape), None if self.scales is None else self.scales[..., order], self.bits)


class Store:
    """Reads the items of a bundle's weight store without dequantising them."""

    def __init__(self, bundle: Bundle) -> None:
        self.items = {i.name: i for i in store_plan(bundle.manifest.config, bundle.manifest.precision_plan)}
        self._files = {n: SafetensorsFile(bundle.directory / n) for n in {i.file for i in self.items.values()}}

    def floats(self, name: str) -> Array:
        item = self.items[name]
        return self._files[item.file].read(f"{name}.weight").astype(np.float32, copy=False).reshape(item.shape)

    def matrix(self, name: str) -> Matrix:
        item = self.items[name]
        if item.precision in ("fp32", "bf16"):
            return Matrix(self.floats(name))
        if item.zero_points or item.group_size % BLOCK:
            raise SystemExit(f"{name}: a GGUF file takes symmetric groups of 32, 64 or 128 columns")
        file = self._files[item.file]
        packed, scales = file.read(f"{name}.qweight"), file.read(f"{name}.scales")
        flat = packed.reshape(*item.shape[:-1], -1)
        bits = 4 if item.precision == "int4" else 8
        values = unpack_int4(flat) - np.uint8(8) if bits == 4 else flat - np.uint8(128)
        return Matrix(values.view(np.int8), np.repeat(scales, item.group_size // BLOCK, axis=-1), bits)


def value_heads_tiled(config: ModelConfig) -> Array:
    """The order of GDN value heads that llama.cpp wants: all first heads of a key head, then all second ones, …

    A checkpoint has the value heads of one key head side by side; ggml broadcasts keys over value heads cyclically.
    """
    heads = np.arange(config.linear_num_value_heads).reshape(config.linear_num_key_heads, -1)
    return heads.T.reshape(-1)


def tensors(store: Store, c: ModelConfig) -> Iterator[tuple[str, Matrix]]:
    """llama.cpp's name and values of every tensor, in a checkpoint's order."""
    yield "token_embd.weight", store.matrix("embed")
    order = value_heads_tiled(c)
    width = c.linear_value_head_dim
    channels = (order[:, None] * width + np.arange(width)).reshape(-1)  # of the values, tiled by head
    first = 2 * c.key_width  # queries and keys keep their rows
    for n, kind in enumerate(c.layer_types):
        s, g = f"layers.{n}.", f"blk.{n}."
        yield f"{g}attn_norm.weight", Matrix(store.floats(f"{s}input_norm"))
        yield f"{g}post_attention_norm.weight", Matrix(store.floats(f"{s}post_attention_norm"))
        if kind == "linear_attention":
            projected = store.matrix(f"{s}gdn.in_proj")
            mixed = np.concatenate([np.arange(first), first + channels])
            yield f"{g}attn_qkv.weight", projected.rows(mixed)
            yield f"{g}attn_gate.weight", projected.rows(c.conv_channels + channels)
            ab = store.floats(f"{s}gdn.ab_proj")
            yield f"{g}ssm_alpha.weight", Matrix(ab[order])
            yield f"{g}ssm_beta.weight", Matrix(ab[len(order) + order])
            yield f"{g}ssm_conv1d.weight", Matrix(store.floats(f"{s}gdn.conv")[mixed])
            yield f"{g}ssm_a", Matrix(store.floats(f"{s}gdn.decay_rate")[order])
            yield f"{g}ssm_dt.bias", Matrix(store.floats(f"{s}gdn.dt_bias")[order])
            yield f"{g}ssm_norm.weight", Matrix(store.floats(f"{s}gdn.norm"))
            blocks = channels[::BLOCK] // BLOCK
            yield f"{g}ssm_out.weight", store.matrix(f"{s}gdn.out_proj").columns(blocks)
        else:
            qkv, heads, kv = store.matrix(f"{s}attention.qkv_proj"), c.num_attention_heads, c.num_key_value_heads
            # the store has all queries, then all gates; llama.cpp takes each head's query and gate side by side
            both = np.arange(2 * heads * c.head_dim).reshape(2, heads, c.head_dim).swapaxes(0, 1).reshape(-1)
            yield f"{g}attn_q.weight", qkv.rows(both)
            keys = len(both) + np.arange(kv * c.head_dim)
            yield f"{g}attn_k.weight", qkv.rows(keys)
            yield f"{g}attn_v.weight", qkv.rows(keys + len(keys))
            yield f"{g}attn_output.weight", store.matrix(f"{s}attention.o_proj")
            yield f"{g}attn_q_norm.weight", Matrix(store.floats(f"{s}attention.q_norm"))
            yield f"{g}attn_k_norm.weight", Matrix(store.floats(f"{s}attention.k_norm"))
        router = store.floats(f"{s}moe.router")
        yield f"{g}ffn_gate_inp.weight", Matrix(router[:-1])
        yield f"{g}ffn_gate_inp_shexp.weight", Matrix(router[-1])
        shared = store.matrix(f"{s}moe.shared_gate_up")
        half = c.shared_expert_intermediate_size
        yield f"{g}ffn_gate_shexp.weight", shared.rows(slice(0, half))
        yield f"{g}ffn_up_shexp.weight", shared.rows(slice(half, None))
        yield f"{g}ffn_down_shexp.weight", store.matrix(f"{s}moe.shared_down")
        experts = store.matrix(f"{s}experts.gate_up")
        yield f"{g}ffn_gate_exps.weight", experts.rows(slice(0, None, 2))
        yield f"{g}ffn_up_exps.weight", experts.rows(slice(1, None, 2))
        yield f"{g}ffn_down_exps.weight", store.matrix(f"{s}experts.down")
    yield "output_norm.weight", Matrix(store.floats("final_norm"))
    yield "output.weight", store.matrix("lm_head")


def blocks_of(matrix: Matrix) -> Array:
    """Q4_0 or Q8_0 blocks: uint8 [..., rows, bytes]; a block is a float16 scale, then 16 or 32 bytes of values."""
    assert matrix.scales is not None
    scales = matrix.scales.astype("<f2")[..., None].view(np.uint8)  # [..., rows, blocks, 2]
    values = matrix.values.reshape(*matrix.scales.shape, BLOCK)
    if matrix.bits == 4:  # value j in the low nibble of byte j, value j + 16 in the high one; 8 stands for zero
        q = (values + np.int8(8)).view(np.uint8)
        values = q[..., : BLOCK // 2] | (q[..., BLOCK // 2 :] << np.uint8(4))
    joined = np.concatenate([scales, values.view(np.uint8)], axis=-1)
    return joined.reshape(*joined.shape[:-2], -1)


def write_gguf(bundle: Bundle, out: Path) -> float:
    """Writes the file. Returns the largest relative change of a scale, as float16 holds it.

    Raises SystemExit when gguf is not installed or a tensor has no place in such a file.
    """
    try:
        import gguf
    except ImportError:
        raise SystemExit("this needs the package gguf: pip install gguf") from None
    c = bundle.manifest.config
    w = gguf.GGUFWriter(str(out), ARCHITECTURE)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope_theta)
    w.add_rope_dimension_count(c.rotary_dim)
    third = c.rotary_dim // 2 // 3  # any split will do: a text's three positions are equal
    w.add_rope_dimension_sections([c.rotary_dim // 2 - 2 * third, third, third, 0])
    w.add_expert_count(c.num_experts)
    w.add_expert_used_count(c.num_experts_per_tok)
    w.add_expert_feed_forward_length(c.moe_intermediate_size)
    w.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    w.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    w.add_ssm_state_size(c.linear_key_head_dim)
    w.add_ssm_group_count(c.linear_num_key_heads)
    w.add_ssm_time_step_rank(c.linear_num_value_heads)
    w.add_ssm_inner_size(c.value_width)
    w.add_array(f"{ARCHITECTURE}.attention.recurrent_layers", [k == "linear_attention" for k in c.layer_types])
    w.add_tokenizer_model("none")
    w.add_vocab_size(c.vocab_size)
    kinds = {4: gguf.GGMLQuantizationType.Q4_0, 8: gguf.GGMLQuantizationType.Q8_0}
    worst = 0.0
    for name, matrix in tensors(Store(bundle), c):
        if matrix.scales is None:
            w.add_tensor(name, np.ascontiguousarray(matrix.values))
            continue
        s = matrix.scales[matrix.scales != 0]
        worst = max(worst, float(np.max(np.abs(s.astype(np.float16).astype(np.float32) / s - 1), initial=0)))
        w.add_tensor(name, blocks_of(matrix), raw_dtype=kinds[matrix.bits])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return worst


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("bundle", type=Path)
    a.add_argument("out", type=Path)
    args = a.parse_args()
    worst = write_gguf(Bundle.open(args.bundle), args.out)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB; scales changed by {worst:.1e} at most")


if __name__ == "__main__":
    main()
