"""Which kernels an engine's plugins launch, compiled for one card generation into the bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from clover.exporter.config import ModelConfig
from clover.exporter.precision import PrecisionPlan
from clover.plugins.bidirectional_gdn.plugin import PLUGIN as GDN
from clover.plugins.bidirectional_gdn.spec import GatedDeltaNetAttributes
from clover.plugins.kernels.cubin import Cubin, source_digest
from clover.plugins.kernels.image import check_image
from clover.plugins.kernels.launch import KernelLibrary
from clover.plugins.kernels.plan import Kernel
from clover.plugins.moe_coreset_routing.plugin import PLUGIN as ROUTING
from clover.plugins.moe_coreset_routing.spec import CoresetAttributes
from clover.plugins.moe_experts.plugin import PLUGIN as EXPERTS
from clover.plugins.moe_experts.spec import ExpertsAttributes
from clover.plugins.op_spec import DOMAIN, Attributes
from clover.plugins.tensorrt_plugin import PluginHost, PluginOp, kernels_digest
from clover.runtime.errors import BundleError

OPERATORS: tuple[PluginOp, ...] = (GDN, ROUTING, EXPERTS)


@dataclass(frozen=True)
class OperatorKernels:
    """One operator in a graph: how many nodes, and its kernels by file stem."""

    count: int
    cubins: tuple[Cubin, ...]

    @property
    def digest(self) -> str:
        return kernels_digest(self.cubins)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.cubins)


def operator_kernels(model: onnx.ModelProto, config: ModelConfig) -> dict[str, tuple[int, tuple[Kernel, ...]]]:
    """Operator -> (nodes, kernels) of a GPU step graph."""
    shapes = _node_shapes(config)
    found: dict[str, tuple[int, tuple[Kernel, ...]]] = {}
    for op in OPERATORS:
        nodes = [n for n in model.graph.node if n.domain == DOMAIN and n.op_type == op.name]
        kernels: dict[Kernel, None] = {}
        for node in nodes:
            values = {a.name: a.f if a.type == onnx.AttributeProto.FLOAT else a.i for a in node.attribute}
            kernels.update(dict.fromkeys(op.kernels(op.attributes(values), shapes[op.name])))
        if nodes:
            found[op.name] = (len(nodes), tuple(kernels))
    return found


def _node_shapes(config: ModelConfig) -> dict[str, list[tuple[int, ...]]]:
    """Operator -> as many of its inputs' shapes as decide its kernels; rows and sequences do not."""
    return {
        GDN.name: [(1, 1, config.conv_channels), *[(1,)] * 4, (config.conv_channels, config.linear_conv_kernel_dim)],
        ROUTING.name: [(1, 1, config.num_experts)],
        EXPERTS.name: [(1, config.hidden_size), (1, config.num_experts), (4, config.num_experts)],
    }


@dataclass(frozen=True)
class Needed:
    """What this clover needs of one operator to run a model: layers that hold it, and kernels."""

    layers: tuple[int, ...]
    kernels: tuple[Kernel, ...]


def needed_operators(config: ModelConfig, precision: PrecisionPlan) -> dict[str, Needed]:
    """Operator -> what the installed clover would launch for a model, from its config alone."""
    every, shapes = tuple(range(config.num_hidden_layers)), _node_shapes(config)
    group = precision.group_size if precision["experts"] == "int4" else 0
    given: list[tuple[PluginOp, tuple[int, ...], Attributes]] = [
        (GDN, tuple(config.gdn_layers), GatedDeltaNetAttributes.from_config(config)),
        (ROUTING, every if config.coreset_enabled else (), CoresetAttributes.from_config(config)),
        (EXPERTS, every, ExpertsAttributes.from_config(config, group)),
    ]
    return {
        op.name: Needed(layers, op.kernels(op.attributes(attributes.as_onnx()), shapes[op.name]))
        for op, layers, attributes in given
        if layers
    }


def compile_operators(
    needed: dict[str, tuple[int, tuple[Kernel, ...]]],
    sm: int,
    directory: Path,
    progress: Callable[[str], None] = lambda name: None,
    cache: Path | None = None,
) -> dict[str, OperatorKernels]:
    """Compiles every operator's kernels into `directory` as NAME.cubin and NAME.json.

    `cache` keeps them between builds, by their sources and compiler. Raises CloverError when Triton is missing or a kernel can't be compiled for the card.
    """
    from clover.plugins.kernels.compile import compile_kernel

    compiled = {}
    for name, (count, kernels) in needed.items():
        cubins = []
        for kernel in kernels:
            progress(kernel.function)
            cubins.append(compile_kernel(kernel, sm, cache=cache))
            cubins[-1].write(directory)
        compiled[name] = OperatorKernels(count, tuple(cubins))
    return compiled


def read_kernels(directory: Path, names: Mapping[str, tuple[str, ...]]) -> dict[str, list[Cubin]]:
    """Each operator's compiled kernels in `directory`. Raises BundleError when one is missing or damaged."""
    return {op: [Cubin.read(directory / f"{stem}.json") for stem in stems] for op, stems in names.items()}


def make_host(cubins: Mapping[str, list[Cubin]], driver: Any = None) -> PluginHost:
    """What plugins launch their kernels with; `driver` is for tests."""
    library = KernelLibrary([c for group in cubins.values() for c in group], driver)
    return PluginHost(library, {op: kernels_digest(group) for op, group in cubins.items()})


def check_kernels(cubins: Iterable[Cubin], sm: int) -> None:
    """Raises BundleError naming a kernel that does not run on compute capability sm / 10, takes other parameters than
    are passed, or was compiled from other sources than those installed."""
    for cubin in cubins:
        if not cubin.runs_on(sm // 10, sm % 10):
            raise BundleError(
                f"kernel {cubin.name} is compiled for {cubin.target}, and the engine is for SM {sm}; build the bundle again"
            )
        check_image(cubin)
        if cubin.source != source_digest(cubin.kernel.module):
            raise BundleError(
                f"kernel {cubin.name} is of another version of {cubin.kernel.module.rpartition('.')[0]} than is installed; "
                "build the bundle again, or install the clover that built it"
            )
