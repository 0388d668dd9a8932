"""Opens a GPU bundle's session, after everything that can be wrong has been checked by name."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from clover.engines.bundle import Bundle
from clover.engines.gpu_driver import DetectedGpu, detect_gpus, target_of
from clover.engines.manifest import Manifest
from clover.engines.tensorrt.backend import INSTALL, TensorRt, load, version
from clover.engines.tensorrt.engine_file import check_engine_file
from clover.engines.tensorrt.kernels import OPERATORS, check_kernels, make_host, read_kernels
from clover.engines.tensorrt.target import KERNEL_DIRECTORY
from clover.exporter.weight_index import read_weight_index
from clover.plugins.kernels.cubin import Cubin
from clover.plugins.tensorrt_plugin import kernels_digest
from clover.runtime.errors import BundleError, CloverError, RequestError
from clover.runtime.session import StepSession

RESERVE = 512 * 2**20  # bytes left free on the card when it decides how many experts go there


def build_command(manifest: Manifest, gpu: str) -> str:
    """The command that builds this bundle again, for `gpu`."""
    plan, engine = manifest.precision_plan, manifest.engines[0]
    base = plan.classes["experts"]
    precision = ",".join((base, *(f"{k}={v}" for k, v in plan.classes.items() if v != base)))
    sizes = " ".join(f"--block-size {b}" for b in manifest.block_sizes)
    extra = f" --sequences {engine.sequences}" if engine.sequences > 1 else ""
    extra += "" if engine.resident_experts is None else f" --resident-experts {engine.resident_experts}"
    extra += " --with-logits" if manifest.graph.with_logits else ""
    return (
        f"clover build CHECKPOINT -o BUNDLE --gpu {shlex.quote(gpu)} --precision {precision} {sizes} "
        f"--max-context {manifest.max_context}{extra}"
    )


def backend_of(manifest: Manifest) -> TensorRt:
    """The TensorRT a bundle was built with. Raises BundleError for a bundle without a GPU engine."""
    backend = manifest.target.backend
    if backend == "onnxruntime" or not manifest.engines:
        raise BundleError("this bundle has no GPU engine; build one with `clover build … --gpu CARD`.")
    return backend


def check_machine(bundle: Bundle, cards: list[DetectedGpu], installed: str) -> DetectedGpu:
    """The card that runs the bundle. Raises BundleError, before anything is loaded, for another card or TensorRT."""
    manifest, target = bundle.manifest, bundle.manifest.target
    fitting = [card for card in cards if card.sm == target.sm]
    if not fitting:
        start = f"{bundle.directory} was built for {target.name} (SM {target.sm}) and this machine has"
        if not cards:
            raise BundleError(f"{start} no NVIDIA GPU; run it on the CPU with `clover run BUNDLE --provider cpu`.")
        found = ", ".join(f"{card.name} (SM {card.sm})" for card in cards)
        raise BundleError(
            f"{start} {found}; build it for this one with `{build_command(manifest, _target_name(cards[0]))} "
            f"--reuse {shlex.quote(str(bundle.directory))}`."
        )
    if installed != target.backend_version:
        raise BundleError(
            f"{bundle.directory} was built with {target.backend} {target.backend_version} and {installed} is installed "
            f"here; install that version, or build it again with `{build_command(manifest, target.name)} "
            f"--reuse {shlex.quote(str(bundle.directory))}`."
        )
    return max(fitting, key=lambda card: card.memory_bytes)


def check_parts(bundle: Bundle) -> dict[str, list[Cubin]]:
    """Every operator's kernels. Raises BundleError when engine, kernels and manifest don't belong together."""
    manifest = bundle.manifest
    if backend_of(manifest) == "tensorrt-rtx":
        check_engine_file(bundle.directory / manifest.engines[0].file, manifest.target.backend_version)
    cubins = read_kernels(bundle.directory / KERNEL_DIRECTORY, {op: k.names for op, k in manifest.kernels.items()})
    for op, kernels in manifest.kernels.items():
        if kernels_digest(cubins[op]) != kernels.sha256:
            raise BundleError(f"{bundle.directory} has other {op} kernels than its manifest says; build it again.")
    check_kernels([c for group in cubins.values() for c in group], manifest.target.sm or 0)
    return cubins


def open_gpu_session(
    bundle: Bundle,
    *,
    sequences: int = 1,
    max_context: int | None = None,
    resident_experts: int | None = None,
    stand_ins: Mapping[str, Any] | None = None,
) -> StepSession:
    """A session on this machine's card. `resident_experts`: at most so many on the card; default: as many as fit,
    or as the bundle was built for.

    Raises BundleError when this machine can't run the bundle, RequestError for more sequences than it was built for.
    `stand_ins` replaces the machine in tests: `trt` and `driver` modules, and `cards`.
    """
    given = dict(stand_ins or {})
    manifest = bundle.manifest
    backend = backend_of(manifest)
    built = manifest.engines[0]
    if sequences > built.sequences:
        raise RequestError(
            "sequences",
            f"sequences is {sequences} and {bundle.directory} was built for {built.sequences}; build it again with "
            f"--sequences {sequences}.",
        )
    card = check_machine(bundle, given.get("cards") or _cards(), given.get("version") or _installed(backend))
    cubins = check_parts(bundle)
    trt = given.get("trt") or load(backend)

    from clover.runtime.gpu.device import Device
    from clover.runtime.gpu.engine import StepEngine
    from clover.runtime.gpu.experts import ExpertStore, ExpertWeights
    from clover.runtime.gpu.session import GpuSession
    from clover.runtime.gpu.shapes import shape_limits

    config = manifest.config
    device = Device(card.index, given.get("driver"))
    engine: StepEngine | None = None
    try:
        host = make_host(cubins, given.get("driver"))
        cache = bundle.directory / ".cache" / f"{backend}-{built.fingerprint[:16]}.bin"
        engine = StepEngine(trt, bundle.directory / built.file, OPERATORS, host, device, cache)
        index = read_weight_index(bundle.directory, [n for n in manifest.files if n.endswith(".safetensors")])
        weights = ExpertWeights(bundle.directory, index, config.num_hidden_layers, config.num_experts)

        def experts(later: int) -> ExpertStore:
            room = (device.free_memory - RESERVE - later) // weights.layout.nbytes
            every = weights.layers * weights.experts
            limits = (every, room, resident_experts, built.resident_experts)
            return ExpertStore(device, weights, max(0, min(n for n in limits if n is not None)))

        return GpuSession(
            device, engine, experts, config, built,
            shape_limits(
                built.max_rows, built.prefill_chunk, built.logit_rows, built.candidates, built.adjusted,
                manifest.block_sizes,
            ),
            sequences=sequences, max_context=max_context or manifest.max_context,
            with_logits=manifest.graph.with_logits, decode_rows=2 * max(manifest.block_sizes),
        )  # fmt: skip
    except BaseException:
        if engine is not None:
            engine.close()
        device.close()
        raise


def _cards() -> list[DetectedGpu]:
    try:
        return detect_gpus()
    except CloverError:
        return []


def _installed(backend: TensorRt) -> str:
    try:
        return version(backend)
    except CloverError:
        raise BundleError(
            f"{backend} is not installed; {INSTALL[backend]}, or run the bundle with provider cpu."
        ) from None


def _target_name(card: DetectedGpu) -> str:
    try:
        return target_of(card).name
    except CloverError:
        return "cpu"
