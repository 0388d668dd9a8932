"""Every byte a running model needs, and whether it lies on the card or in pinned host memory. Sizes are in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from clover.engines.gpus import Backend
from clover.engines.planner.parameters import (
    PARAMETER_CLASSES,
    ParameterClass,
    checkpoint_tensors,
)
from clover.exporter.config import ModelConfig
from clover.exporter.precision import BITS, TENSOR_CLASSES, Precision, PrecisionPlan

MIB, GIB = 2**20, 2**30
CUDA_CONTEXT = 400 * MIB  # assumed: context, kernels, CUDA graphs
CPU_RUNTIME = 300 * MIB  # assumed: interpreter, ONNX Runtime, graph
CARD_HEADROOM = (512 * MIB, 0.03)  # at least so many bytes, or this share of the memory
HOST_HEADROOM = (2 * GIB, 0.10)
PINNED_SHARE = 0.5  # Windows lets a process pin at most half of the RAM; a sound limit elsewhere


@dataclass(frozen=True)
class Component:
    """One line of the memory table."""

    name: str
    nbytes: int
    detail: str


@dataclass(frozen=True)
class Shape:
    """What decides the size of states and scratch memory."""

    max_context: int  # tokens per sequence, prompt and response
    sequences: int
    block_size: int  # the largest one the bundle is built for
    prefill_chunk: int  # commit rows of one prefill run, over all sequences


@dataclass(frozen=True)
class Weights:
    """Bytes of every class as a backend holds them in memory, and of one routed expert (gate, up and down)."""

    by_class: Mapping[ParameterClass, int]
    per_expert: int

    @property
    def total(self) -> int:
        return sum(self.by_class.values())

    @property
    def dense(self) -> int:
        """All but the routed experts."""
        return self.total - self.by_class["experts"]


def activation_bytes(backend: Backend) -> int:
    """Bytes of one activation and one KV element: BF16 on a GPU, float32 on the CPU (its kernels have nothing else)."""
    return 4 if backend == "onnxruntime" else 2


def scale_bits(backend: Backend) -> int:
    """Bits of a quantisation scale: float32 in ONNX Runtime's layouts, 16 bits on a GPU (4.125 bits an INT4 weight)."""
    return 32 if backend == "onnxruntime" else 16


def bits_per_weight(precision: Precision, group_size: int, backend: Backend) -> float:
    """Bits a weight takes in memory, its share of the group's scale included. BF16 is widened on the CPU."""
    if precision in ("int4", "int8"):
        return BITS[precision] + scale_bits(backend) / group_size
    return 32.0 if precision == "fp32" or backend == "onnxruntime" else 16.0


def weights_of(config: ModelConfig, precision: PrecisionPlan, backend: Backend) -> Weights:
    """Bytes of all weights. Classes outside the precision plan (router, small) stay float32."""
    sizes: dict[ParameterClass, int] = dict.fromkeys(PARAMETER_CLASSES, 0)
    for tensor in checkpoint_tensors(config):
        kind = tensor.parameter_class
        bits = 32.0
        for quantisable in TENSOR_CLASSES:
            if quantisable == kind:
                bits = bits_per_weight(precision[quantisable], precision.group_size, backend)
        sizes[kind] += math.ceil(tensor.size * bits / 8)
    experts = config.num_experts * config.num_hidden_layers
    return Weights(sizes, sizes["experts"] // experts if experts else 0)


def recurrent_bytes(config: ModelConfig) -> int:
    """Recurrent state of one sequence: [value heads, key dim, value dim] float32 in every GDN layer."""
    heads, key, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    return len(config.gdn_layers) * heads * key * value * 4


def conv_ring_bytes(config: ModelConfig, backend: Backend) -> int:
    """Conv ring of one sequence: the last pre-convolution rows of every GDN layer."""
    return len(config.gdn_layers) * config.conv_history * config.conv_channels * activation_bytes(backend)


def kv_bytes_per_token(config: ModelConfig, backend: Backend) -> int:
    """K and V of one token in all attention layers (20,480 at full size in BF16)."""
    width = config.num_key_value_heads * config.head_dim
    return len(config.attention_layers) * 2 * width * activation_bytes(backend)


def preview_scratch_bytes(config: ModelConfig, backend: Backend, shape: Shape) -> int:
    """What exists only because of preview rows: their KV rows behind the clean cache in every attention layer; block
    softmax and history readout of the one GDN layer at work, float32; logits of every row, float32 and activation."""
    c, rows = config, shape.sequences * shape.block_size
    kv = rows * kv_bytes_per_token(c, backend)
    softmax = rows * c.linear_num_value_heads * (shape.block_size + 1) * 4
    readout = rows * c.value_width * 4
    logits = rows * c.vocab_size * (4 + activation_bytes(backend))
    return kv + softmax + readout + logits


def workspace_bytes(config: ModelConfig, backend: Backend, shape: Shape) -> int:
    """Activations of the widest run, one layer alive at a time, and the penalties' seen-token mask.

    Rows: a prefill chunk, or commit and preview of a block in one run (2 B a sequence). Per row: residual, its norm
    and the layer's output; the wider of the two mixers; the experts' gate, up and product for top_k choices.
    """
    c = config
    rows = max(shape.prefill_chunk, 2 * shape.block_size * shape.sequences)
    gdn = 2 * c.conv_channels + 2 * c.value_width
    attention = 3 * c.num_attention_heads * c.head_dim + 2 * c.num_key_value_heads * c.head_dim
    experts = c.num_experts_per_tok * (3 * c.moe_intermediate_size + c.hidden_size)
    experts += 3 * c.shared_expert_intermediate_size
    per_row = 3 * c.hidden_size + max(gdn if c.gdn_layers else 0, attention if c.attention_layers else 0, experts)
    return rows * per_row * activation_bytes(backend) + shape.sequences * c.vocab_size


def headroom_bytes(capacity: int, backend: Backend) -> int:
    """Memory left alone: fragmentation and the desktop on a card, the operating system on the CPU."""
    least, share = HOST_HEADROOM if backend == "onnxruntime" else CARD_HEADROOM
    return max(least, int(capacity * share))


def fixed_components(config: ModelConfig, weights: Weights, backend: Backend, shape: Shape) -> tuple[Component, ...]:
    """Everything but routed experts and headroom, which the placement decides."""
    c, s, sizes = config, shape.sequences, weights.by_class
    plural = "sequence" if s == 1 else "sequences"
    kv = kv_bytes_per_token(c, backend)
    recurrent = s * recurrent_bytes(c)
    names: tuple[tuple[ParameterClass, str, str], ...] = (
        ("embed", "embedding", f"{c.vocab_size:,} x {c.hidden_size:,}"),
        (
            "lm_head",
            "output head",
            f"{c.vocab_size:,} x {c.hidden_size:,}" if sizes["lm_head"] else "tied: the embedding",
        ),
        ("attention", "attention weights", f"{len(c.attention_layers)} layers"),
        ("gdn", "GDN weights", f"{len(c.gdn_layers)} layers"),
        ("shared_expert", "shared experts", f"{c.num_hidden_layers} layers"),
        ("router", "routers", "float32, never quantised"),
        ("small", "small weights", "norms, convolutions, gates; float32, never quantised"),
    )
    runtime = (
        Component("runtime", CPU_RUNTIME, "assumed: interpreter, ONNX Runtime, graph")
        if backend == "onnxruntime"
        else Component("CUDA context", CUDA_CONTEXT, "assumed: context, kernels, CUDA graphs")
    )
    # a GPU engine's cache also has room for the rows of a step (exporter/graph/tensorrt)
    rows = 0 if backend == "onnxruntime" else max(shape.prefill_chunk, 2 * shape.block_size)
    tokens = shape.max_context + rows
    second, why = (
        ("output", "a run writes beside what it reads")
        if backend == "onnxruntime"
        else ("kept", "to take a tentative commit back; else updated in place")
    )
    return (
        *(Component(label, sizes[kind], detail) for kind, label, detail in names),
        Component("recurrent state", recurrent, f"{s} {plural} x {recurrent_bytes(c):,} B, float32"),
        Component(f"recurrent state, {second}", recurrent, why),
        Component("conv ring", 2 * s * conv_ring_bytes(c, backend), f"{s} {plural}, twice as well"),
        Component("KV cache", s * tokens * kv, f"{s} {plural} x {tokens:,} tokens x {kv:,} B"),
        Component("preview scratch", preview_scratch_bytes(c, backend, shape), f"{shape.block_size} rows a sequence"),
        Component("workspace", workspace_bytes(c, backend, shape), "activations of the widest run"),
        runtime,
    )


@dataclass(frozen=True)
class Placement:
    """What lies where. `fits` when neither side is too small; `missing` says by how much, in bytes, otherwise."""

    device: tuple[Component, ...]
    host: tuple[Component, ...]
    device_capacity: int
    host_capacity: int  # bytes that may be pinned
    experts_resident: int
    experts_host: int
    device_missing: int
    host_missing: int

    @property
    def device_total(self) -> int:
        return sum(c.nbytes for c in self.device)

    @property
    def host_total(self) -> int:
        return sum(c.nbytes for c in self.host)

    @property
    def fits(self) -> bool:
        return not self.device_missing and not self.host_missing


def place(
    config: ModelConfig,
    weights: Weights,
    backend: Backend,
    shape: Shape,
    device_capacity: int,
    host_memory: int,
    resident_experts: int | None = None,
) -> Placement:
    """As many experts on the card as fit (at most `resident_experts`), the others in pinned host memory.

    The host holds only experts that are not on the card (a move is a swap), and one slot to swap through. On the CPU
    there is no second place: everything is in RAM or it does not fit.
    """
    fixed = fixed_components(config, weights, backend, shape)
    headroom = headroom_bytes(device_capacity, backend)
    free = device_capacity - headroom - sum(c.nbytes for c in fixed)
    total = config.num_experts * config.num_hidden_layers
    per_expert = weights.per_expert
    if backend == "onnxruntime":
        resident = total
    else:
        resident = total if not per_expert else min(total, max(0, free // per_expert))
        resident = resident if resident_experts is None else min(resident, resident_experts)
    on_host = total - resident
    host: tuple[Component, ...] = ()
    if on_host:
        host = (
            Component("experts on the host", on_host * per_expert, f"{on_host:,} x {per_expert:,} B, pinned"),
            Component("swap slot", per_expert, "one expert, pinned"),
        )
    device = (
        *fixed,
        Component("routed experts", resident * per_expert, f"{resident:,} of {total:,} x {per_expert:,} B"),
        Component("headroom", headroom, "left alone"),
    )
    pinned = int(host_memory * PINNED_SHARE)
    return Placement(
        device,
        host,
        device_capacity,
        pinned,
        resident,
        on_host,
        max(0, sum(c.nbytes for c in device) - device_capacity),
        max(0, sum(c.nbytes for c in host) - pinned),
    )
