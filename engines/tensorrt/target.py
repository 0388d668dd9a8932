"""Everything a GPU bundle has beyond the CPU's: the plan, compiled kernels, the engine, and their manifest entries."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clover.engines.bundle import file_entry
from clover.engines.gpus import Gpu
from clover.engines.manifest import Engine, FileEntry, Kernels, Target
from clover.engines.planner.plan import DEFAULT_CONTEXT, DEFAULT_HOST_MEMORY, plan
from clover.engines.tensorrt.backend import TensorRt, version
from clover.engines.tensorrt.build import build_engine
from clover.engines.tensorrt.engine_file import check_engine_file
from clover.engines.tensorrt.kernels import check_kernels, compile_operators, operator_kernels
from clover.engines.tensorrt.request import (
    CANDIDATES,
    DEFAULT_PREFILL_CHUNK,
    EngineRequest,
    EngineShapes,
    fingerprint,
    profiles,
)
from clover.engines.verified import hash_file
from clover.exporter.config import ModelConfig
from clover.exporter.graph.tensorrt.step import (
    CONVERTED_FILE,
    DeviceGraphOptions,
    build_device_graph,
    check_precision,
)
from clover.exporter.precision import PrecisionPlan
from clover.exporter.weight_index import StoredTensor
from clover.runtime.errors import CloverError

KERNEL_DIRECTORY = "kernels"
ENGINE_DIRECTORY = "engines"
GRAPH_FILE = "step.gpu.onnx"  # beside the weights while the engine is built, and not part of the bundle
Say = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(frozen=True)
class GpuBuild:
    """What a GPU bundle is to be built for."""

    gpu: Gpu
    sequences: int = 1
    resident_experts: int | None = None
    host_memory: int = DEFAULT_HOST_MEMORY
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    kernel_cache: Path | None = None

    @property
    def backend(self) -> TensorRt:
        if self.gpu.backend == "onnxruntime":
            raise CloverError(f"{self.gpu.title} has no GPU engine; use --gpu cpu.")
        return self.gpu.backend

    def context(self, config: ModelConfig, asked: int | None) -> int:
        """Tokens of the KV cache, which is fixed in the engine: what was asked for, or the planner's default."""
        return asked or min(DEFAULT_CONTEXT, config.max_position_embeddings)

    def check(
        self, config: ModelConfig, precision: PrecisionPlan, block_sizes: Sequence[int], max_context: int
    ) -> None:
        """Raises CloverError before anything is written: TensorRT missing, wrong precision, or a model that won't fit."""
        version(self.backend)
        if importlib.util.find_spec("triton") is None:
            raise CloverError("building for a GPU compiles kernels with Triton; pip install triton on this machine.")
        check_precision(precision)
        if self.gpu.sm == 75:
            raise CloverError(
                f"{self.gpu.title} has no BF16 tensor cores (SM 75), which the kernels need; use SM 80 up."
            )
        plan(
            config, self.gpu, precision, max_context=max_context, sequences=self.sequences, block_sizes=block_sizes,
            resident_experts=self.resident_experts, host_memory=self.host_memory, prefill_chunk=self.prefill_chunk,
        ).require_fit()  # fmt: skip


@dataclass(frozen=True)
class GpuParts:
    """What the manifest says of a GPU build."""

    target: Target
    engine: Engine
    kernels: dict[str, Kernels]
    files: dict[str, FileEntry] = field(default_factory=dict)


def build_gpu_parts(
    build: GpuBuild,
    work: Path,
    config: ModelConfig,
    precision: PrecisionPlan,
    index: Mapping[str, StoredTensor],
    hashes: Mapping[str, str],
    *,
    block_sizes: Sequence[int],
    max_context: int,
    excluded_ids: Sequence[int],
    with_logits: bool,
    say: Say = lambda what, done, total: None,
) -> GpuParts:
    """Compiles the kernels and builds the engine into the bundle directory `work`, whose weights are there already.

    An engine that an interrupted build left whole is taken over. Raises CloverError when something can't be built.
    """
    sm = build.gpu.sm
    assert sm is not None
    shapes = EngineShapes(build.sequences, max(block_sizes), build.prefill_chunk, max_context, config.vocab_size)
    options = DeviceGraphOptions(shapes.capacity, excluded_ids, with_logits)
    graph, kernel_directory = work / GRAPH_FILE, work / KERNEL_DIRECTORY
    try:
        say("step graph", 0, 0)
        model = build_device_graph(config, precision, index, work, options)
        graph.write_bytes(model.SerializeToString())
        needed = operator_kernels(model, config)
        del model
        operators = compile_operators(
            needed, sm, kernel_directory, lambda name: say(f"kernel {name}", 0, 0), build.kernel_cache
        )
        check_kernels([c for o in operators.values() for c in o.cubins], sm)
        engine = work / ENGINE_DIRECTORY / f"step-sm{sm}.engine"
        layers = engine.with_suffix(".layers.json")
        engine.parent.mkdir(exist_ok=True)
        request = EngineRequest(
            backend=build.backend,
            sm=sm,
            graph=str(graph.resolve()),
            engine=str(engine.resolve()),
            kernels=str(kernel_directory.resolve()),
            plugins={name: o.count for name, o in operators.items()},
            kernel_names={name: o.names for name, o in operators.items()},
            profiles=profiles(config, shapes),
        )
        installed = version(build.backend)
        mark = fingerprint(request, installed, dict(hashes))
        if not _is_built(engine, layers, mark):
            built = build_engine(request, say)
            record = {
                "fingerprint": mark,
                "sha256": hash_file(engine),
                "limited_attention": built.limited_attention,
                "tensors": built.tensors,
                "layers": list(built.layers),
            }
            partial = layers.with_name(f"{layers.name}.partial")
            partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            partial.replace(layers)
        if build.backend == "tensorrt-rtx":
            check_engine_file(engine, installed, sm)
    finally:
        graph.unlink(missing_ok=True)
        (work / CONVERTED_FILE).unlink(missing_ok=True)
    names = [f"{ENGINE_DIRECTORY}/{engine.name}", f"{ENGINE_DIRECTORY}/{layers.name}"]
    stems = sorted({n for o in operators.values() for n in o.names})
    names += [f"{KERNEL_DIRECTORY}/{stem}{end}" for stem in stems for end in (".cubin", ".json")]
    return GpuParts(
        target=Target(name=build.gpu.name, backend=build.backend, backend_version=installed, sm=sm),
        engine=Engine(
            file=names[0], layers=names[1], sequences=shapes.sequences, max_rows=shapes.max_rows,
            prefill_chunk=shapes.prefill_chunk, capacity=shapes.capacity, logit_rows=shapes.logit_rows,
            candidates=min(CANDIDATES, config.vocab_size), adjusted=shapes.adjusted,
            resident_experts=build.resident_experts, fingerprint=mark,
        ),
        kernels={n: Kernels(sha256=o.digest, nodes=o.count, names=o.names) for n, o in operators.items()},
        files={name: file_entry(work / name) for name in names},
    )  # fmt: skip


def _is_built(engine: Path, layers: Path, mark: str) -> bool:
    """Whether an earlier run left this very engine whole."""
    try:
        record = json.loads(layers.read_text(encoding="utf-8"))
        return bool(record["fingerprint"] == mark and record["sha256"] == hash_file(engine))
    except (OSError, ValueError, KeyError, TypeError):
        return False
