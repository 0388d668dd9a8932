"""Opens the session that runs a bundle, whatever its backend."""

from __future__ import annotations

import logging
from pathlib import Path

from clover.engines.bundle import Bundle
from clover.runtime.errors import BundleError, RequestError
from clover.runtime.session import StepSession

log = logging.getLogger("clover")

PREFILL_ROWS = 256  # rows of one prefill chunk on the CPU


def open_session(
    bundle: Bundle,
    *,
    sequences: int = 1,
    max_context: int | None = None,
    threads: int | None = None,
    cache: bool = True,
    verify: bool = False,
) -> StepSession:
    """A session with `sequences` slots. `cache`: map weights packed for this CPU, packing them on first use;
    `verify`: check the hashes of those files too.

    Raises BundleError when this machine can't run the bundle, RequestError for a context longer than the model's.
    """
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
    from clover.engines.cpu_cache import packed_model
    from clover.runtime.ort_session import OrtSession

    def session(model: bytes | Path, weights: Path | None) -> OrtSession:
        return OrtSession(
            model,
            weights,
            sequences=sequences,
            max_context=max_context or manifest.max_context,
            max_rows=max(PREFILL_ROWS, 2 * max(manifest.block_sizes)),
            threads=threads,
        )

    packed = packed_model(bundle, verify=verify) if cache else None
    if packed:
        try:
            return session(packed, None)
        except MemoryError:
            raise
        except Exception as error:  # onnxruntime has no one class of errors
            log.warning("the packed weights in %s can't be used (%s); going on without", packed.parent, error)
    return session(bundle.graph_bytes, bundle.directory)
