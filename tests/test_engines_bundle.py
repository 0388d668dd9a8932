"""Bundles that are damaged, incomplete or of another kind are refused in a sentence that names the file."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_support import NANO, bundle

from clover import Clover
from clover.engines.bundle import Bundle
from clover.engines.manifest import MANIFEST, Manifest, read_manifest
from clover.engines.open import open_session
from clover.runtime.errors import BundleError, RequestError


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    target = tmp_path / "bundle"
    shutil.copytree(bundle(NANO, precision="int4").directory, target)
    return target


def files() -> list[str]:
    directory = bundle(NANO, precision="int4").directory
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())


def spoiled(directory: Path) -> Iterator[str]:
    """Spoils a file in every way, one at a time; yields what was done."""
    for name in files():
        path = directory / name
        good = path.read_bytes()
        for place in (0, len(good) // 2, len(good) - 2):
            bad = bytearray(good)
            bad[place] ^= 1
            path.write_bytes(bad)
            yield f"{name}: bit flipped at {place}"
        path.write_bytes(good[:-2])  # JSON may lose its last newline
        yield f"{name}: cut short"
        path.write_bytes(good + b"\0")
        yield f"{name}: a byte more"
        path.write_bytes(b"")
        yield f"{name}: empty"
        path.unlink()
        yield f"{name}: missing"
        path.mkdir()
        yield f"{name}: a directory"
        path.rmdir()
        path.write_bytes(good)


def test_any_change_to_any_file_is_found(copy: Path) -> None:
    assert {"clover.json", "graphs/step.onnx", "tokenizer/tokenizer.json", "weights/dense.safetensors"} <= set(files())
    count = 0
    for what in spoiled(copy):
        with pytest.raises(BundleError) as error:
            Clover.load(copy)
        message = str(error.value)
        assert what.split(":")[0] in message or "clover.json" in message, what
        assert "\n" not in message and message.endswith(".") and len(message) < 400, message
        count += 1
    assert count == 8 * len(files())
    Bundle.open(copy)  # whole again


def test_a_file_that_the_manifest_does_not_list_is_not_read(copy: Path) -> None:
    """Nothing unverified gets in: a template laid into the bundle afterwards is refused, not used."""
    (copy / "tokenizer" / "tokenizer_config.json").write_text('{"chat_template": "{{ 1 }}"}')
    with pytest.raises(BundleError, match=r"tokenizer_config\.json"):
        Clover.load(copy)


def test_a_newer_format_says_to_update(copy: Path) -> None:
    body = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({**body, "version": 99, "something": "new"}))
    with pytest.raises(BundleError, match=r"format version 99, and this clover reads up to \d+; update clover"):
        Clover.load(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "12", '"x"', "[" * 100_000, "\x00", '{"version": "2"}', "{}"])
def test_nonsense_for_a_manifest(copy: Path, text: str) -> None:
    (copy / MANIFEST).write_text(text)
    with pytest.raises(BundleError, match=r"clover\.json"):
        read_manifest(copy)


def test_a_manifest_with_a_right_hash_and_wrong_fields(copy: Path) -> None:
    """Written by a program with a mistake: the field is named."""
    good = Bundle.open(copy).manifest
    for field, value in (("block_sizes", "many"), ("graph", {}), ("files", {"a": 1}), ("mask_token_id", None)):
        broken = Manifest.model_construct(**{**good.__dict__, field: value})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (copy / MANIFEST).write_text(broken.dump())
        with pytest.raises(BundleError, match=f"field {field}"):
            read_manifest(copy)


def test_a_manifest_is_what_it_was(copy: Path) -> None:
    manifest = Bundle.open(copy).manifest
    assert Manifest.model_validate(json.loads(manifest.model_dump_json())) == manifest
    assert manifest.config.mask_token_id == 3 and manifest.precision_plan["experts"] == "int4"
    assert (manifest.eos_token_ids, manifest.block_sizes) == ((2, 0), (8, 16, 32, 64))


def test_what_is_no_bundle_is_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for path, words in (
        (tmp_path / "absent", "is not a directory"),
        (tmp_path / "file", "is not a directory"),
        (tmp_path / "empty", "holds no clover.json"),
        (NANO, "looks like a checkpoint: run `clover build`"),
    ):
        with pytest.raises(BundleError, match=words):
            Clover.load(path)


def test_unverified_bundles_still_have_their_sizes_checked(copy: Path) -> None:
    path = copy / "weights" / "experts.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    Bundle.open(copy, verify=False)
    path.write_bytes(data[:-1])
    with pytest.raises(BundleError, match=r"experts\.safetensors has"):
        Bundle.open(copy, verify=False)


def test_a_bundle_can_be_moved_and_read_where_nothing_can_be_written(copy: Path, tmp_path: Path) -> None:
    with Clover.load(copy, cache=False, max_context=64) as engine:
        want = engine.generate("a", max_new_tokens=4).tokens
    moved = tmp_path / "elsewhere"
    copy.rename(moved)
    for path in [*moved.rglob("*"), moved]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with Clover.load(moved, cache=False, max_context=64) as engine:
            assert engine.generate("a", max_new_tokens=4).tokens == want
    finally:
        for path in [moved, *moved.rglob("*")]:
            path.chmod(0o755)


@pytest.mark.parametrize("threads", [0, -3, 100_000, 1.5, "two"])
def test_a_senseless_number_of_threads_is_refused(threads: Any) -> None:
    with pytest.raises(RequestError, match="threads is") as refused:
        open_session(bundle(NANO, precision="int4"), threads=threads)
    assert refused.value.field == "threads"


@pytest.mark.parametrize("context", [0, -1, 4097, 1.5])
def test_a_context_the_model_cannot_hold_is_refused(context: Any) -> None:
    with pytest.raises(RequestError, match="1 to 4096") as refused:
        open_session(bundle(NANO, precision="int4"), max_context=context)
    assert refused.value.field == "max_context"
