"""A Clover checkpoint: its tensors under one set of names, whatever their prefix, shards and expert layout.

Canonical names are the fused ones with the prefix `model.` (`model.layers.3.mlp.experts.gate_up_proj`). Matrices that
are stored in INT4 (prequantized.py) go by the names of the BF16 checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.exporter.config import ModelConfig, read_json
from clover.exporter.model_tensors import EMBEDDING, HEAD, Shape, canonical, expected_tensors, mismatches
from clover.exporter.prequantized import PackedMatrix, PackedRows, SourceFormat, collect, read_format
from clover.exporter.shards import listed, open_shards
from clover.exporter.stored_tensor import (
    CHUNK_BYTES,
    Floats,
    Rows,
    StoredTensor,
    read_float,
    read_rows,
    stack_rows,
    to_float,
)
from clover.runtime.errors import CheckpointError

__all__ = ["Checkpoint", "Rows", "expected_tensors", "to_float"]

SAMPLE_BYTES = 2048


class Checkpoint:
    """A checkpoint directory whose tensors have been checked, by header, against `config`. Reads are lazy."""

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        files: Mapping[str, StoredTensor],
        packed: Mapping[str, PackedMatrix],
        form: SourceFormat | None,
    ) -> None:
        self.directory = directory
        self.config = config
        self.form = form  # of INT4 matrices
        self._files = files  # every tensor of the files by its prefix-free name
        self._stored: Mapping[str, StoredTensor | PackedMatrix] = {
            **files,
            **packed,
        }  # experts in the layout of the files
        self._expected = expected_tensors(config)

    @classmethod
    def open(cls, directory: str | Path, config: ModelConfig | None = None) -> Checkpoint:
        """Opens the headers of a sharded or single-file checkpoint (`config` is read from it when not given).

        Raises CheckpointError listing the missing, extra, misshapen and wrongly typed tensors together.
        """
        directory = Path(directory)
        config = config or ModelConfig.load(directory)
        files = open_shards(directory)
        stored, problems = canonical(files)
        packed: dict[str, PackedMatrix] = {}
        rest: dict[str, StoredTensor | PackedMatrix] = dict(stored)
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
        problems += mismatches(config, rest)
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
            return read_float(self._stored[name]).reshape(shape)
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
        found = read_rows(self._stored[name], start, stop)
        return found if isinstance(found, PackedRows) else found.reshape(-1, *self._expected[name][1:])

    def expert_gate_up(self, layer: int, expert: int) -> Rows:
        """`read_expert_gate_up` without widening."""
        self._check_expert(expert)
        base = f"model.layers.{layer}.mlp.experts."
        fused = self._stored.get(base + "gate_up_proj")
        if isinstance(fused, StoredTensor):
            return read_rows(fused, expert)
        return stack_rows([read_rows(self._stored[f"{base}{expert}.{part}_proj.weight"]) for part in ("gate", "up")])

    def expert_down(self, layer: int, expert: int) -> Rows:
        """`read_expert_down` without widening."""
        self._check_expert(expert)
        base = f"model.layers.{layer}.mlp.experts."
        fused = self._stored.get(base + "down_proj")
        if isinstance(fused, StoredTensor):
            return read_rows(fused, expert)
        return read_rows(self._stored[f"{base}{expert}.down_proj.weight"])

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

    def _parts(self, name: str) -> Sequence[StoredTensor | PackedMatrix]:
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
            if not np.array_equal(read_float(head, start, start + rows), read_float(embedding, start, start + rows)):
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
