"""Makes a GPU step graph runnable in ONNX Runtime.

Two of the custom operators carry function bodies of standard operators. The third, MoEExperts, reads weights through
device addresses, which no portable operator can do; it becomes ONNX Runtime's MoE or QMoE over the same store tensors.
Everything else is left as the GPU engine has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import helper

from clover.exporter.config import ModelConfig
from clover.exporter.graph.builder import CONTRIB, GraphBuilder
from clover.exporter.graph.dense import EXACT_ACCURACY
from clover.exporter.graph.tensorrt.step import EXPERT_ROWS, DeviceGraphOptions, build_device_graph
from clover.exporter.precision import PrecisionPlan
from clover.exporter.weight_index import StoredTensor
from clover.plugins.moe_experts.lowering import lower_experts
from clover.plugins.moe_experts.spec import SPEC as EXPERTS

TABLE_INPUT = EXPERTS.input_index("gate_up")  # on a GPU the table stands where the weights do


def build_portable_graph(
    config: ModelConfig,
    precision: PrecisionPlan,
    weights: Mapping[str, StoredTensor],
    directory: Path,
    options: DeviceGraphOptions,
) -> onnx.ModelProto:
    """The GPU step graph of the same arguments, in float32, for ONNX Runtime's CPU kernels."""
    portable = DeviceGraphOptions(options.capacity, options.excluded_ids, options.with_logits, "float32")
    model = build_device_graph(config, precision, weights, directory, portable)
    return lower_expert_tables(model, config, precision, weights)


def lower_expert_tables(
    model: onnx.ModelProto, config: ModelConfig, precision: PrecisionPlan, weights: Mapping[str, StoredTensor]
) -> onnx.ModelProto:
    """Replaces every MoEExperts node, its table input and its count of rows; changes `model` in place and returns it."""
    nodes, initializers, tables = [], [], set()
    counts = {n.output[1] for n in model.graph.node if n.op_type == EXPERTS.name and n.domain == EXPERTS.domain}
    for node in model.graph.node:
        if counts & set(node.input) or EXPERT_ROWS in node.output:  # what only serves the count
            counts.update(node.output)
            continue
        if node.op_type != EXPERTS.name or node.domain != EXPERTS.domain:
            nodes.append(node)
            continue
        hidden, logits, table = node.input[0], node.input[1], node.input[TABLE_INPUT]
        layer = int(table.rsplit(".", 1)[1])
        tables.add(table)
        part = _Fragment(weights)
        part.scope(f"layers.{layer}.experts")
        part.rename(lower_experts(part, config, precision, layer, hidden, logits, EXACT_ACCURACY), node.output[0])
        nodes += part.nodes
        initializers += part.initializers
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    kept = [i for i in model.graph.input if i.name not in tables]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    results = [o for o in model.graph.output if o.name != EXPERT_ROWS]
    del model.graph.output[:]
    model.graph.output.extend(results)
    model.graph.initializer.extend(initializers)
    model.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    return model


class _Fragment(GraphBuilder):
    """A few nodes to be put into a graph that exists already."""

    @property
    def nodes(self) -> list[onnx.NodeProto]:
        return self._nodes

    @property
    def initializers(self) -> list[onnx.TensorProto]:
        return list(self._initializers.values())
