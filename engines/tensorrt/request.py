"""What the builder process is asked for and answers: plain data, passed as JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clover.engines.tensorrt.backend import TensorRt
from clover.exporter.config import ModelConfig

Dims = tuple[int, ...]
CANDIDATES = 1024  # most candidates a row can give; sampling asks for as many
DEFAULT_PREFILL_CHUNK = 512
BUILDER = 2  # raised when the builder makes other engines of the same request


@dataclass(frozen=True)
class EngineShapes:
    """The shapes an engine is built for. capacity: tokens of the KV cache, a step's rows included."""

    sequences: int
    block_size: int  # the largest
    prefill_chunk: int
    max_context: int
    vocab_size: int

    @property
    def max_rows(self) -> int:
        """Most rows per sequence in one step."""
        return max(self.prefill_chunk, 2 * self.block_size)

    @property
    def logit_rows(self) -> int:
        """Most rows per sequence that get candidates: a block, or commit and preview of one."""
        return 2 * self.block_size

    @property
    def capacity(self) -> int:
        return self.max_context + self.max_rows

    @property
    def adjusted(self) -> int:
        """Most adjusted token ids: as many as a context can hold."""
        return min(self.vocab_size, 1 << (self.max_context - 1).bit_length())


@dataclass(frozen=True)
class Profile:
    """One optimisation profile: input -> (least, best, most) dimensions, and the same for `candidates`' value."""

    name: str
    shapes: dict[str, tuple[Dims, Dims, Dims]]
    values: dict[str, tuple[Dims, Dims, Dims]]


def profiles(config: ModelConfig, shapes: EngineShapes) -> tuple[Profile, ...]:
    """`decode`: 1 to two blocks of rows, best at one block. `prefill`: up to a chunk, best at a whole one.

    Both begin at one row: a profile of one row alone doubled BF16 weights when it stood beside another.
    """
    s, c = shapes.sequences, config

    def profile(name: str, best_rows: int, most_rows: int, best_logits: int) -> Profile:
        def state(*dims: int) -> tuple[Dims, Dims, Dims]:
            return (1, *dims), (s, *dims), (s, *dims)

        per_sequence: tuple[Dims, Dims, Dims] = (1,), (s,), (s,)
        ids: tuple[Dims, Dims, Dims] = (1, 1), (s, min(256, shapes.adjusted)), (s, shapes.adjusted)
        given: dict[str, tuple[Dims, Dims, Dims]] = {
            "token_ids": ((1, 1), (s, best_rows), (s, most_rows)),
            **dict.fromkeys(("commit_length", "row_length", "position", "coreset_top_p"), per_sequence),
            "logit_rows": ((1, 1), (s, best_logits), (s, shapes.logit_rows)),
            **dict.fromkeys(("adjust_ids", "adjust_scale", "adjust_bias"), ids),
        }
        for layer in c.gdn_layers:
            given[f"conv.{layer}"] = state(c.conv_history, c.conv_channels)
            heads = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
            given[f"recurrent.{layer}"] = state(*heads)
        for layer in c.attention_layers:
            cache = state(c.num_key_value_heads, shapes.capacity, c.head_dim)
            given[f"keys.{layer}"] = given[f"values.{layer}"] = cache
        most = min(CANDIDATES, c.vocab_size)
        return Profile(name, given, {"candidates": ((1,), (1,), (most,))})

    decode = profile("decode", shapes.block_size, 2 * shapes.block_size, shapes.block_size)
    return decode, profile("prefill", shapes.prefill_chunk, shapes.max_rows, 1)


@dataclass(frozen=True)
class EngineRequest:
    """One engine to build. Paths are absolute. plugins: how many layers of each operator the network must show."""

    backend: TensorRt
    sm: int
    graph: str
    engine: str
    kernels: str  # directory of compiled kernels
    plugins: dict[str, int]
    kernel_names: dict[str, tuple[str, ...]]  # operator -> file stems of its kernels
    profiles: tuple[Profile, ...]
    fingerprint: str = ""  # of everything the engine is made from; an engine with the same one is not built again

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> EngineRequest:
        data: dict[str, Any] = json.loads(text)
        data["profiles"] = tuple(Profile(**p) for p in data["profiles"])
        return cls(**data)


def fingerprint(request: EngineRequest, version: str, weights: dict[str, str]) -> str:
    """A hash of what decides an engine's bytes: graph, weights, kernels, profiles, card generation and TensorRT."""
    digest = hashlib.sha256(Path(request.graph).read_bytes())
    for names in request.kernel_names.values():
        for name in names:
            digest.update((Path(request.kernels) / f"{name}.cubin").read_bytes())
    shapes = [asdict(p) for p in request.profiles]
    facts = [BUILDER, request.backend, version, request.sm, request.plugins, shapes, sorted(weights.items())]
    digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()
