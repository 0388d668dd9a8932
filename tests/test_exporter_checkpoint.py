from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_support import load_oracle, tiny_checkpoint
from safetensors.numpy import load_file, save_file

from clover.exporter import stored_tensor as module
from clover.exporter.checkpoint import Checkpoint, expected_tensors
from clover.exporter.config import ModelConfig
from clover.exporter.safetensors_file import SafetensorsFile
from clover.exporter.shards import INDEX
from clover.runtime.errors import CheckpointError

EXPERTS = "model.layers.1.mlp.experts."
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[..., Path]:
    """A private copy of the tiny checkpoint, its tensors in one file after `change(tensors)`."""

    def make(change: Callable[[dict[str, Any]], object] = lambda _: None, **config: Any) -> Path:
        source, target = tiny_checkpoint(), tmp_path / "checkpoint"
        tensors: dict[str, Any] = {}
        for file in sorted(source.glob("*.safetensors")):
            tensors |= load_file(file)
        change(tensors)
        target.mkdir()
        save_file(tensors, target / "model.safetensors")
        fields = json.loads((source / "config.json").read_text()) | config
        (target / "config.json").write_text(json.dumps(fields))
        return target

    return make


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint(), tmp_path / "sharded"))


def edit_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("layout", ["fused", "per_expert"])
@pytest.mark.parametrize("prefix", ["model", "language_model"])
def test_every_layout_reads_alike(layout: Any, prefix: Any) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(layout=layout, prefix=prefix))
    truth = load_oracle(tiny_checkpoint()).t
    assert set(checkpoint.names()) == set(truth) == set(checkpoint.tensors())
    for name, array in checkpoint.tensors(np.float64).items():
        assert array.dtype == np.float64
        np.testing.assert_array_equal(array, truth[name])
        assert checkpoint.shape(name) == array.shape
        assert checkpoint.dtype(name) == "F32"
    for expert in (0, 15):
        np.testing.assert_array_equal(
            checkpoint.read_expert_gate_up(1, expert), truth[EXPERTS + "gate_up_proj"][expert]
        )
        np.testing.assert_array_equal(checkpoint.read_expert_down(1, expert), truth[EXPERTS + "down_proj"][expert])
    with pytest.raises(IndexError):
        checkpoint.read_expert_down(1, 16)
    rows = checkpoint.read_rows("lm_head.weight", 300, 400)
    np.testing.assert_array_equal(rows, truth["lm_head.weight"][300:])


def test_half_precision_is_widened_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)  # the way of large tensors
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        directory = tiny_checkpoint(dtype=dtype)
        truth = load_oracle(directory).t
        checkpoint = Checkpoint.open(directory)
        for name in ("model.embed_tokens.weight", EXPERTS + "down_proj", "model.layers.0.linear_attn.A_log"):
            array = checkpoint.read(name)
            assert array.dtype == np.float32
            np.testing.assert_array_equal(array, truth[name].astype(np.float32))
        rows = checkpoint.read_rows("lm_head.weight", 200, 310)
        np.testing.assert_array_equal(rows, truth["lm_head.weight"][200:310].astype(np.float32))


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=64))
def test_bfloat16_bits(bits: list[int]) -> None:
    values = np.array(bits, np.uint16).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(module._widen(values), values.astype(np.float32))


def test_full_size_shapes() -> None:
    from test_exporter_config_reader import FULL, write

    directory = write(Path(tiny_checkpoint()).parent / "full-size", FULL)
    shapes = expected_tensors(ModelConfig.load(directory))
    layer = "model.layers.0.linear_attn."
    assert shapes[layer + "in_proj_qkv.weight"] == (8192, 2048)
    assert shapes[layer + "conv_right_weight"] == (8192, 3)
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (8192, 2048)
    assert shapes["model.layers.39.mlp.experts.gate_up_proj"] == (256, 1024, 2048)
    assert sum(int(np.prod(s)) for s in shapes.values()) == pytest.approx(34.66e9, rel=1e-3)


def test_right_convolution_may_have_a_middle_axis_and_other_parts_are_passed_over(
    damaged: Callable[..., Path],
) -> None:
    name = "model.layers.0.linear_attn.conv_right_weight"
    found: dict[str, npt.NDArray[Any]] = {}

    def change(t: dict[str, Any]) -> None:
        found[name] = t[name]
        t[name] = t[name][:, None, :]
        t["mtp.layers.0.fc"] = t["visual.patch"] = t["model.visual.patch"] = np.zeros(2, np.float32)

    checkpoint = Checkpoint.open(damaged(change))
    np.testing.assert_array_equal(checkpoint.read(name), found[name])
    assert checkpoint.shape(name) == found[name].shape


def test_tied_head(damaged: Callable[..., Path], tmp_path: Path) -> None:
    directory = damaged(lambda t: t.pop("lm_head.weight"), tie_word_embeddings=True)
    checkpoint = Checkpoint.open(directory)
    assert "lm_head.weight" not in checkpoint.names()
    embedding = checkpoint.read("model.embed_tokens.weight")
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight"), embedding)
    np.testing.assert_array_equal(checkpoint.tensors()["lm_head.weight"], embedding)
    np.testing.assert_array_equal(checkpoint.read_rows("lm_head.weight", 3, 5), embedding[3:5])


def test_tied_head_that_is_stored_must_be_the_embedding(damaged: Callable[..., Path]) -> None:
    directory = damaged(
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}), tie_word_embeddings=True
    )
    Checkpoint.open(directory)
    shutil.rmtree(directory)
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        Checkpoint.open(damaged(tie_word_embeddings=True))


def pop(*names: str) -> Callable[[dict[str, Any]], object]:
    return lambda t: [t.pop(n) for n in names]


def put(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda t: t.update({name: value(t[name]) if callable(value) else value})


@pytest.mark.parametrize(
    ("change", "config", "says"),
    [
        (pop("model.norm.weight"), {}, [r"model.norm.weight \[64\] is missing"]),
        (pop("lm_head.weight"), {}, ["lm_head.weight .* is missing", "tie_word_embeddings would have to be true"]),
        (put("model.layers.0.linear_attn.bias", np.zeros(3)), {}, [r"linear_attn.bias \[3\] is not a tensor of this"]),
        (put("model.norm.weight", lambda t: t[:-1]), {}, [r"model.norm.weight has shape \[63\], not \[64\]"]),
        (
            put("model.norm.weight", lambda t: t.astype(np.int8)),
            {},
            ["model.norm.weight has dtype I8, not one of BF16"],
        ),
        (put("model.language_model.norm.weight", np.zeros(64)), {}, ["model.norm.weight is stored twice"]),
        (
            lambda t: [t.pop("model.norm.weight"), t.pop("lm_head.weight"), t.update(extra=np.zeros(1))],
            {"moe_intermediate_size": 16},
            ["model.norm.weight", "lm_head.weight", "extra", "mlp.experts.down_proj has shape"],
        ),
        (
            put(EXPERTS + "3.up_proj.weight", np.zeros((32, 64))),
            {},
            [r"describes: \S*experts.3.up_proj.weight .* is not a tensor of this model.$"],
        ),
        (
            lambda t: None,
            {"num_hidden_layers": 2, "layer_types": None},
            ["model.layers.2.* is not a tensor.*; and 17 more"],
        ),
    ],
)
def test_tensors_that_do_not_fit_are_listed(
    damaged: Callable[..., Path], change: Callable[[dict[str, Any]], object], config: dict[str, Any], says: list[str]
) -> None:
    directory = damaged(change, **config)
    for part in says:
        with pytest.raises(CheckpointError, match=part):
            Checkpoint.open(directory)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_a_number_is_named_when_read(damaged: Callable[..., Path], bad: float) -> None:
    def change(t: dict[str, Any]) -> None:
        t[EXPERTS + "down_proj"] = t[EXPERTS + "down_proj"].copy()
        t[EXPERTS + "down_proj"][5, 3, 3] = bad

    checkpoint = Checkpoint.open(damaged(change))
    checkpoint.read_expert_down(1, 4)
    reads: list[Callable[[], object]] = [
        lambda: checkpoint.read_expert_down(1, 5),
        lambda: checkpoint.read(EXPERTS + "down_proj"),
    ]
    for read in reads:
        with pytest.raises(CheckpointError, match=r"experts.down_proj in .*model.safetensors holds NaN"):
            read()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: (d / FIRST).unlink(), rf"1 of 2 shards .* \(still downloading\?\): {FIRST}"),
        (lambda d: (d / INDEX).unlink(), rf"has neither model.safetensors nor {INDEX} \(only {FIRST}"),
        (lambda d: [f.unlink() for f in d.glob("model*")], "no .safetensors file at all"),
        (lambda d: (d / INDEX).write_text("{}"), "has no weight_map"),
        (lambda d: (d / INDEX).write_text("{"), "is not valid JSON"),
        (lambda d: edit_index(d, lambda m: m.update(x="../x.safetensors")), "names the shard '../x.safetensors'"),
        (lambda d: edit_index(d, lambda m: m.update({"lm_head.weight": "model-00002-of-00002.safetensors"})),
         rf"lm_head.weight should be in model-00002-of-00002.safetensors but is in {FIRST}"),
        (lambda d: edit_index(d, lambda m: m.update(gone=FIRST)), f"gone should be in {FIRST} but is in none"),
        (lambda d: edit_index(d, lambda m: m.pop("lm_head.weight")), f"lm_head.weight is in {FIRST} but not in the index"),
        (lambda d: shutil.copy(d / FIRST, d / "model.safetensors"), "two checkpoints; remove one"),
        (lambda d: (d / FIRST).write_bytes((d / FIRST).read_bytes()[:-10]), f"{FIRST} .* is cut short"),
        (lambda d: (d / FIRST).write_bytes(b""), f"{FIRST} .0 bytes. is cut short"),
        (lambda d: (d / FIRST).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "is a Git LFS pointer"),
    ],
)  # fmt: skip
def test_incomplete_directories(sharded: Path, change: Callable[[Path], object], says: str) -> None:
    change(sharded)
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open(sharded)


def test_fingerprint_follows_the_weights_and_not_the_place(sharded: Path, tmp_path: Path) -> None:
    original = Checkpoint.open(tiny_checkpoint()).fingerprint()
    assert Checkpoint.open(sharded).fingerprint() == original
    file = SafetensorsFile(sharded / FIRST)
    end = file.tensors["lm_head.weight"]
    with (sharded / FIRST).open("r+b") as stream:
        stream.seek(end.offset + end.nbytes - 1)
        last = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([last ^ 1]))
    assert Checkpoint.open(sharded).fingerprint() != original


# -- single files ----------------------------------------------------------------------------------


def raw(header: Any, data: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": [begin, end]}


GOOD = raw({"a": entry(0, 8)})


@pytest.mark.parametrize(
    "content",
    [
        b"", b"1234567", b"<html>not found</html>" * 9, GOOD[:-1], GOOD + b"1",
        struct.pack("<Q", 2**40) + GOOD[8:], struct.pack("<Q", len(GOOD)) + GOOD[8:],
        raw({"a": entry(0, 8), "b": entry(4, 12)}, 12), raw({"a": entry(0, 8), "b": entry(12, 20)}, 20),
        raw({"a": entry(0, 8, [3])}), raw({"a": entry(0, 8, [-2])}), raw({"a": entry(0, 8, [2**62, 2**62])}),
        raw({"a": entry(0, 8, dtype="F33")}), raw(b"{a"), raw([1]), raw(b'{"\xff": 1}'),
        raw(b"{" + b" " * 100_000_001 + b"}"),
        raw(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    ],
    ids=["empty", "seven", "html", "cut", "longer", "lying", "lying-a-little", "overlap", "hole", "size", "negative",
         "overflow", "dtype", "json", "list", "utf8", "100MB", "twice"],
)  # fmt: skip
def test_broken_files_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors .*; download it again"):
        SafetensorsFile(path)


def test_slices_empty_tensors_and_scalars(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    array = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    save_file({"a": array, "none": array[:, :0], "one": array[0, 0, 0:1].reshape(())}, path)
    file = SafetensorsFile(path)
    np.testing.assert_array_equal(file.read_slice("a", -1), array[-1])
    np.testing.assert_array_equal(file.read_slice("a", slice(1, 99)), array[1:])
    np.testing.assert_array_equal(file.read_slice("a", slice(3, 1)), array[3:1])
    assert file.read("none").shape == (4, 0, 3)
    assert file.read_slice("none", 2).shape == (0, 3)
    assert file.read("one").shape == ()
    for index in (4, -5, slice(0, 4, 2)):
        with pytest.raises(IndexError):
            file.read_slice("a", index)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="became shorter"):
        file.read("a")


def test_eight_bit_floats_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw({"w": entry(0, 8, [8], "F8_E4M3")}))
    with pytest.raises(CheckpointError, match=r"w in .* is stored as F8_E4M3"):
        SafetensorsFile(path).read("w")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=4))
def test_random_damage_is_an_error_or_harmless(tmp_path_factory: pytest.TempPathFactory, at: int, junk: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "damage.safetensors"
    path.write_bytes((GOOD[:at] + junk + GOOD[at + len(junk) :])[: len(GOOD)])
    try:
        file = SafetensorsFile(path)
        for name in file.tensors:
            file.read(name)
    except CheckpointError:
        pass
