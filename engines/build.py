"""Builds a bundle: weights, step graph, tokenizer, manifest; in a working directory that becomes the bundle at the end.

An interrupted build leaves `.NAME.partial` beside the bundle's place; the next build goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover import __version__
from clover.engines.bundle import Bundle, check_output, file_entry, publish, working_directory
from clover.engines.calibrate.use import open_calibration
from clover.engines.manifest import MANIFEST, Graph, Manifest, Model, Target, UsedCalibration
from clover.exporter.checkpoint import Checkpoint
from clover.exporter.config import BLOCK_SIZES, ModelConfig, read_json
from clover.exporter.config_reader import read_config, require_mask_token
from clover.exporter.graph.dense import EXACT_ACCURACY, FAST_ACCURACY
from clover.exporter.graph.step import build_step_graph
from clover.exporter.precision import Precision, PrecisionPlan, TensorClass
from clover.exporter.safetensors_file import SafetensorsFile
from clover.exporter.store_plan import StoreItem, store_plan
from clover.exporter.weight_index import read_weight_index
from clover.exporter.weights import STORE_FORMAT, plan_for, write_weights
from clover.runtime.clover import TOKENIZER_DIRECTORY, load_template
from clover.runtime.errors import BundleError, CheckpointError, CloverError, RequestError
from clover.runtime.options import DecodeOptions
from clover.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from clover.engines.tensorrt.target import GpuBuild

GRAPH_FILE = "graphs/step.onnx"
WIDE = 1024  # hidden size from which a CPU's step costs by the weight and the row, not by the operator
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
)
OTHER_FILES_BYTES = 64 * 2**20  # room to ask for: the graph and the tokenizer of the full-size model take half of it
GENERATION_FILE = "generation_config.json"

Progress = Callable[[str, int, int], None]  # (what, done, total), in weights


@dataclass(frozen=True)
class BuildRequest:
    """What `clover build` was asked for. `block_sizes` empty: all supported ones."""

    checkpoint: Path
    out: Path
    target: str | None = None  # None: the CPU, or `sm` and `memory`
    precision: Precision = "int4"
    overrides: Mapping[TensorClass, Precision] = field(default_factory=dict)
    group_size: int | None = None
    calibration: Path | None = None  # of `clover calibrate`: weights the errors of INT4 matrices
    block_sizes: Collection[int] = ()
    max_context: int | None = None
    with_logits: bool = False
    exact_activations: bool | None = None  # None: where 8-bit activations would not be faster
    replace: bool = False
    ignore_fields: Collection[str] = ()
    sequences: int = 1  # slots of a GPU engine
    resident_experts: int | None = None  # most routed experts on the card; None: as many as fit
    host_memory: str | None = None  # RAM of the machine with the card, such as 64GiB; None: the planner's default
    reuse: Path | None = None  # a bundle of the same checkpoint and precision whose weights are taken over
    sm: str | None = None  # with `memory`: a card that is not in the table, in place of `target`
    memory: str | None = None
    kernel_cache: Path | None = None  # compiled kernels kept between builds


def build_target(request: BuildRequest, progress: Progress = lambda what, done, total: None) -> Bundle:
    """Builds for the request's target. Raises CloverError for a target that can't be built."""
    from clover.engines.gpus import parse_size, resolve_gpu

    given = request.target or (None if request.sm or request.memory else "cpu")
    gpu = resolve_gpu(given, request.sm, request.memory)
    if gpu.is_cpu:
        if request.sequences != 1 or request.resident_experts is not None or request.host_memory is not None:
            raise CloverError(
                "--sequences, --resident-experts and --host-memory are for GPU engines; leave them out with --gpu cpu."
            )
        return build_bundle(request, progress)
    from clover.engines.planner.plan import DEFAULT_HOST_MEMORY
    from clover.engines.tensorrt.target import GpuBuild

    ram = DEFAULT_HOST_MEMORY if request.host_memory is None else parse_size(request.host_memory, "--host-memory")
    build = GpuBuild(gpu, request.sequences, request.resident_experts, ram, kernel_cache=request.kernel_cache)
    return build_bundle(request, progress, build)


def build_bundle(
    request: BuildRequest, progress: Progress = lambda what, done, total: None, gpu: GpuBuild | None = None
) -> Bundle:
    """Builds a bundle for the CPU, and with `gpu` an engine and its kernels beside; returns it verified.

    Raises CloverError with nothing half-written.
    """
    out = output_path(request.out)
    check_output(out, replace=request.replace)
    config = read_config(request.checkpoint, request.ignore_fields)
    mask = require_mask_token(config)
    checkpoint = Checkpoint.open(request.checkpoint, config)
    precision = plan_for(checkpoint, request.precision, request.overrides, request.group_size)
    accuracy = choose_accuracy(config, request.exact_activations)
    block_sizes = check_block_sizes(request.block_sizes)
    max_context = check_context(config, request.max_context)
    if gpu and precision.zero_points:
        raise CloverError(
            f"{request.checkpoint} holds INT4 weights with zero points, which GPU engines do not take; build with --gpu cpu, "
            "or from the BF16 checkpoint."
        )
    if gpu:
        max_context = gpu.context(config, request.max_context)
        gpu.check(config, precision, block_sizes, max_context)
    tokenizer = load_tokenizer(request.checkpoint, config)
    defaults = decode_defaults(request.checkpoint, config, precision, block_sizes, gpu.gpu.name if gpu else "cpu")
    items = store_plan(config, precision)
    calibration, used = (
        open_calibration(request.calibration, checkpoint, items) if request.calibration else (None, None)
    )
    with working_directory(out, replace=request.replace) as work:
        if request.reuse:
            reuse_weights(request.reuse, work, checkpoint, precision, used)
        report = _weights_progress(items, progress)
        hashes = write_weights(checkpoint, items, work, report, beside=OTHER_FILES_BYTES, calibration=calibration)
        excluded = sorted({mask, *(tokenizer.padding_ids(config.vocab_size) if tokenizer else ())})
        index = read_weight_index(work, hashes)
        model = build_step_graph(
            config,
            precision,
            index,
            excluded_ids=excluded,
            with_logits=request.with_logits,
            accuracy_level=accuracy,
        )
        (work / GRAPH_FILE).parent.mkdir(exist_ok=True)
        (work / GRAPH_FILE).write_bytes(model.SerializeToString())
        files = {name: file_entry(work / name, sha256) for name, sha256 in hashes.items()}
        for name in (GRAPH_FILE, *_copy_text_files(request.checkpoint, work)):
            files[name] = file_entry(work / name)
        target = Target(name="cpu", backend="onnxruntime", backend_version=_onnxruntime_version())
        parts = None
        if gpu:
            from clover.engines.tensorrt.target import build_gpu_parts

            parts = build_gpu_parts(
                gpu, work, config, precision, index, hashes, block_sizes=block_sizes, max_context=max_context,
                excluded_ids=excluded, with_logits=request.with_logits, say=progress,
            )  # fmt: skip
            target = parts.target
            files.update(parts.files)
        manifest = Manifest(
            clover_version=__version__,
            model=describe_model(request.checkpoint, config, checkpoint),
            target=target,
            precision=precision.to_json(),
            calibration=used,
            block_sizes=block_sizes,
            trained_block_size=config.block_size,
            mask_token_id=mask,
            eos_token_ids=config.eos_token_ids,
            excluded_token_ids=tuple(excluded),
            max_context=max_context,
            options=assumed_options(config),
            defaults=defaults,
            graph=Graph(
                file=GRAPH_FILE,
                with_logits=request.with_logits,
                accuracy_level=accuracy,
            ),
            engines=(parts.engine,) if parts else (),
            kernels=parts.kernels if parts else {},
            files=files,
        )
        (work / MANIFEST).write_text(manifest.dump(), encoding="utf-8")
        publish(work, out, manifest, replace=request.replace)
    return Bundle.open(out, verify=False)


# -- pieces shared by targets ---------------------------------------------------------------------


def reuse_weights(
    source: Path,
    work: Path,
    checkpoint: Checkpoint,
    precision: PrecisionPlan,
    calibration: UsedCalibration | None = None,
) -> None:
    """Takes the weight files of a finished bundle over into `work`, by link where the file system has them.

    Raises BundleError when that bundle is damaged, or of another checkpoint, precision or calibration.
    """
    given = Bundle.open(source)
    manifest = given.manifest
    if manifest.model.checkpoint != checkpoint.fingerprint():
        raise BundleError(f"--reuse {source} was built from another checkpoint; leave --reuse out.")
    if manifest.precision_plan.to_json() != precision.to_json():
        raise BundleError(f"--reuse {source} has other precisions ({manifest.precision_plan.name}); leave --reuse out.")
    if manifest.calibration != calibration:
        had = "another calibration" if manifest.calibration else "no calibration"
        raise BundleError(
            f"--reuse {source} was built with {had}; give the --calibration it has, or leave --reuse out."
        )
    stored = [name for name in manifest.files if name.endswith(".safetensors")]
    if any(SafetensorsFile(given.directory / name).metadata.get("format") != STORE_FORMAT for name in stored):
        raise BundleError(
            f"--reuse {source} holds weights that another version of clover converted; leave --reuse out."
        )
    for name in stored:
        place = work / name
        if place.exists():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            place.hardlink_to(given.directory / name)
        except OSError:  # another file system, or one without links
            partial = place.with_name(f"{place.name}.copy")
            shutil.copyfile(given.directory / name, partial)
            partial.replace(place)


def output_path(path: Path) -> Path:
    """The bundle's place: a link's target, and a name where `.` or `..` was given."""
    return path.resolve() if path.is_symlink() or path.name in ("", "..") else path


def choose_accuracy(config: ModelConfig, exact: bool | None) -> int:
    """What integer weights are multiplied by: float32 activations where 8-bit ones are not faster anyway."""
    if exact is None:
        exact = config.hidden_size < WIDE
    return EXACT_ACCURACY if exact else FAST_ACCURACY


def check_block_sizes(asked: Collection[int]) -> tuple[int, ...]:
    """The block sizes of a bundle. Raises CloverError naming one that is not supported."""
    for size in asked:
        if size not in BLOCK_SIZES:
            raise CloverError(f"--block-size {size} is not supported; choose from {', '.join(map(str, BLOCK_SIZES))}.")
    return tuple(sorted(set(asked))) or BLOCK_SIZES


def check_context(config: ModelConfig, asked: int | None) -> int:
    """The longest context of a bundle, in tokens. Raises CloverError when the model can't hold it."""
    limit = config.max_position_embeddings
    if asked is not None and not 1 <= asked <= limit:
        raise CloverError(f"--max-context {asked} is out of range; this model holds 1 to {limit} tokens.")
    return asked or limit


def load_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer | None:
    """The checkpoint's tokenizer, None when it has none.

    Raises CheckpointError when it doesn't fit the model, BundleError when it or the chat template can't be read.
    """
    if not (directory / "tokenizer.json").is_file():
        return None
    tokenizer = Tokenizer.load(directory)
    if tokenizer.size > config.vocab_size:
        raise CheckpointError(
            f"{directory / 'tokenizer.json'} has {tokenizer.size} tokens and the model's vocabulary {config.vocab_size}; "
            "they are not of the same model."
        )
    load_template(directory, tokenizer)  # refused now, not when the bundle is first loaded
    return tokenizer


def describe_model(directory: Path, config: ModelConfig, checkpoint: Checkpoint) -> Model:
    """The model's identity in a manifest."""
    return Model(
        name=directory.resolve().name,
        config=config.to_json(),
        config_sha256=hashlib.sha256((directory / "config.json").read_bytes()).hexdigest(),
        checkpoint=checkpoint.fingerprint(),
    )


def assumed_options(config: ModelConfig) -> dict[str, Any]:
    """The named options for what is not public about the model, as the bundle was built."""
    return {
        "coreset_enabled": config.coreset_enabled,
        "coreset_top_p": config.coreset_top_p,
        "coreset_min_experts": config.coreset_min_experts,
        "history_readout_scale": config.history_readout_scale,
        "align_blocks": config.align_blocks,
        "length_ramp": {"start": 8192, "stop": 16384, "max_bias": 5.0},
    }


def decode_defaults(
    directory: Path, config: ModelConfig, precision: PrecisionPlan, block_sizes: tuple[int, ...], target: str = "cpu"
) -> dict[str, Any]:
    """Decode options that a request does not give: the checkpoint's generation_config.json, else the model's own.

    Raises CheckpointError when no request could be honoured with them.
    """
    path = directory / GENERATION_FILE
    given = read_json(path) if path.is_file() else {}
    names = ("threshold", "presence_penalty", "frequency_penalty", "repetition_penalty", "max_new_tokens")
    defaults: dict[str, Any] = {name: given[name] for name in names if given.get(name) is not None}
    if given.get("do_sample"):
        defaults.update({n: given[n] for n in ("temperature", "top_p", "top_k") if given.get(n) is not None})
    defaults["block_size"] = config.block_size if config.block_size in block_sizes else block_sizes[-1]
    defaults["coreset_top_p"] = config.coreset_top_p
    defaults["align_blocks"] = config.align_blocks
    defaults["mode"] = default_mode(config, target)
    try:
        DecodeOptions(**defaults)
    except RequestError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return defaults


def default_mode(config: ModelConfig, target: str) -> str:
    """Threshold fill, except where it loses: on a CPU a step of a wide model costs by the row (docs/speed.md)."""
    return "autoregressive" if target == "cpu" and config.hidden_size >= WIDE else "fill"


def _copy_text_files(source: Path, work: Path) -> list[str]:
    """Copies tokenizer, chat template and generation config into the bundle; returns their bundle names."""
    folder = work / TOKENIZER_DIRECTORY
    folder.mkdir(exist_ok=True)
    copied = []
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
            copied.append(f"{TOKENIZER_DIRECTORY}/{name}")
    if (source / GENERATION_FILE).is_file():
        shutil.copyfile(source / GENERATION_FILE, work / GENERATION_FILE)
        copied.append(GENERATION_FILE)
    return copied


def _weights_progress(items: tuple[StoreItem, ...], progress: Progress) -> Callable[[str, int], None]:
    total, done = 0, 0
    for item in items:
        size = 1
        for n in item.shape:
            size *= n
        total += size

    def report(name: str, weights: int) -> None:
        nonlocal done
        done += weights
        progress(name, done, total)

    return report


def _onnxruntime_version() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)
