"""What can be checked of a GPU bundle without a card: one list of checks, for opening, `validate` and `inspect`."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from clover.engines.bundle import Bundle
from clover.engines.gpu_driver import DetectedGpu
from clover.engines.tensorrt.engine_file import check_engine_file
from clover.engines.tensorrt.kernels import check_kernels, needed_operators, read_kernels
from clover.engines.tensorrt.machine import backend_of, check_version, fitting_card, installed_version
from clover.engines.tensorrt.network import PLUGIN_LAYERS, Layer
from clover.engines.tensorrt.target import KERNEL_DIRECTORY
from clover.exporter.store_plan import EXPERTS_FILE, store_plan
from clover.plugins.kernels.cubin import Cubin
from clover.plugins.tensorrt_plugin import kernels_digest
from clover.runtime.errors import BundleError

Verdict = Literal["passed", "failed", "not checked"]
Checker = Callable[[], str]  # what was found; BundleError: what is wrong


@dataclass(frozen=True)
class Check:
    """One check: its name, what was found (or what is wrong and what to do), and the verdict."""

    name: str
    found: str
    verdict: Verdict

    def to_json(self) -> dict[str, str]:
        return asdict(self)


class _NotCheckedError(Exception):
    """Why something can't be checked here."""


def static_checks(
    bundle: Bundle, cards: list[DetectedGpu], installed: str | None = None, *, read_all: bool = True
) -> list[Check]:
    """Every check, in an order in which the first failure is the cause. Nothing is loaded that needs a card.

    bundle: need not have been verified. cards: of this machine. installed: version of the bundle's TensorRT; default:
    what is installed. read_all: also hash every file and search the whole engine.
    """
    whole: list[tuple[str, Checker]] = [
        ("files", lambda: _files(bundle)),
        ("kernels in the engine", lambda: _hashes_in_engine(bundle)),
    ]
    here: list[tuple[str, Checker]] = [
        ("TensorRT here", lambda: _installed(bundle, installed)),
        ("card here", lambda: _card(bundle, cards)),
    ]
    parts = list(_part_checks(bundle))
    listed = [whole[0], *parts, whole[1], *here] if read_all else [*parts, *here]
    return [_run(name, check) for name, check in listed]


def check_parts(bundle: Bundle) -> dict[str, list[Cubin]]:
    """Every operator's kernels. Raises BundleError when engine, kernels, layer list and manifest don't belong together."""
    for _, check in _part_checks(bundle):
        with suppress(_NotCheckedError):
            check()
    return read_kernels(bundle.directory / KERNEL_DIRECTORY, {op: k.names for op, k in bundle.manifest.kernels.items()})


def _part_checks(bundle: Bundle) -> Iterator[tuple[str, Checker]]:
    """The checks that cost next to nothing, which opening a bundle makes as well."""
    yield "engine", lambda: _engine(bundle)
    yield "plugins", lambda: _plugins(bundle)
    for op in bundle.manifest.kernels:
        yield f"kernels of {op}", lambda op=op: _kernels(bundle, op)  # type: ignore[misc]
    yield "layers", lambda: _layers(bundle)
    yield "inputs and outputs", lambda: _tensors(bundle)
    yield "weights", lambda: _weights(bundle)


def _run(name: str, check: Checker) -> Check:
    try:
        return Check(name, check(), "passed")
    except _NotCheckedError as reason:
        return Check(name, str(reason), "not checked")
    except BundleError as error:
        return Check(name, str(error), "failed")


def _files(bundle: Bundle) -> str:
    Bundle.open(bundle.directory)
    return f"{len(bundle.manifest.files)} files, {_size(bundle.nbytes)}, sizes and hashes as recorded"


def _engine(bundle: Bundle) -> str:
    target = bundle.manifest.target
    if backend_of(bundle.manifest) != "tensorrt-rtx":
        raise _NotCheckedError(f"only TensorRT-RTX's engine files can be read without a card, not {target.backend}'s")
    header = check_engine_file(_engine_path(bundle), target.backend_version, target.sm)
    if header.sms is None:
        return f"TensorRT-RTX {header.version}, {_size(header.size)}; the card it is for can't be read in this version"
    return f"TensorRT-RTX {header.version} for SM {', '.join(map(str, header.sms))}, {_size(header.size)}"


def _plugins(bundle: Bundle) -> str:
    manifest = bundle.manifest
    needed = needed_operators(manifest.config, manifest.precision_plan)
    for name in (*needed, *manifest.kernels):
        wanted = len(needed[name].layers) if name in needed else 0
        had = manifest.kernels[name].nodes if name in manifest.kernels else 0
        if wanted != had:
            raise BundleError(
                f"{bundle.directory} has {name} in {had} layers, and this clover runs the model with {wanted}; build the "
                "bundle again."
            )
    return ", ".join(f"{name} in {len(needed[name].layers)} layers" for name in needed)


def _kernels(bundle: Bundle, op: str) -> str:
    manifest, kernels = bundle.manifest, bundle.manifest.kernels[op]
    (cubins,) = read_kernels(bundle.directory / KERNEL_DIRECTORY, {op: kernels.names}).values()
    if kernels_digest(cubins) != kernels.sha256:
        raise BundleError(f"{bundle.directory} has other {op} kernels than its manifest says; build the bundle again.")
    check_kernels(cubins, manifest.target.sm or 0)
    needed = needed_operators(manifest.config, manifest.precision_plan).get(op)
    lacking = set(needed.kernels) - {c.kernel for c in cubins} if needed else set()
    if lacking:
        names = ", ".join(sorted(k.function for k in lacking))
        raise BundleError(f"{bundle.directory} lacks the {names} kernel that this clover launches; build it again.")
    targets = ", ".join(sorted({c.target for c in cubins}))
    return f"{len(cubins)} for {targets}; hashes, sources, threads and {_count(cubins)} parameters match"


def _count(cubins: list[Cubin]) -> int:
    return sum(len(c.kernel.signature) + c.hidden_parameters for c in cubins)


def _layers(bundle: Bundle) -> str:
    manifest, record = bundle.manifest, _record(bundle)
    config, engine = manifest.config, manifest.engines[0]
    layers: list[Layer] = record["layers"]
    if record["fingerprint"] != engine.fingerprint or record["sha256"] != manifest.files[engine.file].sha256:
        raise BundleError(f"{engine.layers} is the layer list of another engine; build the bundle again.")
    plugins = [layer["name"] for layer in layers if layer["type"] == PLUGIN_LAYERS]
    needed = needed_operators(config, manifest.precision_plan)
    for op, part in needed.items():
        for n in part.layers:
            found = [name for name in plugins if name.startswith(f"layers.{n}.") and f".{op}." in name]
            if len(found) != 1:
                raise BundleError(f"layer {n} of the engine's network has {len(found)} {op} plugins; build it again.")
    if len(plugins) != sum(len(part.layers) for part in needed.values()):
        raise BundleError(f"the engine's network has {len(plugins)} plugins, more than the model; build it again.")
    kinds = [layer["type"] for layer in layers]
    attention = len(config.attention_layers)
    if record["limited_attention"] != attention or kinds.count("KV_CACHE_UPDATE") != 2 * attention:
        raise BundleError(
            f"the engine limits {record['limited_attention']} of {attention} attention layers to the live keys and updates "
            f"{kinds.count('KV_CACHE_UPDATE')} of {2 * attention} caches in place; build the bundle again."
        )
    return f"{len(layers)}, of them {len(plugins)} plugins, one of each kind where the model has it"


def _tensors(bundle: Bundle) -> str:
    from clover.runtime.gpu.shapes import shape_limits
    from clover.runtime.gpu.tensors import bound_tensors, check_tensors

    manifest, e = bundle.manifest, bundle.manifest.engines[0]
    limits = shape_limits(e.max_rows, e.prefill_chunk, e.logit_rows, e.candidates, e.adjusted, manifest.block_sizes)
    bound = bound_tensors(manifest.config, limits.largest(e.sequences), e.capacity, manifest.graph.with_logits)
    check_tensors(bound, _record(bundle)["tensors"])
    return f"{len(bound)}, of the types and shapes that a session binds"


def _weights(bundle: Bundle) -> str:
    """Unpacked to BF16, the smallest INT4 class would add more to the engine than half its own growth."""
    manifest = bundle.manifest
    if backend_of(manifest) != "tensorrt-rtx":
        raise _NotCheckedError("only TensorRT-RTX's engine files can be read without a card")
    header = check_engine_file(_engine_path(bundle), manifest.target.backend_version)
    if header.weight_bytes is None:
        raise _NotCheckedError("the engine file's layout is not known in this version of TensorRT-RTX")
    planned, growth, matrices = _planned_weights(bundle)
    if not growth:
        return f"{_size(header.weight_bytes)}, {_size(planned)} planned; nothing is INT4"
    unpacked = header.weight_bytes - planned > min(growth.values()) / 2
    dequantised = [layer["type"] for layer in _record(bundle)["layers"]].count("DEQUANTIZE")
    if unpacked or dequantised != matrices:
        raise BundleError(
            f"the engine holds {_size(header.weight_bytes)} of weights where {_size(planned)} are planned, and "
            f"{dequantised} of {matrices} INT4 matrices dequantise in it: they are not packed; build the bundle again."
        )
    return (
        f"{_size(header.weight_bytes)}, {_size(planned)} planned ({_size(planned + sum(growth.values()))} unpacked): "
        f"{matrices} INT4 matrices packed"
    )


def _planned_weights(bundle: Bundle) -> tuple[int, dict[str, int], int]:
    """Bytes of weights an engine should hold, what each INT4 class would add in BF16, and how many matrices are INT4."""
    manifest, config = bundle.manifest, bundle.manifest.config
    rope = 2 * manifest.engines[0].capacity * (config.rotary_dim // 2) * 4  # cos and sin of every position, float32
    planned, growth, matrices = rope, dict[str, int](), 0
    for item in store_plan(config, manifest.precision_plan):
        if item.file == EXPERTS_FILE:  # not in the engine
            continue
        size = math.prod(item.shape)
        if item.precision == "int4":
            packed = size // 2 + 2 * (size // item.group_size)  # and a BF16 scale for every group
            kind = str(item.tensor_class)
            growth[kind] = growth.get(kind, 0) + 2 * size - packed
            matrices += 1
        else:
            packed = size * (2 if item.precision == "bf16" else 4)
        planned += packed
    return planned, growth, matrices


def _hashes_in_engine(bundle: Bundle) -> str:
    """A plugin's node carries the hash of its kernels, and TensorRT hands it back when the engine is opened."""
    counts = {}
    with _engine_path(bundle).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for op, kernels in bundle.manifest.kernels.items():
            counts[op] = _occurrences(content, kernels.sha256.encode())
            if counts[op] < kernels.nodes:
                raise BundleError(
                    f"the engine was built with other {op} kernels than this bundle holds ({counts[op]} of {kernels.nodes} "
                    "layers name them); build the bundle again."
                )
    return f"every one of {sum(k.nodes for k in bundle.manifest.kernels.values())} plugins names the kernels of this bundle"


def _occurrences(content: mmap.mmap, text: bytes) -> int:
    count, at = 0, content.find(text)
    while at >= 0:
        count, at = count + 1, content.find(text, at + 1)
    return count


def _installed(bundle: Bundle, installed: str | None) -> str:
    backend = backend_of(bundle.manifest)
    try:
        found = installed or installed_version(backend)
    except BundleError as error:
        raise _NotCheckedError(str(error)) from None
    check_version(bundle, found)
    return f"{backend} {found}, which built the engine"


def _card(bundle: Bundle, cards: list[DetectedGpu]) -> str:
    try:
        card = fitting_card(bundle, cards)
    except BundleError as error:  # says nothing against the bundle
        raise _NotCheckedError(str(error)) from None
    return f"{card.name} (SM {card.sm})"


def _engine_path(bundle: Bundle) -> Path:
    return bundle.directory / bundle.manifest.engines[0].file


def _record(bundle: Bundle) -> dict[str, Any]:
    """The layer list beside the engine. Raises BundleError when it can't be read."""
    path = bundle.directory / bundle.manifest.engines[0].layers
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        layers, tensors = record["layers"], record["tensors"]
        if not all({"name", "type"} <= layer.keys() for layer in layers) or not isinstance(tensors, dict):
            raise ValueError("not a list of layers")
        return {"fingerprint": record["fingerprint"], "sha256": record["sha256"], "layers": layers, "tensors": tensors,
                "limited_attention": record["limited_attention"]}  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{path} is no layer list ({error}); build the bundle again.") from None


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"
