"""A Clover checkpoint: its tensors under one set of names, whatever their prefix, shards and expert layout.

Canonical names are the fused ones with the prefix `model.` (`model.layers.3.mlp.experts.gate_up_proj`). Matrices that
are stored in INT4 (prequantized.py) go by the names of the BF16 checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.exporter.config import ModelConfig, read_json
from clover.exporter.prequantized import (
    INSTEAD,
    PACKED,
    PackedMatrix,
    PackedRows,
    SourceFormat,
    collect,
    concatenate,
    read_format,
)  # fmt: skip
from clover.exporter.safetensors_file import FLOAT_DTYPES, SafetensorsFile, TensorInfo
from clover.exporter.shards import listed, open_shards
from clover.runtime.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
IGNORED_PREFIXES = ("mtp.", "visual.", "model.mtp.", "model.visual.")
CHUNK_BYTES = 16 * 2**20  # converted at a time, so that only one float32 copy of a tensor exists
CHECKED = 2**18  # numbers checked at a time, so that the temporary fits the cache
SAMPLE_BYTES = 2048

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[Any] | PackedRows  # float32, bfloat16 as it is stored, or INT4 as it is stored
Shape = tuple[int, ...]


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Canonical name → shape of every tensor of the model; without `lm_head.weight` when the head is tied."""
    c = config
    hidden, heads, kv_heads = c.hidden_size, c.num_attention_heads, c.num_key_value_heads
    gdn: dict[str, Shape] = {
        "in_proj_qkv.weight": (c.conv_channels, hidden),
        "in_proj_z.weight": (c.value_width, hidden),
        "in_proj_b.weight": (c.linear_num_value_heads, hidden),
        "in_proj_a.weight": (c.linear_num_value_heads, hidden),
        "conv1d.weight": (c.conv_channels, 1, c.linear_conv_kernel_dim),
        "conv_right_weight": (c.conv_channels, c.conv_history),
        "A_log": (c.linear_num_value_heads,),
        "dt_bias": (c.linear_num_value_heads,),
        "bd_softmax_logit_scale": (c.linear_num_value_heads,),
        "bd_softmax_history_bias": (c.linear_num_value_heads,),
        "bd_softmax_history_c": (c.linear_num_value_heads,),
        "norm.weight": (c.linear_value_head_dim,),
        "out_proj.weight": (hidden, c.value_width),
    }
    attention: dict[str, Shape] = {
        "q_proj.weight": (2 * heads * c.head_dim, hidden),  # per head: query, then output gate
        "k_proj.weight": (kv_heads * c.head_dim, hidden),
        "v_proj.weight": (kv_heads * c.head_dim, hidden),
        "o_proj.weight": (hidden, heads * c.head_dim),
        "q_norm.weight": (c.head_dim,),
        "k_norm.weight": (c.head_dim,),
    }
    mlp: dict[str, Shape] = {
        "gate.weight": (c.num_experts, hidden),
        "experts.gate_up_proj": (c.num_experts, 2 * c.moe_intermediate_size, hidden),
        "experts.down_proj": (c.num_experts, hidden, c.moe_intermediate_size),
        "shared_expert.gate_proj.weight": (c.shared_expert_intermediate_size, hidden),
        "shared_expert.up_proj.weight": (c.shared_expert_intermediate_size, hidden),
        "shared_expert.down_proj.weight": (hidden, c.shared_expert_intermediate_size),
        "shared_expert_gate.weight": (1, hidden),
    }
    out: dict[str, Shape] = {EMBEDDING: (c.vocab_size, hidden)}
    for i, kind in enumerate(c.layer_types):
        layer = f"model.layers.{i}."
        room, mixer = ("linear_attn.", gdn) if kind == "linear_attention" else ("self_attn.", attention)
        out[layer + "input_layernorm.weight"] = (hidden,)
        out |= {f"{layer}{room}{name}": shape for name, shape in mixer.items()}
        out[layer + "post_attention_layernorm.weight"] = (hidden,)
        out |= {f"{layer}mlp.{name}": shape for name, shape in mlp.items()}
    out["model.norm.weight"] = (hidden,)
    if not c.tie_word_embeddings:
        out[HEAD] = (c.vocab_size, hidden)
    return out


@dataclass(frozen=True)
class _Stored:
    """One tensor as it lies in a file, under that file's name for it."""

    file: SafetensorsFile
    name: str

    @property
    def info(self) -> TensorInfo:
        return self.file.tensors[self.name]

    @property
    def nbytes(self) -> int:
        return self.info.nbytes


class Checkpoint:
    """A checkpoint directory whose tensors have been checked, by header, against `config`. Reads are lazy."""

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        files: Mapping[str, _Stored],
        packed: Mapping[str, PackedMatrix],
        form: SourceFormat | None,
    ) -> None:
        self.directory = directory
        self.config = config
        self.form = form  # of INT4 matrices
        self._files = files  # every tensor of the files by its prefix-free name
        self._stored: Mapping[str, _Stored | PackedMatrix] = {**files, **packed}  # experts in the layout of the files
        self._expected = expected_tensors(config)

    @classmethod
    def open(cls, directory: str | Path, config: ModelConfig | None = None) -> Checkpoint:
        """Opens the headers of a sharded or single-file checkpoint (`config` is read from it when not given).

        Raises CheckpointError listing the missing, extra, misshapen and wrongly typed tensors together.
        """
        directory = Path(directory)
        config = config or ModelConfig.load(directory)
        files = open_shards(directory)
        stored, problems = _canonical(files)
        packed: dict[str, PackedMatrix] = {}
        rest: dict[str, _Stored | PackedMatrix] = dict(stored)
        form = _source_format(directory)
        if form:
            packed, taken, faults = collect(form, stored)
            problems += faults
            problems += [f"{name} is stored both in INT4 and as it is" for name in packed if name in stored]
            rest = {name: tensor for name, tensor in stored.items() if name not in taken} | packed
        elif odd := next((name for name in stored if name.endswith((".qweight", ".weight_packed"))), None):
            raise CheckpointError(
                f"{directory} holds INT4 weights ({odd}), but its config.json has no quantization_config that says how "
                "they are stored; download config.json again."
            )
        problems += _mismatches(config, rest)
        if problems:
            raise listed(f"The tensors of {directory} do not make the model that its config.json describes", problems)
        checkpoint = cls(directory, config, stored, packed, form)
        if config.tie_word_embeddings and HEAD in rest:
            checkpoint._check_tied_head()
        return checkpoint

    def names(self) -> tuple[str, ...]:
        """Canonical names, `lm_head.weight` only when it is a tensor of its own."""
        return tuple(self._expected)

    def shape(self, name: str) -> Shape:
        """Shape of a canonical tensor (`lm_head.weight` may be asked for when tied, too)."""
        return self._expected[self._resolve(name)]

    def dtype(self, name: str) -> str:
        """Stored dtype in safetensors' words ("BF16", "F32", ...) or "INT4"; of the first expert where they lie apart."""
        parts = self._parts(self._resolve(name))
        return parts[0].info.dtype

    def nbytes(self, name: str) -> int:
        """Bytes that a canonical tensor takes in the files, scales and zero points of INT4 included."""
        return sum(part.nbytes for part in self._parts(self._resolve(name)))

    def read(self, name: str) -> Floats:
        """The tensor as float32, in its canonical shape. CheckpointError on NaN or infinite values."""
        name = self._resolve(name)
        shape = self._expected[name]
        if name in self._stored:
            return _read_float(self._stored[name]).reshape(shape)
        layer = int(name.split(".")[2])
        read = self.read_expert_gate_up if name.endswith("gate_up_proj") else self.read_expert_down
        out = np.empty(shape, np.float32)
        for expert in range(shape[0]):
            out[expert] = read(layer, expert)
        return out

    def read_rows(self, name: str, start: int, stop: int) -> Floats:
        """Rows `start:stop` of a canonical tensor that is not an expert's, as float32 (for the embedding and head)."""
        return to_float(self.rows(name, start, stop))

    def read_expert_gate_up(self, layer: int, expert: int) -> Floats:
        """One expert's fused projection, float32 [2 * intermediate, hidden], gate rows first."""
        return to_float(self.expert_gate_up(layer, expert))

    def read_expert_down(self, layer: int, expert: int) -> Floats:
        """One expert's down projection, float32 [hidden, intermediate]."""
        return to_float(self.expert_down(layer, expert))

    def rows(self, name: str, start: int, stop: int) -> Rows:
        """`read_rows` without widening: what is stored in bfloat16 or INT4 stays so."""
        name = self._resolve(name)
        found = _read_rows(self._stored[name], start, stop)
        return found if isinstance(found, PackedRows) else found.reshape(-1, *self._expected[name][1:])

    def expert_gate_up(self, layer: int, expert: int) -> Rows:
        """`read_expert_gate_up` without widening."""
        self._check_expert(expert)
        base = f"model.layers.{layer}.mlp.experts."
        fused = self._stored.get(base + "gate_up_proj")
        if isinstance(fused, _Stored):
            return _read_rows(fused, expert)
        return stack_rows([_read_rows(self._stored[f"{base}{expert}.{part}_proj.weight"]) for part in ("gate", "up")])

    def expert_down(self, layer: int, expert: int) -> Rows:
        """`read_expert_down` without widening."""
        self._check_expert(expert)
        base = f"model.layers.{layer}.mlp.experts."
        fused = self._stored.get(base + "down_proj")
        if isinstance(fused, _Stored):
            return _read_rows(fused, expert)
        return _read_rows(self._stored[f"{base}{expert}.down_proj.weight"])

    def has_zero_points(self, name: str) -> bool:
        """Whether a canonical tensor is stored in INT4 with a zero point that is not 8. Reads all of its zero points."""
        parts = self._parts(self._resolve(name))
        return any(isinstance(part, PackedMatrix) and part.has_zero_points for part in parts)

    def tensors(self, dtype: npt.DTypeLike = np.float32) -> Mapping[str, npt.NDArray[Any]]:
        """Every canonical tensor, `lm_head.weight` included even when tied; each is read anew on access."""
        return _LazyTensors(self, np.dtype(dtype))

    def fingerprint(self) -> str:
        """A cheap identity (sha256, hex) of the weights: names, shapes, dtypes and both ends of every tensor.

        Small tensors count whole. It tells a re-trained checkpoint from its ancestor without reading 69 GB; it is
        the same for copies in other places.
        """
        digest = hashlib.sha256((self.directory / "config.json").read_bytes())
        for name, stored in sorted(self._files.items()):
            info, sample = stored.info, min(stored.info.nbytes, SAMPLE_BYTES)
            digest.update(json.dumps([name, info.dtype, info.shape, stored.file.path.name, stored.file.size]).encode())
            digest.update(stored.file.read_bytes(info.offset, sample))
            digest.update(stored.file.read_bytes(info.offset + info.nbytes - sample, sample))
        return digest.hexdigest()

    def _resolve(self, name: str) -> str:
        if name == HEAD and self.config.tie_word_embeddings:
            return EMBEDDING
        if name not in self._expected:
            raise KeyError(name)
        return name

    def _parts(self, name: str) -> Sequence[_Stored | PackedMatrix]:
        if name in self._stored:
            return [self._stored[name]]
        base, part = name.rsplit(".", 1)
        parts = ("gate", "up") if part == "gate_up_proj" else ("down",)
        return [self._stored[f"{base}.{e}.{p}_proj.weight"] for e in range(self.config.num_experts) for p in parts]

    def _check_expert(self, expert: int) -> None:
        if not 0 <= expert < self.config.num_experts:
            raise IndexError(f"expert {expert} is out of range for {self.config.num_experts} experts")

    def _check_tied_head(self) -> None:
        """A tied head may be stored as well, but then it must be the embedding."""
        head, embedding = self._stored[HEAD], self._stored[EMBEDDING]
        rows = max(1, CHUNK_BYTES // max(1, 4 * self.config.hidden_size))
        for start in range(0, self.config.vocab_size, rows):
            if not np.array_equal(_read_float(head, start, start + rows), _read_float(embedding, start, start + rows)):
                raise CheckpointError(
                    f"{self.directory}: tie_word_embeddings is true, but {head.name} differs from {embedding.name}; "
                    "set tie_word_embeddings to false in config.json if the head is meant to be its own."
                )


class _LazyTensors(Mapping[str, npt.NDArray[Any]]):
    def __init__(self, checkpoint: Checkpoint, dtype: np.dtype[Any]) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._names = tuple(dict.fromkeys([*checkpoint.names(), HEAD]))

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._checkpoint.read(name).astype(self._dtype, copy=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def to_float(rows: Rows) -> Floats:
    """What was read without widening, as float32."""
    return rows.dequantize() if isinstance(rows, PackedRows) else rows.astype(np.float32, copy=False)


def stack_rows(parts: Sequence[Rows]) -> Rows:
    """Rows under each other; in float32 when they are not stored alike."""
    packed = [part for part in parts if isinstance(part, PackedRows)]
    if len(packed) == len(parts):
        return concatenate(packed)
    same = not packed and len({part.dtype for part in parts if not isinstance(part, PackedRows)}) == 1
    return np.concatenate([part if same else to_float(part) for part in parts])


def _read_rows(stored: _Stored | PackedMatrix, start: int | None = None, stop: int | None = None) -> Rows:
    """The tensor, its item `start`, or its rows `start:stop`; CheckpointError unless all are finite."""
    if isinstance(stored, PackedMatrix):
        return stored.read(start or 0, stop)
    if stored.info.dtype != "BF16" or not stored.info.shape:
        return _read_float(stored, start, stop)
    index: int | slice = start if start is not None and stop is None else slice(start, stop)
    values = stored.file.read_slice(stored.name, index)
    bits = values.view(np.uint16).reshape(-1)
    for piece in range(0, bits.size, CHECKED):
        if (bits[piece : piece + CHECKED] & np.uint16(0x7FFF)).max() >= 0x7F80:
            raise _not_finite(stored)
    return values


def _read_float(stored: _Stored | PackedMatrix, start: int | None = None, stop: int | None = None) -> Floats:
    """The tensor, its item `start`, or its rows `start:stop`, as float32; CheckpointError unless all are finite."""
    if isinstance(stored, PackedMatrix):
        return stored.dequantize(start or 0, stop)
    info = stored.info
    if start is not None and stop is None:
        out = _widen(stored.file.read_slice(stored.name, start))
    elif len(info.shape) < 2 or info.nbytes <= CHUNK_BYTES:
        index = slice(start, stop)
        out = _widen(stored.file.read_slice(stored.name, index) if info.shape else stored.file.read(stored.name))
    else:
        first, last, _ = slice(start, stop).indices(info.shape[0])
        out = np.empty((max(last - first, 0), *info.shape[1:]), np.float32)
        rows = max(1, CHUNK_BYTES * info.shape[0] // info.nbytes)
        for row in range(first, last, rows):
            end = min(row + rows, last)
            out[row - first : end - first] = _widen(stored.file.read_slice(stored.name, slice(row, end)))
    # min and max let NaN through, and need no temporary of the tensor's size
    if out.size and not (np.isfinite(out.min()) and np.isfinite(out.max())):
        raise _not_finite(stored)
    return out


def _not_finite(stored: _Stored) -> CheckpointError:
    return CheckpointError(
        f"{stored.name} in {stored.file.path} holds NaN or values beyond float32's range; the file is damaged or "
        "the training run diverged."
    )


def _widen(values: npt.NDArray[Any]) -> Floats:
    if values.dtype.itemsize == 2 and values.dtype.kind != "f":  # bfloat16 is the upper half of a float32
        return (values.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # reported by the caller, by name
        return values.astype(np.float32, copy=False)


def _canonical(files: Sequence[SafetensorsFile]) -> tuple[dict[str, _Stored], list[str]]:
    """Tensors by prefix-free name, and a problem for each name that occurs twice."""
    stored: dict[str, _Stored] = {}
    problems = []
    for file in files:
        for name in file.tensors:
            short = re.sub(r"^model\.language_model\.", "model.", name)
            if short.startswith(IGNORED_PREFIXES):
                continue
            if short in stored:
                problems.append(f"{short} is stored twice ({stored[short].file.path.name}, {file.path.name})")
            stored[short] = _Stored(file, name)
    return stored, problems


def _source_format(directory: Path) -> SourceFormat | None:
    """How config.json says that INT4 matrices are stored, None when there are none."""
    root = read_json(directory / "config.json")
    text = root.get("text_config")
    places = [root, text] if isinstance(text, dict) else [root]
    given = next((p["quantization_config"] for p in places if p.get("quantization_config") is not None), None)
    try:
        return None if given is None else read_format(given)
    except ValueError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}.") from None


def _mismatches(config: ModelConfig, stored: Mapping[str, _Stored | PackedMatrix]) -> list[str]:
    """One line per tensor that is missing, extra, misshapen or of a dtype we do not read."""
    expected = _in_stored_layout(config, expected_tensors(config), stored)
    problems = [f"{name} {list(shape)} is missing" for name, shape in expected.items() if name not in stored]
    if config.tie_word_embeddings:
        expected[HEAD] = expected[EMBEDDING]  # allowed, checked to be equal
    elif HEAD not in stored:
        problems.append("(without lm_head.weight, tie_word_embeddings would have to be true)")
    for name, tensor in stored.items():
        info, shape = tensor.info, expected.get(name)
        if shape is None:
            problems.append(f"{name} {list(info.shape)} is not a tensor of this model")
            continue
        accepted = [shape]
        if name.endswith(".conv_right_weight"):
            accepted.append((shape[0], 1, shape[1]))
        if info.shape not in accepted:
            problems.append(f"{name} has shape {list(info.shape)}, not {list(shape)}")
        if info.dtype not in (*FLOAT_DTYPES, PACKED):
            instead = f"; {INSTEAD}" if info.dtype.startswith("F") else ""  # FP8 and FP4 releases
            problems.append(f"{name} has dtype {info.dtype}, not one of {', '.join(FLOAT_DTYPES)}{instead}")
    return problems


def _in_stored_layout(
    config: ModelConfig, expected: dict[str, Shape], stored: Mapping[str, _Stored | PackedMatrix]
) -> dict[str, Shape]:
    """`expected` with a layer's fused experts split one by one, for the layers that are stored so."""
    matches = (re.match(r"(model\.layers\.\d+\.mlp\.experts\.)\d+\.", name) for name in stored)
    apart = {match[1] for match in matches if match}
    hidden, width = config.hidden_size, config.moe_intermediate_size
    out: dict[str, Shape] = {}
    for name, shape in expected.items():
        base, part = name[: name.rfind(".") + 1], name[name.rfind(".") + 1 :]
        if base not in apart or name in stored:
            out[name] = shape
            continue
        rows = {"gate": (width, hidden), "up": (width, hidden)} if part == "gate_up_proj" else {"down": (hidden, width)}
        for expert in range(config.num_experts):
            out |= {f"{base}{expert}.{p}_proj.weight": s for p, s in rows.items()}
    return out
