"""Opens the session that runs a bundle, whatever its backend."""

from __future__ import annotations

from clover.engines.bundle import Bundle
from clover.runtime.errors import BundleError, RequestError
from clover.runtime.session import StepSession

PREFILL_ROWS = 256  # rows of one prefill chunk on the CPU


def open_session(
    bundle: Bundle,
    *,
    sequences: int = 1,
    max_context: int | None = None,
    threads: int | None = None,
    cache: bool = True,
) -> StepSession:
    """A session with `sequences` slots. Raises BundleError when this machine can't run the bundle, RequestError for
    a context longer than the model's."""
    manifest = bundle.manifest
    if max_context is not None and not 1 <= max_context <= manifest.max_context:
        raise RequestError(
            "max_context",
            f"max_context is {max_context}; this bundle holds contexts of 1 to {manifest.max_context} tokens.",
        )
    if manifest.target.backend != "onnxruntime":
        raise BundleError(
            f"{bundle.directory} was built for {manifest.target.name} ({manifest.target.backend}), which this machine can't run; "
            "build one for the CPU with `clover build CHECKPOINT -o BUNDLE --gpu cpu --int4`."
        )
    from clover.runtime.ort_session import OrtSession

    return OrtSession(
        bundle.graph_bytes,
        bundle.directory,
        sequences=sequences,
        max_context=max_context or manifest.max_context,
        max_rows=max(PREFILL_ROWS, 2 * max(manifest.block_sizes)),
        threads=threads,
    )
