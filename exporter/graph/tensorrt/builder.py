"""A graph author that knows the activation type, and turns the weight store's INT4 into ONNX's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from clover.exporter.graph.builder import IR_VERSION, OPSET, GraphBuilder
from clover.exporter.weight_index import StoredTensor
from clover.plugins.op_spec import DOMAIN, OpSpec
from clover.runtime.errors import CloverError

ActivationType = Literal["bfloat16", "float32"]
_CHUNK = 8 * 2**20  # bytes converted at a time
_ALIGNMENT = 64
_SIGN = np.uint8(0x88)  # unsigned nibbles with zero point 8 become two's complement by flipping their top bits


@dataclass
class ConvertedWeights:
    """A file beside the graph for the few weights whose bytes differ from the store's: INT4 values and their scales.

    Tensors are converted and written piece by piece, so that memory does not grow with the model.
    """

    store: Path  # directory the store's file names are relative to
    path: Path  # the file, which lies in `store` too
    _places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._file: BinaryIO = self.path.open("wb")

    def close(self) -> None:
        self._file.close()

    def int4(self, name: str, source: StoredTensor) -> tuple[int, int]:
        """(offset, bytes) of a store's packed INT4 as ONNX INT4."""
        if name not in self._places:
            packed = np.memmap(self.store / source.file, np.uint8, "r", source.offset, (source.nbytes,))
            offset = self._begin()
            for start in range(0, source.nbytes, _CHUNK):
                self._file.write((packed[start : start + _CHUNK] ^ _SIGN).tobytes())
            self._places[name] = (offset, source.nbytes)
        return self._places[name]

    def narrow(self, name: str, source: StoredTensor, dtype: npt.DTypeLike) -> tuple[int, int]:
        """(offset, bytes) of a store's float32 tensor in a 16-bit type.

        Scales of our own quantisation are exact in bfloat16; those of a checkpoint quantised before lose half of its
        last bit, far below the error of INT4 itself.
        """
        if name not in self._places:
            values = self.floats(source)
            offset = self._begin()
            for start in range(0, len(values), _CHUNK):
                self._file.write(values[start : start + _CHUNK].astype(dtype).tobytes())
            self._places[name] = (offset, source.nbytes // 2)
        return self._places[name]

    def floats(self, source: StoredTensor) -> npt.NDArray[np.float32]:
        """A store's float32 tensor, flat and mapped."""
        data = np.memmap(self.store / source.file, np.uint8, "r", source.offset, (source.nbytes,))
        return data.view(np.float32)

    def _begin(self) -> int:
        at = self._file.tell()
        padding = -at % _ALIGNMENT
        self._file.write(bytes(padding))
        return at + padding


class TypedBuilder(GraphBuilder):
    """GraphBuilder with an activation type, custom operators and their function bodies."""

    def __init__(
        self, weights: Mapping[str, StoredTensor], activation: ActivationType, converted: ConvertedWeights
    ) -> None:
        super().__init__(weights)
        self.activation = activation
        self._converted = converted
        self._functions: dict[str, onnx.FunctionProto] = {}

    @property
    def low(self) -> int:
        """ONNX's number of the activation type."""
        return int(TensorProto.BFLOAT16 if self.activation == "bfloat16" else TensorProto.FLOAT)

    def to_low(self, x: str) -> str:
        """float32 -> the activation type."""
        return x if self.low == TensorProto.FLOAT else self.op("Cast", x, to=self.low)

    def from_low(self, x: str) -> str:
        """The activation type -> float32."""
        return x if self.low == TensorProto.FLOAT else self.to_float(x)

    def silu(self, x: str) -> str:
        return self.op("Mul", x, self.op("Sigmoid", x))

    def constant(self, array: npt.NDArray[Any]) -> str:
        """As GraphBuilder.constant, and a scalar stays one: TensorRT's Range takes nothing else."""
        name = super().constant(array)
        del self._initializers[name].dims[:]
        self._initializers[name].dims.extend(array.shape)
        return name

    # -- weights -----------------------------------------------------------------------------

    def low_weight(self, name: str) -> str:
        """A float tensor of the store in the activation type."""
        if self.low == TensorProto.FLOAT:
            weight = self.weight(name)
            return self.to_float(weight) if self.weights[name].dtype == "BF16" else weight
        if self.weights[name].dtype == "BF16":
            return self.weight(name)
        return self._narrow(name, TensorProto.BFLOAT16, ml_dtypes.bfloat16)

    def int4_weight(self, name: str, group_size: int, *, half: bool = False) -> str:
        """A dequantised INT4 matrix [rows, columns] of the store, in the activation type, or in float16 with `half`.

        Raises CloverError for a scale below zero, which TensorRT does not take.
        """
        if self.low != TensorProto.FLOAT and float(self.floats(f"{name}.scales").min()) < 0:
            raise CloverError(
                f"{name} has negative scales in this checkpoint, which TensorRT does not take; use the BF16 checkpoint, or "
                "--gpu cpu."
            )
        stored = self.weights[f"{name}.qweight"]
        rows = stored.shape[0]
        offset, nbytes = self._converted.int4(f"{name}.qweight", stored)
        values = self._external(f"{name}.int4", TensorProto.INT4, (rows, 2 * stored.nbytes // rows), offset, nbytes)
        kept = f"{name}.scales"
        scales = self._narrow(kept, TensorProto.FLOAT16, np.float16) if half else self.low_weight(kept)
        return self.op("DequantizeLinear", values, scales, axis=1, block_size=group_size)

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """The values of a float32 tensor of the store, flat."""
        return self._converted.floats(self.weights[name])

    def _narrow(self, name: str, dtype: int, numpy_dtype: npt.DTypeLike) -> str:
        offset, nbytes = self._converted.narrow(name, self.weights[name], numpy_dtype)
        return self._external(f"{name}:16", dtype, self.weights[name].shape, offset, nbytes)

    def _external(self, key: str, dtype: int, dims: Sequence[int], offset: int, nbytes: int) -> str:
        if key not in self._initializers:
            tensor = TensorProto(name=key, data_type=dtype, dims=dims, data_location=TensorProto.EXTERNAL)
            for name, value in (("location", self._converted.path.name), ("offset", offset), ("length", nbytes)):
                tensor.external_data.add(key=name, value=str(value))
            self._initializers[key] = tensor
        return key

    # -- custom operators ----------------------------------------------------------------------

    def custom(self, spec: OpSpec, attributes: Mapping[str, Any], *inputs: str) -> list[str]:
        """A node of domain `clover`; one name per output of the spec."""
        return self.ops(spec.name, len(spec.outputs), *inputs, domain=spec.domain, **attributes)

    def function(self, body: onnx.FunctionProto) -> None:
        """Puts an operator's body into the model, for runtimes without a kernel of its own."""
        self._functions[body.name] = body

    def model(self, name: str, metadata: Mapping[str, str]) -> onnx.ModelProto:
        model = super().model(name, metadata)
        del model.opset_import[:]
        model.opset_import.extend([helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)])
        model.functions.extend(self._functions.values())
        model.ir_version = IR_VERSION
        return model
