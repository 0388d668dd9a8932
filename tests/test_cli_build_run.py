"""`clover build` and `clover run` on bad inputs: one clear sentence, exit code 2, nothing half-written."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import clover, refused
from engine_support import NANO, bundle
from oracle_support import tiny_checkpoint
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from clover.engines.bundle import Bundle

RUN = CliRunner()
PROMPT = "Parse the dispatch: Send UAV7 to Cedar, priority high."


# -- build: checkpoints ---------------------------------------------------------------------------------------


Damage = Callable[[Path], object]  # spoils a checkpoint's directory


def edit_config(**values: Any) -> Damage:
    def edit(directory: Path) -> None:
        for name in ("config.json", "generation_config.json"):
            path = directory / name
            body = json.loads(path.read_text())
            given = values.get(name.split(".")[0], {})
            path.write_text(json.dumps({k: v for k, v in {**body, **given}.items() if v is not None}))

    return edit


def shard(directory: Path) -> Path:
    return min(directory.glob("*.safetensors"))


def edit_shard(change: Callable[[bytes], bytes]) -> Damage:
    return lambda directory: shard(directory).write_bytes(change(shard(directory).read_bytes()))


def edit_header(change: Callable[[dict[str, Any]], None]) -> Damage:
    def changed(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return edit_shard(changed)


def overlap(header: dict[str, Any]) -> None:
    first, second = [name for name in header if name != "__metadata__"][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]


def edit_tensor(change: Callable[[Any], Any]) -> Damage:
    def edit(directory: Path) -> None:
        tensors = load_file(shard(directory))
        name = next(n for n in sorted(tensors) if tensors[n].ndim == 2)
        tensors[name] = change(tensors[name])
        save_file(tensors, shard(directory))

    return edit


def spoil(value: float) -> Callable[[Any], Any]:
    def spoiled(tensor: Any) -> Any:
        tensor[1, 2] = value
        return tensor

    return spoiled


def huge_header(directory: Path) -> None:
    size = 101 * 2**20
    with shard(directory).open("wb") as file:
        file.write(size.to_bytes(8, "little"))
        file.truncate(8 + size + 100)


def empty(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def no_shards(directory: Path) -> None:
    for path in directory.glob("model*"):
        path.unlink()


def write(name: str, text: str) -> Damage:
    return lambda directory: (directory / name).write_text(text)


BAD_CHECKPOINTS: dict[str, tuple[Damage, str]] = {
    "empty directory": (empty, r"config\.json can't be read .*checkpoint"),
    "config not JSON": (write("config.json", "{"), r"config\.json is not valid JSON"),
    "config a list": (write("config.json", "[1]"), r"config\.json holds a list"),
    "another model": (edit_config(config={"model_type": "llama"}), "model_type"),
    "missing field": (edit_config(config={"hidden_size": None}), "hidden_size"),
    "absurd field": (edit_config(config={"num_experts_per_tok": 99}), "num_experts_per_tok"),
    "no mask token": (edit_config(config={"mask_token_id": None}), "mask"),
    "mask token out of range": (edit_config(config={"mask_token_id": 320}), "mask_token_id"),
    "useless threshold": (edit_config(generation_config={"threshold": 5}), r"generation_config\.json: threshold is 5"),
    "useless limit": (edit_config(generation_config={"max_new_tokens": "many"}), "max_new_tokens"),
    "shard missing": (lambda d: shard(d).unlink(), "1 of 2 shards"),
    "no shards": (no_shards, "neither model.safetensors nor"),
    "shard empty": (edit_shard(lambda data: b""), "cut short"),
    "shard cut in its header": (edit_shard(lambda data: data[:100]), "cut short"),
    "shard cut in its data": (edit_shard(lambda data: data[:-1]), "cut short"),
    "bytes after the data": (edit_shard(lambda data: data + b"\0" * 9), "safetensors"),
    "header longer than the file": (edit_shard(lambda data: (2**40).to_bytes(8, "little") + data[8:]), "safetensors"),
    "header of 2**64 - 1 bytes": (edit_shard(lambda data: b"\xff" * 8 + data[8:]), "safetensors"),
    "header of 101 MB": (huge_header, "safetensors"),
    "header not JSON": (edit_shard(lambda data: data[:8] + b"\xff" + data[9:]), "safetensors"),
    "overlapping offsets": (edit_header(overlap), "safetensors"),
    "Git LFS pointer": (lambda d: shard(d).write_text("version https://git-lfs.github.com/spec/v1\n"), "LFS"),
    "NaN": (edit_tensor(spoil(float("nan"))), "NaN"),
    "infinity": (edit_tensor(spoil(float("inf"))), "NaN or values beyond"),
    "wrong dtype": (edit_tensor(lambda t: t.astype(np.int32)), "dtype I32"),
    "wrong shape": (edit_tensor(lambda t: np.ascontiguousarray(t[:-1])), "has shape"),
    "tokenizer not JSON": (write("tokenizer.json", "{"), r"tokenizer\.json can't be read"),
    "tokenizer of a larger model": (
        lambda d: shutil.copy(NANO / "tokenizer.json", d),
        "they are not of the same model",
    ),
}


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_a_bad_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    damage, words = BAD_CHECKPOINTS[name]
    source = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint(0), source)
    damage(source)
    sentence = refused(clover("build", source, "-o", tmp_path / "bundle"))
    assert re.search(words, sentence), sentence
    assert len(sentence) < 1500
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"], "something half-written stays behind"


def test_a_bad_chat_template_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    shutil.copytree(NANO, source, ignore=shutil.ignore_patterns("*.py", ".*", "__*"))
    (source / "chat_template.jinja").write_text("{% for %}")
    assert "chat template" in refused(clover("build", source, "-o", tmp_path / "bundle"))
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


# -- build: options -------------------------------------------------------------------------------------------

BAD_BUILDS: dict[str, tuple[list[str], str]] = {
    "two precisions": (["--int4", "--bf16"], "exclude each other"),
    "precision and --int4": (["--precision", "fp32", "--int4"], "exclude each other"),
    "unknown precision": (["--precision", "int5"], "'int5' names no precision"),
    "empty precision": (["--precision", ""], "names no precision"),
    "unknown class": (["--precision", "int4,router=int8"], "'router' is no tensor class"),
    "a class twice": (["--precision", "int4,embed=int8,embed=bf16"], "names embed twice"),
    "unknown card": (["--gpu", "voodoo2"], "voodoo2"),
    "block size 0": (["--block-size", "0"], "--block-size 0 is not supported"),
    "block size 33": (["--block-size", "32", "--block-size", "33"], "--block-size 33 is not supported"),
    "group size": (["--group-size", "48"], "--group-size 48"),
    "group size of a larger model": (["--group-size", "128"], "--group-size 128"),
    "no context": (["--max-context", "0"], "--max-context 0"),
    "too much context": (["--max-context", "4097"], "1 to 4096"),
    "groups without integers": (["--precision", "bf16", "--group-size", "32"], "--group-size acts on integer weights"),
    "exactness without integers": (["--bf16", "--exact-activations"], "--exact-activations acts on integer weights"),
    "speed without integers": (["--precision", "fp32", "--fast-activations"], "--fast-activations acts on integer"),
    "unknown field to ignore": (["--ignore-config-field", "nope"], "nope"),
}


@pytest.mark.parametrize("name", BAD_BUILDS)
def test_a_bad_build_option_is_refused(name: str, tmp_path: Path) -> None:
    options, words = BAD_BUILDS[name]
    sentence = refused(clover("build", tiny_checkpoint(0), "-o", tmp_path / "bundle", *options))
    assert words in sentence
    assert not any(tmp_path.iterdir())


def test_a_bad_output_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for out, options, words in (
        (tmp_path / "file", [], "already exists"),
        (tmp_path / "folder", [], "already exists"),
        (tmp_path / "folder", ["--force"], "is not a bundle"),
        (tmp_path / "file" / "bundle", [], "can't be written"),
        (Path("/proc/clover"), [], "can't be written"),
        (tmp_path / ("n" * 300), [], "too long"),
    ):
        assert words in refused(clover("build", tiny_checkpoint(0), "-o", out, *options))
    assert {p.name for p in tmp_path.iterdir()} == {"file", "folder"}


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    for source in (tmp_path / "absent", tmp_path / "a\nb"):
        refused(clover("build", source, "-o", tmp_path / "bundle"))
    (tmp_path / "file").write_text("x")
    refused(clover("build", tmp_path / "file", "-o", tmp_path / "bundle"))


def test_a_build_says_what_it_made(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "bundle"
    result = clover("build", tiny_checkpoint(0), "-o", out, "--json", "--block-size", "8", "--precision", "bf16")
    assert result.exit_code == 0
    body = json.loads(result.stdout)
    assert body["bundle"] == str(out) and body["bytes"] == Bundle.open(out).nbytes
    assert body["manifest"]["block_sizes"] == [8] and body["manifest"]["defaults"]["block_size"] == 8


# -- run ------------------------------------------------------------------------------------------------------

BAD_RUNS: dict[str, tuple[list[str], str]] = {
    "empty prompt": (["", "--raw"], "prompt holds no tokens"),
    "mask token": (["a<MASK>b", "--raw"], "contains the mask token"),
    "too long": (["a b " * 3000], "the context holds 4096"),
    "too long for this context": (["a b " * 50, "--max-context", "64"], "the context holds 64"),
    "block size 0": (["a", "--block-size", "0"], "block_size is 0"),
    "block size 33": (["a", "--block-size", "33"], "block_size is 33"),
    "threshold 0": (["a", "--threshold", "0"], "threshold is 0"),
    "threshold 1.5": (["a", "--threshold", "1.5"], "threshold is 1.5"),
    "threshold nan": (["a", "--threshold", "nan"], "threshold is nan"),
    "unknown mode": (["a", "--mode", "beam"], "mode 'beam' is unknown"),
    "no tokens": (["a", "--max-new-tokens", "0"], "max_new_tokens is 0"),
    "negative temperature": (["a", "--temperature", "-1"], "temperature is -1"),
    "empty stop": (["a", "--stop", ""], "stop must hold"),
    "too much context": (["a", "--max-context", "5000"], "max_context is 5000"),
    "thinking without a template": (["a", "--raw", "--thinking"], "--thinking is for the chat template"),
    "no thinking without a template": (["a", "--raw", "--no-thinking"], "--no-thinking is for the chat template"),
    "steps in JSON": (["a", "--show-steps", "--json"], "give one of them"),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_a_bad_request_is_refused(name: str) -> None:
    (prompt, *options), words = BAD_RUNS[name]
    directory = bundle(NANO).directory
    tokens = json.loads((NANO / "tokenizer.json").read_text())["added_tokens"]
    mask = next(t["content"] for t in tokens if t["id"] == 3)
    sentence = refused(clover("run", directory, prompt.replace("<MASK>", mask), "--no-cache", *options))
    assert words in sentence, sentence


def piped(prompt: str) -> subprocess.CompletedProcess[str]:
    """`clover run BUNDLE - --no-cache` behind a shell's redirection, in a locale that knows ASCII alone."""
    command = f"{prompt} {shlex.join([sys.executable, '-m', 'clover.cli', 'run', str(bundle(NANO).directory), '-', '--no-cache'])}"
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("printf '\\377\\376' |", "UTF-8"), ("exec <&-;", "holds no prompt"), ("echo |", "holds no prompt")],
)
def test_standard_input_without_a_prompt_is_refused(prompt: str, words: str) -> None:
    done = piped(prompt)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout and line.startswith("clover: standard input ") and words in line


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(closed: str) -> None:
    run = ["run", str(bundle(NANO).directory), PROMPT, "--no-cache"]
    for verb, code in ((["gpus"], 0), (run, 0), ([*run, "--json"], 0), (["plan"], 2)):
        command = f"{shlex.join([sys.executable, '-m', 'clover.cli', *verb])} {closed}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == code and "Traceback" not in done.stderr, (verb, done.stderr)


def test_a_build_writes_its_bundle_whole_with_all_streams_closed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "clover.cli", "build", str(tiny_checkpoint(0)), "-o", str(tmp_path / "b")]
    done = subprocess.run(["sh", "-c", f"{shlex.join(command)} <&- >&- 2>&-"], check=False)
    assert done.returncode == 0
    Bundle.open(tmp_path / "b", verify=True)


def test_a_line_end_behind_a_piped_prompt_is_none_of_it() -> None:
    done = piped(f"echo {shlex.quote(PROMPT)} |")
    assert json.loads(done.stdout)[0]["site"] == "Cedar", done.stderr


def test_in_a_terminal_no_text_stands_between_the_steps() -> None:
    """Steps go to stderr and text to stdout: on one terminal a step's line must begin at a line's begin."""
    main, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "clover.cli",
        "run",
        str(bundle(NANO).directory),
        PROMPT,
        "--no-cache",
        "--show-steps",
    ]
    done = subprocess.Popen(
        [*command, "--block-size", "8"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "200"},
    )
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # Linux: the other end is closed
        while part := os.read(main, 4096):
            shown += part
    os.close(main)
    assert done.wait() == 0
    lines = shown.decode().splitlines()
    steps = [number for number, line in enumerate(lines) if line.startswith("block ")]
    assert len(steps) >= 3 and steps == list(range(len(steps))) and shown.count(b"block ") == len(steps), shown
    assert json.loads(lines[len(steps)])[0]["site"] == "Cedar"
    assert lines[len(steps) - 1].count("<|") == 1, "the reply's end is the last that is drawn"


@pytest.mark.parametrize(
    "file", ["weights/dense.safetensors", "graphs/step.onnx", "tokenizer/tokenizer.json", "clover.json"]
)
def test_a_damaged_bundle_is_refused(file: str, tmp_path: Path) -> None:
    broken = tmp_path / "bundle"
    shutil.copytree(bundle(NANO).directory, broken)
    data = bytearray((broken / file).read_bytes())
    data[len(data) // 2] ^= 4
    (broken / file).write_bytes(data)
    assert Path(file).name in refused(clover("run", broken, "a", "--no-cache"))
    (broken / file).unlink()
    assert Path(file).name in refused(clover("run", broken, "a", "--no-cache"))


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", NANO):
        refused(clover("run", path, "a"))


def test_run_prints_the_reply_alone(tmp_path: Path) -> None:
    directory = bundle(NANO).directory
    plain = clover("run", directory, PROMPT, "--no-cache")
    assert plain.exit_code == 0 and json.loads(plain.stdout)[0]["op"] == "dispatch"
    assert "tokens/step" in plain.stderr
    piped = clover("run", directory, "-", "--no-cache", "--json", stdin=PROMPT.encode())
    body = json.loads(piped.stdout)
    assert body["text"] == plain.stdout.strip() and body["statistics"]["mode"] == "fill"
    steps = clover("run", directory, PROMPT, "--no-cache", "--show-steps")
    assert steps.stdout == plain.stdout and steps.stderr.count("\n") > body["statistics"]["steps"]


# -- what a command needs -------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import socket, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "triton", "tensorrt", "tensorrt_rtx", "fastapi", "huggingface_hub"):
            raise ImportError(f"{name} must not be needed")
sys.meta_path.insert(0, Blocked())
def no_network(*args, **kwargs):
    raise OSError("no network")
class NoSocket(socket.socket):
    def __init__(self, *args, **kwargs):
        no_network()
socket.socket = NoSocket
socket.create_connection = socket.getaddrinfo = no_network
from clover import Clover
with Clover.load(sys.argv[1], threads=1, cache=False) as engine:
    print(engine.chat([{"role": "user", "content": sys.argv[2]}]).text)
"""


def test_the_runtime_needs_neither_torch_nor_network(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(bundle(NANO).directory), PROMPT]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ORT_")}
    places = {name: str(tmp_path) for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment | places)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["site"] == "Cedar"
    assert not list(tmp_path.iterdir())  # no device id, no usage data


@pytest.mark.parametrize("arguments", [["--help"], ["build", "--help"], ["run", "--help"], ["run", "--thresh"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom clover.cli import app\n"
        f"try:\n    app({arguments!r})\nexcept SystemExit as end:\n    code = end.code\n"
        "heavy = {'numpy', 'onnxruntime', 'onnx', 'tokenizers', 'jinja2', 'torch', 'safetensors', 'ml_dtypes'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if "--help" in arguments else 2)
    assert done.stderr.splitlines()[-1] == "[]"
