"""Opens a GPU bundle's session, after everything that can be wrong has been checked by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clover.engines.bundle import Bundle
from clover.engines.tensorrt.backend import load
from clover.engines.tensorrt.checks import check_parts
from clover.engines.tensorrt.kernels import OPERATORS, make_host
from clover.engines.tensorrt.machine import backend_of, check_machine, detected_cards, installed_version
from clover.exporter.weight_index import read_weight_index
from clover.runtime.errors import RequestError
from clover.runtime.session import StepSession

RESERVE = 512 * 2**20  # bytes left free on the card when it decides how many experts go there


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
    card = check_machine(
        bundle, given.get("cards") or detected_cards(), given.get("version") or installed_version(backend)
    )
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
