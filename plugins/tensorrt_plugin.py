"""Turns a custom operator into a TensorRT plugin written in Python, for `tensorrt_rtx` and `tensorrt` alike.

Each operator's `plugin.py` holds a PluginOp: types, shapes, and the launch plan of its kernels. The IPluginV3 class
made of it here serialises the node's attributes and the hash of the kernels it was built with, so that an engine
never runs with other kernels than its own. TensorRT is imported by the caller and handed in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from clover.plugins.kernels.cubin import Cubin
from clover.plugins.kernels.launch import KernelLibrary
from clover.plugins.kernels.plan import Kernel, Plan
from clover.plugins.op_spec import Attributes, OpSpec
from clover.runtime.errors import BundleError, CloverError

VERSION = "1"
KERNELS_FIELD = "kernels"  # serialised beside the attributes: the hash of the operator's compiled kernels
# The empty namespace: under the operator's own domain the ONNX parser would prefer the function body (tried).
NAMESPACE = ""
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class PluginOp:
    """One operator as a plugin. Element types are TensorRT's names (BF16, FLOAT, INT64).

    inputs, outputs: names and types in order; names are those of the launch plan. output_shapes: attributes and the
    inputs' dimensions (opaque expressions) -> the outputs', where an int stands for itself. aliased: output -> the input whose memory it shares. plan: attributes and input shapes -> launches. kernels: all
    that the plans of any number of rows need, from attributes and the shapes of one step.
    """

    spec: OpSpec
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    output_shapes: Callable[[Any, Sequence[Sequence[Any]]], Sequence[Sequence[Any]]]
    plan: Callable[[Any, Shapes], Plan]
    kernels: Callable[[Any, Shapes], tuple[Kernel, ...]]
    aliased: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.spec.name

    def input_index(self, name: str) -> int:
        return [n for n, _ in self.inputs].index(name)

    def attributes(self, values: Mapping[str, int | float]) -> Attributes:
        """The operator's attributes from a node's or an engine's fields. CloverError when one is missing."""
        try:
            # engines keep float32: the same number must come back, since it is compiled into the kernels
            typed = {
                f.name: int(values[f.name]) if f.type == "int" else float(np.float32(values[f.name]))
                for f in fields(self.spec.attributes)
            }
        except KeyError as error:
            raise CloverError(f"{self.name} lacks its attribute {error}; build the engine again") from None
        return self.spec.attributes(**typed)


def kernels_digest(cubins: Sequence[Cubin]) -> str:
    """One hash for a set of compiled kernels, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(c.sha256 for c in cubins)).encode()).hexdigest()


@dataclass
class PluginHost:
    """What the plugins of one process share: the compiled kernels, and the operators' hashes of them.

    An exception ends in TensorRT's own code, which only knows that there was one; so `error` keeps the first for whoever
    called TensorRT.
    """

    library: KernelLibrary
    digests: Mapping[str, str]  # operator -> kernels_digest
    error: BaseException | None = None

    @contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """Keeps an exception and lets it go on: to TensorRT that is a plugin's failure (a return value means nothing)."""
        try:
            yield
        except BaseException as error:
            self.error = self.error or error
            raise

    def check(self, op: PluginOp, recorded: str) -> None:
        """Raises BundleError when an engine was built with other kernels than the bundle holds."""
        if recorded != self.digests.get(op.name):
            raise BundleError(
                f"the engine was built with other {op.name} kernels than this bundle holds; build it again"
            )


def register(trt: Any, ops: Sequence[PluginOp], host: PluginHost) -> list[Any]:
    """Registers a creator for every operator and returns them: the registry keeps none alive, so the caller must.

    Raises CloverError when an operator of that name is registered already.
    """
    registry = trt.get_plugin_registry()
    creators = []
    for op in ops:
        if registry.get_creator(op.name, VERSION, NAMESPACE) is not None:
            raise CloverError(
                f"a TensorRT plugin {op.name} is registered in this process already; load one engine library per process"
            )
        creator = _creator_class(trt, op, host)()
        if not registry.register_creator(creator, NAMESPACE):
            raise CloverError(f"TensorRT did not accept the plugin {op.name}; this TensorRT version is not supported")
        creators.append(creator)
    return creators


def unregister(trt: Any, creators: Sequence[Any]) -> None:
    """Takes creators out of the registry again."""
    for creator in creators:
        trt.get_plugin_registry().deregister_creator(creator)


def _creator_class(trt: Any, op: PluginOp, host: PluginHost) -> Any:
    plugin = _plugin_class(trt, op, host)
    integer, number = trt.PluginFieldType.INT32, trt.PluginFieldType.FLOAT32
    empty = np.array([], np.int32), np.array([], np.float32)
    declared = [
        trt.PluginField(f.name, *((empty[0], integer) if f.type == "int" else (empty[1], number)))
        for f in fields(op.spec.attributes)
    ]

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = op.name, VERSION, NAMESPACE
            self.field_names = trt.PluginFieldCollection(declared)
            self._arrays = empty  # a PluginField points into its array and does not keep it

        def create_plugin(self, name: str, given: Any, phase: Any) -> Any:
            try:
                values: dict[str, Any] = {}
                for item in given:
                    if item.name == KERNELS_FIELD:
                        host.check(op, bytes(item.data).decode())
                    else:
                        values[item.name] = np.asarray(item.data).reshape(-1)[0]
                return plugin(op.attributes(values))
            except BaseException as error:
                host.error = host.error or error
                return None

    return Creator


def _plugin_class(trt: Any, op: PluginOp, host: PluginHost) -> Any:
    types = [getattr(trt.DataType, kind) for _, kind in (*op.inputs, *op.outputs)]
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)

    class Plugin(*bases):  # type: ignore[misc]
        def __init__(self, attributes: Attributes) -> None:
            for base in bases:
                base.__init__(self)
            self.plugin_name, self.plugin_version, self.plugin_namespace = op.name, VERSION, NAMESPACE
            self.num_outputs = len(op.outputs)
            self.attributes = attributes
            self._shapes: Shapes | None = None
            self._prepared: Any = None
            self._arrays: list[Any] = []
            self._fields: Any = None

        # -- core ----------------------------------------------------------------------------

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            return Plugin(self.attributes)

        # -- build ---------------------------------------------------------------------------

        def get_output_data_types(self, inputs: Any) -> Any:
            return types[len(op.inputs) :]

        @host.keeping_errors()
        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> Any:
            given = [[shape[i] for i in range(len(shape))] for shape in inputs]
            shapes = []
            for dims in op.output_shapes(self.attributes, given):
                shape = trt.DimsExprs(len(dims))
                for i, d in enumerate(dims):
                    shape[i] = builder.constant(d) if isinstance(d, int) else d
                shapes.append(shape)
            return shapes

        def supports_format_combination(self, position: int, in_out: Any, num_inputs: int) -> bool:
            described = in_out[position].desc
            return bool(described.format == trt.TensorFormat.LINEAR and described.type == types[position])

        def get_aliased_input(self, output_index: int) -> int:
            source = op.aliased.get(op.outputs[output_index][0])
            return -1 if source is None else op.input_index(source)

        def configure_plugin(self, inputs: Any, outputs: Any) -> None: ...

        @host.keeping_errors()
        def get_workspace_size(self, inputs: Any, outputs: Any) -> int:
            shapes = [tuple(i.max) for i in inputs]
            return op.plan(self.attributes, shapes).workspace_bytes

        def get_valid_tactics(self) -> list[int]:
            return []

        def set_tactic(self, tactic: int) -> None: ...

        # -- run -----------------------------------------------------------------------------

        def get_fields_to_serialize(self) -> Any:
            # A PluginField points into its array and does not keep it: arrays and fields live as long as the plugin.
            whole, number = (np.int32, trt.PluginFieldType.INT32), (np.float32, trt.PluginFieldType.FLOAT32)
            self._arrays, written = [], []
            for f in fields(op.spec.attributes):
                dtype, kind = whole if f.type == "int" else number
                self._arrays.append(np.array([getattr(self.attributes, f.name)], dtype))
                written.append(trt.PluginField(f.name, self._arrays[-1], kind))
            self._arrays.append(np.frombuffer(host.digests[op.name].encode(), np.int8))
            written.append(trt.PluginField(KERNELS_FIELD, self._arrays[-1], trt.PluginFieldType.CHAR))
            self._fields = trt.PluginFieldCollection(written)
            return self._fields

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        @host.keeping_errors()
        def on_shape_change(self, inputs: Any, outputs: Any) -> None:
            shapes = [tuple(i.dims) for i in inputs]
            if shapes != self._shapes:
                self._prepared = host.library.prepare(op.plan(self.attributes, shapes))
                self._shapes = shapes

        @host.keeping_errors()
        def enqueue(
            self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: int, stream: int
        ) -> None:
            """Runs once per launch, or once per captured graph; lengths are read on the device, so a graph serves all."""
            self.on_shape_change(input_desc, output_desc)
            names = (*(n for n, _ in op.inputs), *(n for n, _ in op.outputs))
            self._prepared.launch(dict(zip(names, (*inputs, *outputs), strict=True)), workspace or 0, stream)

    return Plugin
