"""Checkpoints whose matrices are INT4 already: read as they are, bit for bit, instead of quantised a second time.

Three layouts are known, all with K input columns, N output rows, and a scale per row and group of columns; eight
values lie in an int32, the first in its lowest four bits unless said otherwise:

    compressed-tensors  weight_packed [N, K/8], weight_scale [N, K/G], weight_shape; asymmetric ones also
                        weight_zero_point [ceil(N/8), K/G], rows 8r…8r+7 of a group in the word of row r
    gptq                qweight [K/8, N], qzeros [K/G, N/8] (in the first format less by one), scales [K/G, N]
    awq                 qweight [K, N/8] and qzeros [K/G, N/8], columns in the order 0 2 4 6 1 3 5 7, scales [K/G, N]

value = (nibble - zero point) * scale. Where every zero point is 8 (or none is stored), that is the weight store's own layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from clover.exporter.precision import GROUP_SIZES
from clover.exporter.quantize import pack_int4, unpack_int4
from clover.exporter.safetensors_file import FLOAT_DTYPES, SafetensorsFile, TensorInfo
from clover.runtime.errors import CheckpointError

PACKED = "INT4"  # what Checkpoint.dtype says of such a matrix
SYMMETRIC = 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds the column AWQ_ORDER[i]
METHODS = ("compressed-tensors", "gptq", "awq")
PARTS = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
}
OPTIONAL_PARTS = ("g_idx", "weight_shape", "weight_zero_point")
VECTORS = ("g_idx", "weight_shape")
INSTEAD = "use the BF16 checkpoint"

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Stored(Protocol):
    """One tensor as it lies in a file."""

    @property
    def file(self) -> SafetensorsFile: ...
    @property
    def name(self) -> str: ...
    @property
    def info(self) -> TensorInfo: ...


@dataclass(frozen=True)
class SourceFormat:
    """How a checkpoint's INT4 matrices are stored."""

    method: str
    group_size: int
    zero_offset: int = 0  # what to add to a stored zero point
    asymmetric: bool = False  # compressed-tensors: every matrix has zero points


@dataclass(frozen=True)
class PackedRows:
    """Rows of a matrix: `values` [n, K / 2] two to a byte, low nibble first, `scales` and `zeros` [n, K / group]."""

    values: Bytes
    scales: Floats
    zeros: Bytes | None = None  # None: 8 everywhere

    @property
    def size(self) -> int:
        """Number of weights."""
        return 2 * self.values.size

    def map(self, move: Callable[[Array], Array]) -> PackedRows:
        """The same move of rows done to all three."""
        zeros = None if self.zeros is None else np.ascontiguousarray(move(self.zeros))
        return PackedRows(np.ascontiguousarray(move(self.values)), np.ascontiguousarray(move(self.scales)), zeros)

    def regroup(self, group_size: int) -> PackedRows:
        """The same values with a scale for every `group_size` columns, a divisor of what it was."""
        times = 2 * self.values.shape[1] // (self.scales.shape[1] * group_size)
        zeros = None if self.zeros is None else np.repeat(self.zeros, times, axis=1)
        return PackedRows(self.values, np.repeat(self.scales, times, axis=1), zeros)

    def packed_zeros(self) -> Bytes:
        """Zero points two to a byte, [n, ceil(groups / 2)]."""
        zeros = np.full(self.scales.shape, SYMMETRIC, np.uint8) if self.zeros is None else self.zeros
        return pack_int4(np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2))))

    def dequantize(self) -> Floats:
        """float32 [n, K]."""
        n, groups = self.scales.shape
        values = unpack_int4(self.values).reshape(n, groups, -1).astype(np.float32)
        values -= np.float32(SYMMETRIC) if self.zeros is None else self.zeros[:, :, None].astype(np.float32)
        values *= self.scales[:, :, None]
        return values.reshape(n, -1)


def concatenate(parts: Iterable[PackedRows]) -> PackedRows:
    """Rows under each other; with zero points when one of them has any."""
    given = tuple(parts)
    zeros = None
    if any(p.zeros is not None for p in given):
        zeros = np.concatenate(
            [np.full(p.scales.shape, SYMMETRIC, np.uint8) if p.zeros is None else p.zeros for p in given]
        )
    return PackedRows(
        np.concatenate([p.values for p in given]), np.concatenate([p.scales for p in given]), zeros
    )  # fmt: skip


# -- config.json ----------------------------------------------------------------------------------


def quantization_problem(value: Any) -> str | None:
    """What of config.json's quantization_config can't be read, None when all can."""
    try:
        read_format(value)
    except ValueError as error:
        return str(error)
    return None


def read_format(value: Any) -> SourceFormat:
    """The layout that a quantization_config describes. Raises ValueError naming the field that is not implemented."""
    if not isinstance(value, dict):
        raise ValueError(f"quantization_config is {value!r}, not an object")
    method = value.get("quant_method")
    if method not in METHODS:
        raise ValueError(
            f"quantization_config.quant_method is {method!r}, and only {', '.join(METHODS)} are read; {INSTEAD}"
        )
    if method == "compressed-tensors":
        return _compressed_tensors(value)
    group: Any = value.get("group_size")
    _expect("bits", value.get("bits"), (4,))
    _expect("group_size", group, GROUP_SIZES)
    if method == "awq":
        _expect("version", str(value.get("version", "gemm")).lower(), ("gemm",))
        _expect("zero_point", value.get("zero_point", True), (True, False))
        return SourceFormat(method, group)
    layout = value.get("checkpoint_format", "gptq")
    _expect("checkpoint_format", layout, ("gptq", "gptq_v2"))
    rules = value.get("dynamic") or {}  # "-:pattern" leaves modules out, which their tensors tell as well
    if not isinstance(rules, dict) or any(rules.values()):
        raise ValueError(
            f"quantization_config.dynamic gives some modules settings of their own, which is not implemented; {INSTEAD}"
        )
    return SourceFormat(method, group, zero_offset=1 if layout == "gptq" else 0)


def _compressed_tensors(value: Mapping[str, Any]) -> SourceFormat:
    _expect("format", value.get("format"), ("pack-quantized",))
    groups = value.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"quantization_config.config_groups is {groups!r}, not an object of groups")
    sizes, asymmetric = set(), set()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        where = f"config_groups.{name}.weights"
        if not isinstance(weights, dict):
            raise ValueError(f"quantization_config.{where} is {weights!r}, not an object")
        _expect(f"{where}.num_bits", weights.get("num_bits"), (4,))
        _expect(f"{where}.type", weights.get("type", "int"), ("int",))
        _expect(f"{where}.strategy", weights.get("strategy", "group"), ("group",))
        _expect(f"{where}.symmetric", weights.get("symmetric", True), (True, False))
        _expect(f"{where}.group_size", weights.get("group_size"), GROUP_SIZES)
        if weights.get("actorder") not in (None, "weight", "static"):  # those keep the columns' order
            raise ValueError(f"quantization_config.{where}.actorder moves columns, which is not implemented; {INSTEAD}")
        sizes.add(weights["group_size"])
        asymmetric.add(not weights.get("symmetric", True))
        if isinstance(group, dict) and group.get("input_activations") is not None:
            raise ValueError(
                f"quantization_config.config_groups.{name}.input_activations asks for quantised activations, which is "
                f"not implemented; {INSTEAD}"
            )
    if len(sizes) > 1:
        raise ValueError(f"quantization_config has groups of {sorted(sizes)} columns, and only one size is implemented")
    if len(asymmetric) > 1:
        raise ValueError(
            f"quantization_config has symmetric and asymmetric groups, and only one kind is implemented; {INSTEAD}"
        )
    return SourceFormat("compressed-tensors", sizes.pop(), asymmetric=asymmetric.pop())


def _expect(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not any(type(value) is type(a) and value == a for a in allowed):
        raise ValueError(
            f"quantization_config.{name} is {value!r}, and only {' or '.join(map(repr, allowed))} is implemented; {INSTEAD}"
        )


# -- tensors --------------------------------------------------------------------------------------


class PackedMatrix:
    """One INT4 matrix of the checkpoint: rows are read on demand, checked and turned into the store's order."""

    def __init__(self, name: str, form: SourceFormat, parts: Mapping[str, Stored]) -> None:
        self.name = name
        self.form = form
        self._parts = parts
        values = parts["weight_packed" if form.method == "compressed-tensors" else "qweight"]
        self.file = values.file
        first, second = values.info.shape
        match form.method:
            case "compressed-tensors":
                shape = (first, 8 * second)
            case "gptq":
                shape = (second, 8 * first)
            case _:
                shape = (8 * second, first)
        self.info = TensorInfo(PACKED, shape, values.info.offset, values.info.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all its parts in the files."""
        return sum(stored.info.nbytes for stored in self._parts.values())

    def problems(self) -> list[str]:
        """What does not fit together, by header."""
        (n, k), group = self.info.shape, self.form.group_size
        if k % group:
            return [f"{self.name} has {k} columns, no multiple of the group size {group}"]
        expected: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
            "weight_packed": ((n, k // 8), ("I32",)),
            "weight_scale": ((n, k // group), FLOAT_DTYPES),
            "weight_shape": ((2,), ("I64", "I32")),
            "weight_zero_point": ((-(-n // 8), k // group), ("I32",)),
            "qweight": ((k // 8, n) if self.form.method == "gptq" else (k, n // 8), ("I32",)),
            "qzeros": ((k // group, n // 8), ("I32",)),
            "scales": ((k // group, n), FLOAT_DTYPES),
            "g_idx": ((k,), ("I32",)),
        }
        out = []
        for part, stored in self._parts.items():
            shape, dtypes = expected[part]
            if stored.info.shape != shape or stored.info.dtype not in dtypes:
                out.append(
                    f"{stored.name} is {stored.info.dtype} {list(stored.info.shape)}, not {dtypes[0]} {list(shape)} as "
                    f"{self.form.method} in groups of {group} has it"
                )
        return out

    def read(self, start: int = 0, stop: int | None = None) -> PackedRows:
        """Rows `start:stop`. Raises CheckpointError for scales that are not finite, or columns in another order."""
        stop = self.info.shape[0] if stop is None else min(stop, self.info.shape[0])
        if self.form.method == "compressed-tensors":
            self._check_shape()
            words = self._words("weight_packed", slice(start, stop))
            values = words.view(np.uint8).reshape(len(words), -1)
            return PackedRows(values, self._scales("weight_scale", start, stop), self._row_zeros(start, stop))
        self._check_order()
        scales = np.ascontiguousarray(self._scales("scales", 0, None)[:, start:stop].T)
        return PackedRows(self._values(start, stop), scales, self._zeros(start, stop))

    def dequantize(self, start: int = 0, stop: int | None = None) -> Floats:
        """Rows `start:stop` as float32."""
        return self.read(start, stop).dequantize()

    @cached_property
    def has_zero_points(self) -> bool:
        """Whether a zero point other than 8 occurs."""
        if self.form.method == "compressed-tensors":
            return self._row_zeros(0, self.info.shape[0]) is not None
        return self._zeros(0, None) is not None

    def _values(self, start: int, stop: int) -> Bytes:
        """uint8 [rows, K / 2]"""
        words = self._words("qweight", slice(None))
        if self.form.method == "gptq":  # a word is eight columns of a row: four bytes in the store's own order
            return np.ascontiguousarray(words[:, start:stop].T).view(np.uint8)
        return pack_int4(np.ascontiguousarray(_awq_columns(words)[:, start:stop].T))

    def _zeros(self, start: int, stop: int | None) -> Bytes | None:
        """uint8 [rows, groups], None when all are 8"""
        words = self._words("qzeros", slice(None))
        columns = _nibbles(words) if self.form.method == "gptq" else _awq_columns(words)
        zeros = (columns[:, start:stop] + np.uint8(self.form.zero_offset)) & np.uint8(15)
        return None if np.all(zeros == SYMMETRIC) else np.ascontiguousarray(zeros.T)

    def _row_zeros(self, start: int, stop: int) -> Bytes | None:
        """The same of compressed-tensors, whose zero points are packed along the rows."""
        if "weight_zero_point" not in self._parts:
            return None
        first = start // 8
        words = self._words("weight_zero_point", slice(first, -(-stop // 8)))  # [rows / 8, groups]
        zeros = _nibbles(words.T)[:, start - 8 * first : stop - 8 * first]
        return None if np.all(zeros == SYMMETRIC) else np.ascontiguousarray(zeros.T)

    def _words(self, part: str, rows: slice) -> Array:
        stored = self._parts[part]
        return stored.file.read_slice(stored.name, rows)

    def _scales(self, part: str, start: int, stop: int | None) -> Floats:
        stored = self._parts[part]
        with np.errstate(over="ignore"):
            scales = stored.file.read_slice(stored.name, slice(start, stop)).astype(np.float32)
        if not np.isfinite(scales).all():
            raise CheckpointError(
                f"{stored.name} in {stored.file.path} holds NaN or infinite scales; download it again."
            )
        return scales

    def _check_order(self) -> None:
        if (stored := self._parts.get("g_idx")) is None:
            return
        order = stored.file.read(stored.name)
        if not np.array_equal(order, np.arange(len(order)) // self.form.group_size):
            raise CheckpointError(
                f"{stored.name} in {stored.file.path} is not in ascending order (desc_act), which no engine of clover "
                f"can follow; {INSTEAD} or one quantised without desc_act."
            )

    def _check_shape(self) -> None:
        if (stored := self._parts.get("weight_shape")) is None:
            return
        shape = tuple(int(n) for n in stored.file.read(stored.name))
        if shape != self.info.shape:
            raise CheckpointError(
                f"{stored.name} in {stored.file.path} says {list(shape)}, but the packed weights are "
                f"{list(self.info.shape)}; download it again."
            )


def _nibbles(words: Array) -> Bytes:
    """int32 [A, B] -> uint8 [A, 8 B], lowest four bits first"""
    return unpack_int4(np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1))


def _awq_columns(words: Array) -> Bytes:
    """int32 [A, B] -> uint8 [A, 8 B] in the order of the columns"""
    nibbles = _nibbles(words).reshape(len(words), -1, 8)
    return nibbles[:, :, np.argsort(AWQ_ORDER)].reshape(len(words), -1)


def collect(form: SourceFormat, stored: Mapping[str, Stored]) -> tuple[dict[str, PackedMatrix], set[str], list[str]]:
    """(matrices by the name that the BF16 checkpoint has for them, names of their parts, problems)."""
    parts: dict[str, dict[str, Stored]] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part in PARTS[form.method]:
            parts.setdefault(module, {})[part] = tensor
    matrices, problems = {}, []
    for module, found in parts.items():
        optional = tuple(p for p in OPTIONAL_PARTS if not (form.asymmetric and p == "weight_zero_point"))
        absent = [p for p in PARTS[form.method] if p not in found and p not in optional]
        two_axes = all(len(t.info.shape) == 2 for p, t in found.items() if p not in VECTORS)
        if absent:
            problems.append(f"{module} has {', '.join(sorted(found))} but no {', '.join(absent)}")
        elif not two_axes:
            problems.append(
                f"{module} is not stored as matrices, and other INT4 layouts of experts are not implemented"
            )
        else:
            matrix = PackedMatrix(f"{module}.weight", form, found)
            matrices[matrix.name] = matrix
            problems += matrix.problems()
    taken = {f"{module}.{part}" for module, found in parts.items() for part in found}
    return matrices, taken, problems
