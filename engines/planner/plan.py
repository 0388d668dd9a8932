"""Does this model fit this target, and what would a step cost there? Pure functions of config, target and options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from clover.engines.gpus import TARGETS, Backend, Gpu, check_backend
from clover.engines.planner.memory import (
    CUDA_CONTEXT,
    GIB,
    MIB,
    PINNED_SHARE,
    Placement,
    Shape,
    Weights,
    place,
    scale_bits,
    weights_of,
)
from clover.engines.planner.parameters import ParameterCounts, count_parameters
from clover.engines.planner.roofline import BlockPerformance, Machine, block_performance
from clover.engines.planner.routing import RoutingAssumptions, expected_distinct
from clover.exporter.config import BLOCK_SIZES, ModelConfig
from clover.exporter.precision import PrecisionPlan, plan_precision
from clover.runtime.errors import CloverError

DEFAULT_CONTEXT = 8192
DEFAULT_HOST_MEMORY = 32 * GIB
DEFAULT_PREFILL_CHUNK = 512


@dataclass(frozen=True)
class Plan:
    """The answer. Bytes, seconds and tokens per second; `to_json` gives the same as plain JSON values."""

    gpu: Gpu
    backend: Backend
    precision: PrecisionPlan
    shape: Shape
    counts: ParameterCounts
    weights: Weights
    placement: Placement
    experts_total: int
    largest_context: int  # tokens per sequence, experts moving to the host as needed; 0: not even one
    largest_context_on_card: int  # with every expert on the card; 0: they do not all fit
    performance: tuple[BlockPerformance, ...]  # one per block size; empty when the model does not fit
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]
    suggestions: tuple[str, ...]  # what would fit, when this does not

    @property
    def fits(self) -> bool:
        return self.placement.fits

    @property
    def problem(self) -> str | None:
        """One sentence saying what is too small and what would do; None when the model fits."""
        if self.fits:
            return None
        p = self.placement
        if p.device_missing:
            place_name = "RAM" if self.gpu.is_cpu else self.gpu.title
            what = f"needs {_gb(p.device_total)} of {place_name}, which has {_gb(p.device_capacity)}"
        else:
            what = (
                f"leaves {p.experts_host:,} of {self.experts_total:,} experts ({_gb(p.host_total)}) to pinned host "
                f"memory, which holds {_gb(p.host_capacity)}"
            )
        advice = "; ".join(self.suggestions) or "no option of this tool makes it fit"
        return f"{self.precision.name} at {self.shape.max_context:,} tokens {what}. What would fit: {advice}."

    def require_fit(self) -> Plan:
        """This plan; CloverError with `problem` when the model does not fit."""
        if self.problem is not None:
            raise CloverError(self.problem)
        return self

    def to_json(self) -> dict[str, Any]:
        p = self.placement
        return {
            "fits": self.fits,
            "problem": self.problem,
            "gpu": self.gpu.to_json(),
            "backend": self.backend,
            "precision": self.precision.to_json(),
            "shape": asdict(self.shape),
            "parameters": {"total": self.counts.total, "by_class": dict(self.counts.by_class)},
            "weight_bytes": {"total": self.weights.total, "by_class": dict(self.weights.by_class)},
            "memory": {
                "device": [asdict(c) for c in p.device],
                "device_total": p.device_total,
                "device_capacity": p.device_capacity,
                "host": [asdict(c) for c in p.host],
                "host_total": p.host_total,
                "host_capacity": p.host_capacity,
            },
            "experts": {
                "total": self.experts_total,
                "resident": p.experts_resident,
                "host": p.experts_host,
                "bytes_each": self.weights.per_expert,
            },
            "largest_context": self.largest_context,
            "largest_context_on_card": self.largest_context_on_card,
            "performance": [asdict(b) for b in self.performance],
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
            "suggestions": list(self.suggestions),
        }


def plan(
    config: ModelConfig,
    gpu: Gpu,
    precision: PrecisionPlan,
    *,
    max_context: int | None = None,
    sequences: int = 1,
    block_sizes: Sequence[int] = (),
    backend: str | None = None,
    routing: RoutingAssumptions | None = None,
    resident_experts: int | None = None,
    host_memory: int = DEFAULT_HOST_MEMORY,
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
) -> Plan:
    """Plans `config` on `gpu`.

    max_context: tokens per sequence (default: 8192, or all the model allows). sequences: decoded at once. block_sizes: those of the bundle (default: the
    trained one); memory is planned for the largest. resident_experts: at most so many on the card (default: as many as
    fit). host_memory: bytes of RAM; half may be pinned (on the CPU target: all of it is the model's).
    Raises CloverError for options that can't be honoured; a model that does not fit is no error here (see `fits`).
    """
    chosen = check_backend(gpu, backend)
    routing = routing or RoutingAssumptions()
    max_context = min(DEFAULT_CONTEXT, config.max_position_embeddings) if max_context is None else max_context
    sizes = tuple(sorted(set(block_sizes or (config.block_size,))))
    _check(config, max_context, sequences, sizes, resident_experts, prefill_chunk)
    if routing.distinct is not None and routing.distinct < config.num_experts_per_tok:
        raise CloverError(f"a preview touches at least {config.num_experts_per_tok} experts per layer (top-k).")
    counts, weights = count_parameters(config), weights_of(config, precision, chosen)
    capacity = gpu.visible_bytes if gpu.visible_bytes is not None else host_memory
    shape = Shape(max_context, sequences, sizes[-1], prefill_chunk)

    def placed(s: Shape, w: Weights = weights, host: int = host_memory) -> Placement:
        return place(config, w, chosen, s, capacity, host, resident_experts)

    placement = placed(shape)
    machine = Machine(
        config, counts, weights, gpu, chosen, max_context, sequences, placement.experts_resident, routing
    )  # fmt: skip
    performance = tuple(block_performance(machine, b, prefill_chunk) for b in sizes) if placement.fits else ()

    def context_fits(tokens: int, all_on_card: bool) -> bool:
        p = placed(replace(shape, max_context=tokens))
        return p.fits and not (all_on_card and p.experts_host)

    largest = _largest(lambda n: context_fits(n, False), config.max_position_embeddings)
    on_card = _largest(lambda n: context_fits(n, True), config.max_position_embeddings)
    suggestions: tuple[str, ...] = ()
    if not placement.fits:
        suggestions = tuple(
            _suggestions(config, gpu, chosen, precision, shape, placement, placed, largest, host_memory)
        )
    return Plan(
        gpu, chosen, precision, shape, counts, weights, placement, counts.experts, largest, on_card, performance,
        _assumptions(config, gpu, chosen, shape, routing, placement, performance, host_memory),
        _notes(config, gpu, chosen, precision, placement, sizes, performance), suggestions,
    )  # fmt: skip


def _check(
    config: ModelConfig, max_context: int, sequences: int, block_sizes: Sequence[int], resident: int | None, chunk: int
) -> None:
    if not 1 <= max_context <= config.max_position_embeddings:
        raise CloverError(f"--max-context {max_context} must be 1 to {config.max_position_embeddings} for this model.")
    if sequences < 1:
        raise CloverError(f"--sequences {sequences} must be at least 1.")
    if chunk < 1:
        raise CloverError(f"--prefill-chunk {chunk} must be at least 1.")
    for b in block_sizes:
        if b not in BLOCK_SIZES:
            raise CloverError(f"block size {b} is not supported; choose from {', '.join(map(str, BLOCK_SIZES))}.")
    total = config.num_experts * config.num_hidden_layers
    if resident is not None and not 0 <= resident <= total:
        raise CloverError(f"--resident-experts {resident} must be 0 to {total} ({config.num_experts} per layer).")


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n in 1…limit that fits, 0 when none does; `fits` is true up to some n and false after it."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _suggestions(
    config: ModelConfig, gpu: Gpu, backend: Backend, precision: PrecisionPlan, shape: Shape, placement: Placement,
    placed: Callable[..., Placement], largest: int, host_memory: int,
) -> list[str]:  # fmt: skip
    found = []
    if largest:
        found.append(f"--max-context {largest:,} or less".replace(",", ""))
    fewer = _largest(lambda n: placed(replace(shape, sequences=n)).fits, shape.sequences)
    if 0 < fewer < shape.sequences:
        found.append(f"--sequences {fewer}")
    for base in ("bf16", "int8", "int4"):
        try:
            other = plan_precision(config, base)
        except CloverError:
            continue
        smaller = weights_of(config, other, backend)
        if other.classes != precision.classes and placed(shape, smaller).fits:
            on_host = placed(shape, smaller).experts_host
            found.append(f"--precision {base}" + (f" (with {on_host:,} experts on the host)" if on_host else ""))
            break
    needed = int(placement.host_total / PINNED_SHARE) if not placement.device_missing else 0
    if needed > host_memory and not gpu.is_cpu:
        found.append(f"a machine with {needed / GIB:.0f} GiB of RAM, half of it pinned")
    # The smallest card that holds everything, at the same options.
    weights = weights_of(config, precision, "tensorrt")
    cards = sorted((g for g in TARGETS if g.visible_bytes), key=lambda g: g.visible_bytes or 0)
    for card in cards:
        p = place(config, weights, card.backend, shape, card.visible_bytes or 0, 0)
        if p.fits and not p.experts_host:
            found.append(f"--gpu {card.name}")
            break
    return found


def _assumptions(
    config: ModelConfig, gpu: Gpu, backend: Backend, shape: Shape, routing: RoutingAssumptions, placement: Placement,
    performance: Sequence[BlockPerformance], host_memory: int,
) -> tuple[str, ...]:  # fmt: skip
    lines = [f"speeds of {gpu.title}: {gpu.source}"]
    if routing.distinct is not None:
        lines.append(f"a preview touches {routing.distinct:g} distinct experts per layer: as given")
    else:
        for b in performance:
            upper = expected_distinct(config.num_experts, config.num_experts_per_tok, b.block_size)
            rule = f"coreset top_p {config.coreset_top_p:g}" if config.coreset_enabled else "no coreset"
            expected = next(r.distinct for r in b.throughput if r.expected)
            lines.append(
                f"a preview of {b.block_size} rows touches {expected:.1f} distinct experts per layer: simulated, "
                f"{rule}, Zipf skew {routing.block_skew:g} within a block (uniform and without coreset: {upper:.0f})"
            )
    if placement.experts_host and placement.fits:
        how = f"as given: {routing.hit_rate:.0%}" if routing.hit_rate is not None else (
            f"the most used experts are on the card, Zipf skew {routing.popularity_skew:g}"
            + (", which is the worst case (no expert is used more than another)" if not routing.popularity_skew else "")
        )  # fmt: skip
        lines.append(f"hit rate of experts on the card: {how}")
        lines.append("host experts are read over the link at its peak, alongside the card's own")
    if gpu.is_cpu:
        lines.append(f"{host_memory / GIB:.1f} GiB of RAM")
    else:
        lines.append(
            f"host RAM of {host_memory / GIB:.0f} GiB, of which at most {PINNED_SHARE:.0%} may be pinned; CUDA context "
            f"{CUDA_CONTEXT // MIB} MiB; scales of {scale_bits(backend)} bits"
        )
    lines.append(f"steps read a context of {shape.max_context:,} tokens; a shorter one costs less")
    return tuple(lines)


def _notes(
    config: ModelConfig, gpu: Gpu, backend: Backend, precision: PrecisionPlan, placement: Placement,
    block_sizes: Sequence[int], performance: Sequence[BlockPerformance],
) -> tuple[str, ...]:  # fmt: skip
    notes = []
    if placement.experts_host and performance:
        share = placement.experts_host / (placement.experts_host + placement.experts_resident)
        step = performance[-1].denoise
        experts_gb = (step.card_expert_bytes + step.host_expert_bytes) / 1e9
        without = step.dense_seconds + max(experts_gb / gpu.bandwidth_gbs, step.expert_flops / (gpu.bf16_tflops * 1e12))
        notes.append(
            f"{placement.experts_host:,} experts ({share:.0%}) stay on the host: a denoise step reads "
            f"{step.host_expert_bytes / 1e9:.2f} GB of them over {gpu.link}, {step.link_seconds * 1e3:.1f} ms at its "
            f"peak; floor {step.seconds * 1e3:.1f} ms, and {without * 1e3:.1f} ms were every expert on the card"
        )
    if backend != "onnxruntime" and precision["embed"] in ("int4", "int8"):
        notes.append("a builder may unpack a quantised embedding to BF16; --precision …,embed=bf16 plans for that")
    if backend == "onnxruntime" and "bf16" in precision.classes.values():
        notes.append("BF16 weights are widened to float32 on the CPU")
    for b in block_sizes:
        if b != config.block_size:
            notes.append(f"block size {b} is not the trained one ({config.block_size}); quality may differ")
    if len(block_sizes) > 1:
        notes.append("one engine is loaded at a time; each further one loaded adds its own dense weights")
    return tuple(notes)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
