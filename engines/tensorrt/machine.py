"""Whether this machine can run a GPU bundle, and the command that builds it for one that can."""

from __future__ import annotations

import re
import shlex

from clover.engines.bundle import Bundle
from clover.engines.gpu_driver import DetectedGpu, detect_gpus, target_of
from clover.engines.manifest import Manifest
from clover.engines.tensorrt.backend import INSTALL, TensorRt, version
from clover.exporter.precision import plan_precision
from clover.exporter.safetensors_file import SafetensorsFile
from clover.exporter.weights import STORE_FORMAT
from clover.runtime.errors import BundleError, CloverError


def build_command(bundle: Bundle, gpu: str) -> str:
    """The command that builds this bundle again for `gpu`, over the weights it has where they can be taken over."""
    manifest, engine = bundle.manifest, bundle.manifest.engines[0]
    plan = manifest.precision_plan
    base = plan.classes["experts"]
    others = {k: v for k, v in plan.classes.items() if v != base}
    options = ["--precision", ",".join((base, *(f"{k}={v}" for k, v in others.items())))]
    if plan.group_size != plan_precision(manifest.config, base, others).group_size:
        options += ["--group-size", str(plan.group_size)]
    if manifest.calibration is not None:
        options += ["--calibration", "CALIBRATION"]
    for size in manifest.block_sizes:
        options += ["--block-size", str(size)]
    options += ["--max-context", str(manifest.max_context)]
    if engine.sequences > 1:
        options += ["--sequences", str(engine.sequences)]
    if engine.resident_experts is not None:
        options += ["--resident-experts", str(engine.resident_experts)]
    if manifest.graph.with_logits:
        options.append("--with-logits")
    if _weights_are_current(bundle):
        options += ["--reuse", str(bundle.directory)]
    return shlex.join(["clover", "build", "CHECKPOINT", "-o", "BUNDLE", *_target(gpu), *options])


def _weights_are_current(bundle: Bundle) -> bool:
    """Whether a build would take this bundle's weights over."""
    stored = [bundle.directory / name for name in bundle.manifest.files if name.endswith(".safetensors")]
    try:
        return all(SafetensorsFile(path).metadata.get("format") == STORE_FORMAT for path in stored)
    except (CloverError, OSError):
        return False


def _target(name: str) -> list[str]:
    """The options that name a target; a card that is not in the table has its name from --sm and --memory."""
    custom = re.fullmatch(r"sm(\d+)-([\d.e+]+)gib", name)
    return ["--sm", custom[1], "--memory", f"{custom[2]}GiB"] if custom else ["--gpu", name]


def backend_of(manifest: Manifest) -> TensorRt:
    """The TensorRT a bundle was built with. Raises BundleError for a bundle without a GPU engine."""
    backend = manifest.target.backend
    if backend == "onnxruntime" or not manifest.engines:
        raise BundleError("this bundle has no GPU engine; build one with `clover build … --gpu CARD`.")
    return backend


def detected_cards() -> list[DetectedGpu]:
    """The NVIDIA cards of this machine; none when it has no driver."""
    try:
        return detect_gpus()
    except CloverError:
        return []


def installed_version(backend: TensorRt) -> str:
    """The installed version. Raises BundleError saying how to get it, or to do without."""
    try:
        return version(backend)
    except CloverError:
        raise BundleError(
            f"{backend} is not installed; {INSTALL[backend]}, or add --provider cpu to use the CPU."
        ) from None


def fitting_card(bundle: Bundle, cards: list[DetectedGpu]) -> DetectedGpu:
    """The card that runs the bundle, of several the one with the most memory. Raises BundleError when there is none."""
    target = bundle.manifest.target
    fitting = [card for card in cards if card.sm == target.sm]
    if fitting:
        return max(fitting, key=lambda card: card.memory_bytes)
    start = f"{bundle.directory} was built for {target.name} (SM {target.sm}) and this machine has"
    if not cards:
        raise BundleError(f"{start} no NVIDIA GPU; add --provider cpu to use the CPU.")
    found = ", ".join(f"{card.name} (SM {card.sm})" for card in cards)
    raise BundleError(f"{start} {found}; build it for this one with `{build_command(bundle, _target_name(cards[0]))}`.")


def check_version(bundle: Bundle, installed: str) -> None:
    """Raises BundleError when another TensorRT is installed: an engine runs only in the version that built it."""
    target = bundle.manifest.target
    if installed != target.backend_version:
        raise BundleError(
            f"{bundle.directory} was built with {target.backend} {target.backend_version} and {installed} is installed "
            f"here; install that version, or build it again with `{build_command(bundle, target.name)}`."
        )


def check_machine(bundle: Bundle, cards: list[DetectedGpu], installed: str) -> DetectedGpu:
    """The card that runs the bundle. Raises BundleError, before anything is loaded, for another card or TensorRT."""
    card = fitting_card(bundle, cards)
    check_version(bundle, installed)
    return card


def _target_name(card: DetectedGpu) -> str:
    try:
        return target_of(card).name
    except CloverError:
        return "cpu"
