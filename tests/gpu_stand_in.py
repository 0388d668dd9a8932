"""A CUDA driver and a TensorRT runtime made of host memory and ONNX Runtime, so that a GPU session runs without a GPU.

Device memory is host memory, a stream runs at once, a captured graph is a list of what was queued. The engine is the
same step graph in its portable form; it reads every input and writes every output at the addresses it was given.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from clover.engines.bundle import Bundle
from clover.exporter.graph.tensorrt.lower import build_portable_graph
from clover.exporter.graph.tensorrt.step import DeviceGraphOptions
from clover.exporter.weight_index import read_weight_index
from clover.runtime.gpu.tensors import TENSORRT_TYPES

OUT_OF_MEMORY, INVALID_CONTEXT, ILLEGAL_ADDRESS = 2, 201, 700
CARD_BYTES = 2**30


class StandInDriver:
    """As much of `cuda.bindings.driver` as the runtime calls. `log` holds the names of the calls."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor"
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    broken = False  # a kernel wrote where it must not

    def __init__(self, card_bytes: int = CARD_BYTES) -> None:
        self.card_bytes = card_bytes
        self.memory: dict[int, npt.NDArray[np.uint8]] = {}
        self.on_card: dict[int, int] = {}
        self.recording: list[Callable[[], object]] | None = None
        self.log: list[str] = []
        self._thread = threading.local()

    def __getattribute__(self, name: str) -> Any:
        """Work for the card needs a context in the calling thread, as with the real driver; once `broken`, all fails."""
        if name.startswith(("cuMem", "cuStream", "cuGraph", "cuModule", "cuLaunch")):
            if object.__getattribute__(self, "broken"):
                return lambda *arguments: (ILLEGAL_ADDRESS, 0)
            if not hasattr(object.__getattribute__(self, "_thread"), "context"):
                return lambda *arguments: (INVALID_CONTEXT, 0)
        return object.__getattribute__(self, name)

    def cuCtxSetCurrent(self, context: Any) -> tuple[int]:
        self._thread.context = context
        return (0,)

    def __getattr__(self, name: str) -> Any:
        """Calls without any effect here: contexts, streams, modules."""
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[int, int]:
            self.log.append(name)
            return 0, 1

        return call

    def queue(self, work: Callable[[], object]) -> None:
        """Runs work, or records it."""
        if self.recording is None:
            work()
        else:
            self.recording.append(work)

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[int, int]:
        return 0, 12 if attribute == "major" else 0

    def cuGetErrorName(self, status: int) -> tuple[int, bytes]:
        names = {OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY", ILLEGAL_ADDRESS: b"CUDA_ERROR_ILLEGAL_ADDRESS"}
        return 0, names.get(status, b"CUDA_ERROR_UNKNOWN")

    def cuMemGetInfo(self) -> tuple[int, int, int]:
        return 0, self.card_bytes - sum(self.on_card.values()), self.card_bytes

    def cuMemAlloc(self, nbytes: int) -> tuple[int, int]:
        if sum(self.on_card.values()) + nbytes > self.card_bytes:
            return OUT_OF_MEMORY, 0
        _, address = self.cuMemHostAlloc(nbytes, 0)
        self.on_card[address] = nbytes
        return 0, address

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[int, int]:
        whole = np.full(nbytes + 256, 0xAB, np.uint8)  # what nobody wrote is recognisable
        address = -(-whole.ctypes.data // 256) * 256
        self.memory[address] = whole
        return 0, address

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        return 0, address

    def cuMemFree(self, address: int) -> tuple[int]:
        del self.memory[address], self.on_card[address]
        return (0,)

    def cuMemFreeHost(self, address: int) -> tuple[int]:
        del self.memory[address]
        return (0,)

    def _move(self, target: int, source: int, nbytes: int) -> tuple[int]:
        self.queue(lambda: ctypes.memmove(target, source, nbytes))
        return (0,)

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: Any) -> tuple[int]:
        return self._move(target, source, nbytes)

    cuMemcpyDtoHAsync = cuMemcpyDtoDAsync = cuMemcpyHtoDAsync

    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: Any) -> tuple[int]:
        self.queue(lambda: ctypes.memset(address, value, nbytes))
        return (0,)

    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[int]:
        self.recording = []
        return (0,)

    def cuStreamEndCapture(self, stream: Any) -> tuple[int, Any]:
        recorded, self.recording = self.recording, None
        return 0, recorded

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, Any]:
        return 0, graph

    def cuGraphLaunch(self, graph: Any, stream: Any) -> tuple[int]:
        self.log.append("cuGraphLaunch")
        for work in graph:
            work()
        return (0,)


def view(address: int, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """The array at an address."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    found: npt.NDArray[Any] = data.view(dtype).reshape(shape)
    return found


class StandInTensorRt:
    """The real module, for plugins and their registry, with a runtime that opens the portable graph."""

    def __init__(self, trt: Any, bundle: Bundle, driver: StandInDriver, state_dtype: Any) -> None:
        self._trt = trt
        self.engine = StandInEngine(bundle, driver, state_dtype)
        self.opens = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trt, name)

    def Runtime(self, logger: Any) -> Any:
        engine = self.engine if self.opens else None
        return SimpleNamespace(deserialize_cuda_engine=lambda data: engine)


class StandInEngine:
    """An engine and its execution contexts."""

    num_optimization_profiles = 2

    def __init__(self, bundle: Bundle, driver: StandInDriver, state_dtype: Any) -> None:
        manifest, entry = bundle.manifest, bundle.manifest.engines[0]
        self.config, self.driver, self.state_dtype = manifest.config, driver, np.dtype(state_dtype)
        files = [n for n in manifest.files if n.endswith(".safetensors")]
        options = DeviceGraphOptions(entry.capacity, manifest.excluded_token_ids, manifest.graph.with_logits)
        model: onnx.ModelProto = build_portable_graph(
            self.config, manifest.precision_plan, read_weight_index(bundle.directory, files), bundle.directory, options
        )
        path = bundle.directory / "portable.onnx"
        path.write_bytes(model.SerializeToString())
        settings = ort.SessionOptions()
        settings.log_severity_level, settings.intra_op_num_threads = 3, 1
        self.session = ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        for leftover in (path, bundle.directory / "step.converted"):
            Path(leftover).unlink()
        self.capturable = True
        self.profiles_run: list[int] = []
        self.tables: list[npt.NDArray[np.int64]] = []  # of the last run, by layer

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors())

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors())[index]

    def get_tensor_dtype(self, name: str) -> Any:
        kind = self.state_dtype if is_state(name) else np.dtype(_numpy(self._tensors()[name].type))
        return SimpleNamespace(name=TENSORRT_TYPES[kind.name])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else -1 for d in self._tensors()[name].shape)

    def get_tensor_location(self, name: str) -> Any:
        import tensorrt_rtx

        place = tensorrt_rtx.TensorLocation
        return place.HOST if name == "candidates" else place.DEVICE

    def _tensors(self) -> dict[str, Any]:
        """The portable graph's, and what only an engine has: its experts are behind addresses."""
        layers, experts = self.config.num_hidden_layers, self.config.num_experts
        tables = [
            SimpleNamespace(name=f"expert_table.{n}", type="tensor(int64)", shape=[4, experts]) for n in range(layers)
        ]
        used = SimpleNamespace(name="expert_rows", type="tensor(int32)", shape=[layers, experts])
        return {t.name: t for t in (*self.session.get_inputs(), *self.session.get_outputs(), *tables, used)}

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return 4096 * (1 + profile)

    def create_execution_context(self, settings: Any) -> StandInContext:
        assert settings.cache is not None
        return StandInContext(self)

    def create_runtime_config(self) -> Any:
        return StandInSettings()

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return name.removeprefix("next.") if name.startswith("next.keys") else None


class StandInSettings:
    """A runtime configuration, and the cache of compiled kernels in it."""

    def __init__(self) -> None:
        self.cache: StandInSettings | None = None
        self.content = b""

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None: ...

    def create_runtime_cache(self) -> StandInSettings:
        return StandInSettings()

    def set_runtime_cache(self, cache: StandInSettings) -> None:
        self.cache = cache

    def deserialize(self, content: bytes) -> bool:
        self.content = content
        return True

    def serialize(self) -> bytes:
        return self.content + b"kernels"


class StandInContext:
    def __init__(self, engine: StandInEngine) -> None:
        self.engine, self.profile = engine, -1
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_device_memory(self, address: int, nbytes: int) -> None:
        assert nbytes >= self.engine.get_device_memory_size_for_profile_v2(self.profile)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return True

    def is_stream_capturable(self, stream: int) -> bool:
        return self.engine.capturable

    def execute_async_v3(self, stream: int) -> bool:
        addresses, shapes = dict(self.addresses), dict(self.shapes)
        self.engine.driver.queue(lambda: self._run(addresses, shapes))
        return True

    def _run(self, addresses: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        engine, feeds = self.engine, {}
        for given in engine.session.get_inputs():
            dtype = self._dtype(given.name, given.type)
            feeds[given.name] = view(addresses[given.name], dtype, shapes[given.name]).astype(_numpy(given.type))
        results = engine.session.run(None, feeds)
        for given, value in zip(engine.session.get_outputs(), results, strict=True):
            view(addresses[given.name], self._dtype(given.name, given.type), value.shape)[...] = value
        engine.tables = [
            view(addresses[f"expert_table.{n}"], np.int64, shapes[f"expert_table.{n}"]).copy()
            for n in range(engine.config.num_hidden_layers)
        ]
        # every row uses experts 0 … 3 of every layer, as far as the runtime can tell
        rows = view(addresses["expert_rows"], np.int32, (engine.config.num_hidden_layers, engine.config.num_experts))
        rows[...] = 0
        rows[:, -4:] = 1
        engine.profiles_run.append(self.profile)

    def _dtype(self, name: str, kind: str) -> Any:
        return self.engine.state_dtype if is_state(name) else _numpy(kind)


def is_state(name: str) -> bool:
    """State that is BF16 in an engine, and what a test chooses here."""
    return name.removeprefix("next.").startswith(("conv", "keys", "values"))


def _numpy(kind: str) -> Any:
    return {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}[kind]


BFLOAT16 = ml_dtypes.bfloat16
