"""Writes a random checkpoint of any number of layers, at Clover's full width or narrow, as fast as the disk takes it.

    python benchmarks/make_checkpoint.py OUT --layers 4 --full-width --sharded   # 8.7 GB
    python benchmarks/make_checkpoint.py OUT --layers 40 --full-width --sparse   # 69 GB that take a few MB of disk
    python benchmarks/make_checkpoint.py OUT --layers 40 --full-width --sharded --random-experts 64   # 22 GB of disk

The weights are nonsense with a sane scale: activations stay finite and every path of the model does its usual work,
so sizes, times and memory are those of a trained model. Equal arguments give equal bytes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt

BLOCK = 2**25 + 57  # random numbers drawn once and read round and round; odd, so that no two matrices are equal
SHARD_BYTES = 4 * 10**9
HOLE_BYTES = 2**20  # with --sparse, larger tensors are holes in the file: zeros that take no disk
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")

FULL_WIDTH: dict[str, Any] = {
    "vocab_size": 248320, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
NARROW: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
}  # fmt: skip
KERNEL = 4


@dataclass(frozen=True)
class Tensor:
    """A bfloat16 tensor to write: random numbers of standard deviation 2^exponent around `mean`."""

    name: str
    shape: tuple[int, ...]
    exponent: int
    mean: float = 0.0

    @property
    def nbytes(self) -> int:
        return 2 * math.prod(self.shape)


def make_config(layers: int, *, full_width: bool, mask_token_id: int | None = None, eos: int | None = None) -> Any:
    """The contents of config.json."""
    sizes = FULL_WIDTH if full_width else NARROW
    return {
        "model_type": "clover_moe",
        "architectures": ["CloverMoeModelLM"],
        **sizes,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        "linear_conv_kernel_dim": KERNEL,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "block_size": 32,
        "mask_token_id": sizes["vocab_size"] - 1 if mask_token_id is None else mask_token_id,
        "eos_token_id": [sizes["vocab_size"] - 2 if eos is None else eos],
        "moe_block_coreset": {"enabled": True, "top_p": 0.9},
        "dtype": "bfloat16",
    }


def tensors(c: dict[str, Any]) -> Iterator[Tensor]:
    """Every tensor of the checkpoint in the order of the layers; experts fused."""

    def matrix(name: str, *shape: int) -> Tensor:
        return Tensor(name, shape, -round(math.log2(shape[-1]) / 2))  # about 1/√fan-in

    h, experts, width = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"]
    yield Tensor("model.embed_tokens.weight", (c["vocab_size"], h), 0)
    for n, kind in enumerate(c["layer_types"]):
        p = f"model.layers.{n}."
        yield Tensor(f"{p}input_layernorm.weight", (h,), -4)
        if kind == "linear_attention":
            yield from _gdn(c, f"{p}linear_attn.", matrix)
        else:
            a, d = f"{p}self_attn.", c["head_dim"]
            queries, keys = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
            yield matrix(f"{a}q_proj.weight", 2 * queries, h)
            yield matrix(f"{a}k_proj.weight", keys, h)
            yield matrix(f"{a}v_proj.weight", keys, h)
            yield matrix(f"{a}o_proj.weight", h, queries)
            yield Tensor(f"{a}q_norm.weight", (d,), -4)
            yield Tensor(f"{a}k_norm.weight", (d,), -4)
        m, shared = f"{p}mlp.", c["shared_expert_intermediate_size"]
        yield Tensor(f"{p}post_attention_layernorm.weight", (h,), -4)
        yield matrix(f"{m}gate.weight", experts, h)
        yield matrix(f"{m}shared_expert.gate_proj.weight", shared, h)
        yield matrix(f"{m}shared_expert.up_proj.weight", shared, h)
        yield matrix(f"{m}shared_expert.down_proj.weight", h, shared)
        yield matrix(f"{m}shared_expert_gate.weight", 1, h)
        yield matrix(f"{m}experts.gate_up_proj", experts, 2 * width, h)
        yield matrix(f"{m}experts.down_proj", experts, h, width)
    yield Tensor("model.norm.weight", (h,), -4)
    yield matrix("lm_head.weight", c["vocab_size"], h)


def _gdn(c: dict[str, Any], p: str, matrix: Any) -> Iterator[Tensor]:
    h, heads, values = c["hidden_size"], c["linear_num_value_heads"], c["linear_value_head_dim"]
    channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + heads * values
    yield matrix(f"{p}in_proj_qkv.weight", channels, h)
    yield matrix(f"{p}in_proj_z.weight", heads * values, h)
    yield matrix(f"{p}in_proj_b.weight", heads, h)
    yield matrix(f"{p}in_proj_a.weight", heads, h)
    yield Tensor(f"{p}conv1d.weight", (channels, 1, KERNEL), -1)
    yield Tensor(f"{p}conv_right_weight", (channels, KERNEL - 1), -2)
    yield Tensor(f"{p}A_log", (heads,), -1)
    yield Tensor(f"{p}dt_bias", (heads,), -1)
    yield Tensor(f"{p}norm.weight", (values,), -4, mean=1.0)
    yield Tensor(f"{p}bd_softmax_logit_scale", (heads,), 0, mean=4.0)
    yield Tensor(f"{p}bd_softmax_history_bias", (heads,), 0)
    yield Tensor(f"{p}bd_softmax_history_c", (heads,), -2, mean=1.0)
    yield matrix(f"{p}out_proj.weight", h, heads * values)


class RandomNumbers:
    """bfloat16 normals from one drawn block, read on from tensor to tensor."""

    def __init__(self, seed: int) -> None:
        self._normal = np.random.default_rng(seed).standard_normal(BLOCK, np.float32)
        self._scaled: dict[int, npt.NDArray[Any]] = {}
        self._at = 0

    def pieces(self, t: Tensor) -> Iterator[npt.NDArray[Any]]:
        """The tensor's numbers, in order, as views or short copies."""
        if t.exponent not in self._scaled:
            self._scaled[t.exponent] = (self._normal * np.float32(2.0**t.exponent)).astype(ml_dtypes.bfloat16)
        block, left = self._scaled[t.exponent], math.prod(t.shape)
        while left:
            piece = block[self._at : self._at + left]
            self._at = (self._at + len(piece)) % BLOCK
            left -= len(piece)
            yield (piece.astype(np.float32) + t.mean).astype(ml_dtypes.bfloat16) if t.mean else piece

    def skip(self, t: Tensor) -> None:
        self._at = (self._at + math.prod(t.shape)) % BLOCK


@dataclass(frozen=True)
class Holes:
    """What is a hole in its file, zeros that take no disk: all large tensors, or all experts but some of each layer."""

    large: bool = False
    random_experts: int | None = None

    def parts(self, t: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """(part of the tensor, whether it is a hole), in order."""
        if self.random_experts is None or not t.name.endswith(EXPERTS):
            yield t, self.large and t.nbytes > HOLE_BYTES
            return
        experts, *shape = t.shape
        for e in range(experts):  # the random ones are spread evenly
            hole = (e + 1) * self.random_experts // experts == e * self.random_experts // experts
            yield replace(t, shape=tuple(shape)), hole


def write_shard(path: Path, members: list[Tensor], numbers: RandomNumbers, holes: Holes) -> None:
    """One safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in members:
        header[t.name] = {"dtype": "BF16", "shape": list(t.shape), "data_offsets": [end, end + t.nbytes]}
        end += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _write(file, len(text).to_bytes(8, "little") + text)
        for part, hole in (p for t in members for p in holes.parts(t)):
            if hole:
                numbers.skip(part)
                file.seek(part.nbytes, 1)
                continue
            for piece in numbers.pieces(part):
                _write(file, piece.view(np.uint8).data)
        file.truncate(8 + len(text) + end)


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]


def make_checkpoint(out: Path, config: Any, *, sharded: bool = False, holes: Holes = Holes(), seed: int = 0) -> int:
    """Writes the checkpoint into the directory `out` and returns the bytes of its weights."""
    out.mkdir(parents=True, exist_ok=True)
    shards: list[list[Tensor]] = [[]]
    room = SHARD_BYTES
    for t in tensors(config):
        if sharded and shards[-1] and t.nbytes > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(t)
        room -= t.nbytes
    numbers = RandomNumbers(seed)
    places: dict[str, str] = {}
    for n, members in enumerate(shards):
        name = f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" if sharded else "model.safetensors"
        write_shard(out / name, members, numbers, holes)
        places.update((t.name, name) for t in members)
    total = sum(t.nbytes for members in shards for t in members)
    if sharded:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"block_size": 32, "threshold": 0.95, "eos_token_id": config["eos_token_id"]}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=1))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the directory to write")
    parser.add_argument("--layers", type=int, default=4, help="every fourth is full attention (default 4)")
    parser.add_argument("--full-width", action="store_true", help="Clover's shapes; otherwise 256 wide, 32 experts")
    parser.add_argument("--sharded", action="store_true", help="files of up to 4 GB and an index")
    parser.add_argument("--sparse", action="store_true", help="large tensors are holes in the file: zeros, no disk")
    parser.add_argument(
        "--random-experts", type=int, metavar="N", help="N experts of each layer are random, the others zeros: no disk"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mask-token-id", type=int, help="default: the vocabulary's last id")
    parser.add_argument("--eos-token-id", type=int, help="default: the last id but one")
    a = parser.parse_args()
    if a.layers < 1:
        parser.error("--layers must be at least 1")
    experts = (FULL_WIDTH if a.full_width else NARROW)["num_experts"]
    if a.random_experts is not None and not 0 <= a.random_experts <= experts:
        parser.error(f"--random-experts must be 0 to {experts}")
    if a.sparse and a.random_experts is not None:
        parser.error("--sparse makes every large tensor a hole; leave it or --random-experts out")
    config = make_config(a.layers, full_width=a.full_width, mask_token_id=a.mask_token_id, eos=a.eos_token_id)
    total = make_checkpoint(a.out, config, sharded=a.sharded, holes=Holes(a.sparse, a.random_experts), seed=a.seed)
    print(f"{a.out}: {a.layers} layers, {total / 1e9:.2f} GB of weights")


if __name__ == "__main__":
    main()
