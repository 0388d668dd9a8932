"""Opens the session that runs a bundle, whatever its backend."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, get_args

from clover.engines.bundle import Bundle, Verify
from clover.runtime.errors import BundleError, RequestError
from clover.runtime.session import StepSession

log = logging.getLogger("clover")

PREFILL_ROWS = 256  # rows of one prefill chunk on the CPU
MAX_THREADS = 512
Provider = Literal["tensorrt", "cpu", "cuda"]
PROVIDERS: dict[Provider, tuple[str, ...]] = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
}


def choose_provider(bundle: Bundle, asked: str | None) -> Provider:
    """What runs a bundle. Raises BundleError when it can't, RequestError for a provider that does not exist.

    Every bundle holds ONNX Runtime's graph, so that one with a GPU engine also runs on the CPU, and through ONNX
    Runtime's CUDA provider where that is installed: slower, since the state crosses the link with every step.
    """
    for known in get_args(Provider):
        if asked == known:
            chosen: Provider = known
            break
    else:
        if asked is not None:
            raise RequestError(
                "provider", f"provider {asked!r} is unknown; choose from {', '.join(get_args(Provider))}."
            )
        chosen = "tensorrt" if bundle.manifest.engines else "cpu"
    if chosen == "tensorrt" and not bundle.manifest.engines:
        raise BundleError(f"{bundle.directory} has no GPU engine; build one with `clover build … --gpu CARD`.")
    if chosen == "cuda":
        import onnxruntime

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise BundleError(
                f"onnxruntime {onnxruntime.__version__} here has no CUDA provider; install onnxruntime-gpu in its place, or "
                "use provider cpu."
            )
    return chosen


def check_threads(threads: int | None) -> None:
    """Raises RequestError for a number of threads that no session takes. None: one a core."""
    if threads is not None and not (isinstance(threads, int) and 1 <= threads <= MAX_THREADS):
        raise RequestError("threads", f"threads is {threads}; it must be an integer from 1 to {MAX_THREADS}.")


def open_session(
    bundle: Bundle,
    *,
    sequences: int = 1,
    max_context: int | None = None,
    threads: int | None = None,
    cache: bool = True,
    verify: Verify = False,
    provider: Provider | None = None,
) -> StepSession:
    """A session with `sequences` slots. `cache`: map weights packed for this CPU, packing them on first use;
    `verify`: check the hashes of those files as Bundle.open does. `provider`: what runs the bundle; default: its GPU
    engine where it has one, else the CPU.

    Raises BundleError when this machine can't run the bundle, RequestError for a context longer than the model's.
    """
    manifest = bundle.manifest
    if max_context is not None and not (isinstance(max_context, int) and 1 <= max_context <= manifest.max_context):
        raise RequestError(
            "max_context",
            f"max_context is {max_context}; this bundle holds contexts of 1 to {manifest.max_context} tokens.",
        )
    check_threads(threads)
    chosen = choose_provider(bundle, provider)
    if chosen == "tensorrt":
        from clover.engines.tensorrt.open import open_gpu_session

        return open_gpu_session(bundle, sequences=sequences, max_context=max_context)
    from clover.engines.cpu_cache import fits_in_memory, packed_model
    from clover.engines.cpu_memory import reused_buffers
    from clover.runtime.ort_session import OrtSession

    def session(model: bytes | Path, weights: Path | None, *, prepack: bool = True) -> OrtSession:
        return OrtSession(
            model,
            weights,
            sequences=sequences,
            max_context=max_context or manifest.max_context,
            max_rows=max(PREFILL_ROWS, 2 * max(manifest.block_sizes)),
            threads=threads,
            providers=PROVIDERS[chosen],
            prepack=prepack,
        )

    packed = packed_model(bundle, verify=verify) if cache and chosen == "cpu" else None
    if packed:
        try:
            with reused_buffers():
                return session(packed, None)
        except MemoryError:
            raise
        except Exception as error:  # onnxruntime has no one class of errors
            log.warning("the packed weights in %s can't be used (%s); going on without", packed.parent, error)
    return session(bundle.graph_bytes, bundle.directory, prepack=chosen != "cpu" or fits_in_memory(bundle))
