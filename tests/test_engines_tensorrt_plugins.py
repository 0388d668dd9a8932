"""The plugins as TensorRT calls them, on a stand-in driver; and the function body against the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from engine_support import relative_error
from gpu_stand_in import StandInDriver
from gpu_support import gpu_bundle
from onnx import TensorProto, helper

from clover.engines.tensorrt.checks import check_parts
from clover.engines.tensorrt.kernels import OPERATORS, make_host
from clover.exporter.config import ModelConfig
from clover.plugins.bidirectional_gdn.function import function_body as gdn_body
from clover.plugins.bidirectional_gdn.plugin import PLUGIN as GDN
from clover.plugins.bidirectional_gdn.spec import GatedDeltaNetAttributes
from clover.plugins.kernels.interpreter import Output, shared_interpreter
from clover.plugins.moe_coreset_routing.plugin import PLUGIN as ROUTING
from clover.plugins.moe_coreset_routing.spec import CoresetAttributes
from clover.plugins.moe_experts.plugin import PLUGIN as EXPERTS
from clover.plugins.moe_experts.spec import ExpertsAttributes
from clover.plugins.op_spec import Attributes
from clover.plugins.tensorrt_plugin import PluginHost, PluginOp, register, unregister
from clover.runtime.errors import CloverError

trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx-cu13")
pytest.importorskip("triton", reason="compiling the kernels needs triton")

S, T = 2, 40
KINDS = {"bf16": ml_dtypes.bfloat16, "fp32": np.float32, "i64": np.int64}


@dataclass
class Registered:
    host: PluginHost
    driver: StandInDriver
    launches: list[tuple[Any, ...]]
    creators: dict[str, Any]
    config: ModelConfig

    def attributes(self, op: PluginOp) -> Attributes:
        made: dict[str, Attributes] = {
            GDN.name: GatedDeltaNetAttributes.from_config(self.config),
            ROUTING.name: CoresetAttributes.from_config(self.config),
            EXPERTS.name: ExpertsAttributes.from_config(self.config, 64),
        }
        return made[op.name]

    def shapes(self, op: PluginOp) -> list[tuple[int, ...]]:
        c = self.config
        heads = c.linear_num_value_heads
        state = (S, heads, c.linear_key_head_dim, c.linear_value_head_dim)
        conv, taps = c.conv_channels, c.linear_conv_kernel_dim
        shapes: dict[str, list[tuple[int, ...]]] = {
            GDN.name: [
                (S, T, conv), (S, T, heads), (S, T, heads), (S, taps - 1, conv), state, (conv, taps), (conv, taps - 1),
                *[(heads,)] * 5, (S,), (S,),
            ],
            ROUTING.name: [(S, T, c.num_experts), (S,), (S,), (S,)],
            EXPERTS.name: [(S * T, c.hidden_size), (S * T, c.num_experts), (4, c.num_experts)],
        }  # fmt: skip
        return shapes[op.name]

    def plugin(self, op: PluginOp) -> Any:
        """A plugin as it comes out of an engine file: made from what the node's own plugin writes into it."""
        creator = self.creators[op.name]
        given = []
        for name, value in self.attributes(op).as_onnx().items():
            whole = isinstance(value, int)
            kind = trt.PluginFieldType.INT32 if whole else trt.PluginFieldType.FLOAT32
            given.append(trt.PluginField(name, np.array([value], np.int32 if whole else np.float32), kind))
        built = creator.create_plugin("node", trt.PluginFieldCollection(given), trt.TensorRTPhase.BUILD)
        again = creator.create_plugin("node", built.get_fields_to_serialize(), trt.TensorRTPhase.RUNTIME)
        assert self.host.error is None and again.attributes == built.attributes
        return again.attach_to_context(None)


@pytest.fixture
def registered() -> Iterator[Registered]:
    bundle = gpu_bundle("5070ti", "int4")
    launches: list[tuple[Any, ...]] = []

    class Driver(StandInDriver):
        def cuLaunchKernel(self, *arguments: Any) -> tuple[int]:
            launches.append(arguments)
            return (0,)

    driver = Driver()
    driver.cuCtxSetCurrent(1)
    host = make_host(check_parts(bundle), driver)
    creators = register(trt, OPERATORS, host)
    named = {op.name: creator for op, creator in zip(OPERATORS, creators, strict=True)}
    yield Registered(host, driver, launches, named, bundle.manifest.config)
    unregister(trt, creators)


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_enqueue_launches_the_plan_with_every_pointer_in_its_place(registered: Registered, op: PluginOp) -> None:
    shapes, plugin = registered.shapes(op), registered.plugin(op)
    attributes = op.attributes(registered.attributes(op).as_onnx())
    plan = op.plan(attributes, shapes)
    names = [n for n, _ in (*op.inputs, *op.outputs)]
    pointers = {name: 0x10000 * (i + 1) for i, name in enumerate(names)}
    workspace = 0x7000_0000
    described = [SimpleNamespace(dims=shape) for shape in shapes]
    addresses = list(pointers.values())
    split = len(op.inputs)
    assert plugin.enqueue(described, None, addresses[:split], addresses[split:], workspace, 77) is None
    assert len(registered.launches) == len(plan.launches)
    places = {**pointers, **{b.name: workspace + b.offset for b in plan.buffers}}
    for launch, call in zip(plan.launches, registered.launches, strict=True):
        assert call[1:4] == launch.grid and call[8] == 77
        array = (ctypes.c_void_p * len(launch.arguments)).from_address(call[9])
        for argument, address in zip(launch.arguments, array, strict=True):
            assert address is not None
            if isinstance(argument, str):
                assert ctypes.c_uint64.from_address(address).value == places[argument], argument
    used = {a for launch in plan.launches for a in launch.arguments if isinstance(a, str)}
    assert set(names) <= used, "no input or output is left out"
    described_max = [SimpleNamespace(max=shape) for shape in shapes]
    assert plugin.get_workspace_size(described_max, None) == plan.workspace_bytes


def test_a_failed_launch_is_told_to_tensorrt_and_kept_for_the_caller(registered: Registered) -> None:
    plugin = registered.plugin(ROUTING)
    described = [SimpleNamespace(dims=shape) for shape in registered.shapes(ROUTING)]
    with pytest.raises(CloverError, match="multiple of 16"):  # TensorRT's bindings take an exception and no status
        plugin.enqueue(described, None, [16, 32, 48, 7], [64], 0, 0)
    assert "multiple of 16" in str(registered.host.error)


def test_states_are_updated_in_place(registered: Registered) -> None:
    plugin = registered.plugin(GDN)
    assert [plugin.get_aliased_input(i) for i in range(3)] == [-1, 3, 4]
    assert registered.plugin(EXPERTS).get_aliased_input(0) == -1


@pytest.mark.parametrize(("commit", "length"), [((0, 0), (32, 16)), ((32, 5), (40, 5)), ((40, 0), (40, 0))])
def test_the_gdn_function_body_and_its_kernels_agree(
    registered: Registered, commit: tuple[int, int], length: tuple[int, int]
) -> None:
    """The same tensors through ONNX Runtime and through the plugin's own plan in Triton's interpreter."""
    rng = np.random.default_rng(0)
    attributes = GDN.attributes(registered.attributes(GDN).as_onnx())
    kinds = {"BF16": "bf16", "FLOAT": "fp32", "INT64": "i64"}
    inputs: dict[str, tuple[Any, npt.NDArray[Any]]] = {}
    for (name, kind), shape in zip(GDN.inputs, registered.shapes(GDN), strict=True):
        values = rng.standard_normal(shape).astype(np.float32)
        inputs[name] = kinds[kind], values.astype(KINDS[kinds[kind]]).astype(np.float32)
    inputs["decay_scale"] = "fp32", -np.abs(inputs["decay_scale"][1])
    inputs["commit_length"] = "i64", np.array(commit)
    inputs["row_length"] = "i64", np.array(length)
    shapes = registered.shapes(GDN)
    o = (S, T, registered.config.value_width)
    got = shared_interpreter().run(
        GDN.plan(attributes, shapes),
        inputs,
        {
            "o": Output("bf16", o),
            "new_conv_state": Output("bf16", shapes[3], "conv_state"),
            "new_recurrent_state": Output("fp32", shapes[4], "recurrent_state"),
        },
    )
    want = run_function({name: values for name, (_, values) in inputs.items()}, attributes)
    for s, rows in enumerate(length):
        if rows:
            assert relative_error(got["o"][s, :rows], want["o"][s, :rows]) <= 5e-3, "o is bfloat16"
        assert (want["o"][s, rows:] == 0).all() and (got["o"][s, rows:] == 0).all()
    np.testing.assert_array_equal(got["new_conv_state"], want["new_conv_state"])
    assert relative_error(got["new_recurrent_state"], want["new_recurrent_state"]) <= 1e-5


def run_function(inputs: dict[str, npt.NDArray[Any]], attributes: Attributes) -> dict[str, npt.NDArray[Any]]:
    """One node of the operator in ONNX Runtime, which inlines its body."""
    names = [n for n, _ in GDN.outputs]
    node = helper.make_node(GDN.name, list(GDN.spec.input_names), names, domain="clover", **attributes.as_onnx())

    integer = ("commit_length", "row_length")
    given = [
        helper.make_tensor_value_info(n, TensorProto.INT64 if n in integer else TensorProto.FLOAT, inputs[n].shape)
        for n in GDN.spec.input_names
    ]
    results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names]
    graph = helper.make_graph([node], "one", given, results)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("clover", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[gdn_body()], ir_version=11)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(None, inputs), strict=True))
