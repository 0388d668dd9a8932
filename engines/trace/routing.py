"""A bundle's engine with its routing given out: which experts every step touches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.engines.bundle import Bundle
from clover.engines.cpu_cache import fits_in_memory
from clover.engines.observed_session import ObservedSession, give_out
from clover.engines.open import PREFILL_ROWS
from clover.plugins.moe_coreset_routing.spec import USED_LOGIT
from clover.runtime.errors import BundleError
from clover.runtime.ort_session import OrtSession
from clover.runtime.session import SequenceRows


class RoutingSession(ObservedSession):
    """A session of one sequence that also keeps the experts of each step, layer by layer.

    Of all rows, a step at a time: `experts`. Of preview rows, for steps that have any: `touched` and `masks`.
    """

    def __init__(self, model: bytes, weights: Path, layers: int, top_k: int, **options: Any) -> None:
        super().__init__(model, weights, routing_values(layers), **options)
        self._top_k = top_k
        self.experts: list[npt.NDArray[np.int64]] = []  # [layers]: distinct experts used by any row
        self.touched: list[npt.NDArray[np.int64]] = []  # [layers, 2]: used, and the router's own choice
        self.masks: list[npt.NDArray[np.bool_]] = []  # [layers, experts]: used

    def observe(self, rows: Sequence[SequenceRows], values: dict[str, npt.NDArray[Any]]) -> None:
        (row,) = rows
        preview = slice(row.commit, len(row.tokens))
        given = list(values.values())
        experts, counts, masks = [], [], []
        for routing, router in zip(given[::2], given[1::2], strict=True):
            used = routing.reshape(-1, routing.shape[-1]) > USED_LOGIT  # [rows, E]
            experts.append(int(used.any(axis=0).sum()))
            if preview.start < preview.stop:
                own = router.reshape(used.shape)[preview]
                free = np.argsort(-own, axis=1, kind="stable")[:, : self._top_k]
                masks.append(used[preview].any(axis=0))
                counts.append((int(masks[-1].sum()), len(np.unique(free))))
        self.experts.append(np.array(experts))
        if masks:
            self.touched.append(np.array(counts))
            self.masks.append(np.stack(masks))


def routing_values(layers: int) -> list[str]:
    """Names of the values that show the routing: of each layer what is used, then the router's logits."""
    return [f"layers.{n}.{what}" for n in range(layers) for what in ("routing", "router_logits")]


def routing_graph(bundle: Bundle) -> bytes:
    """The bundle's step graph with every layer's routing given out. Raises BundleError when it doesn't show it."""
    import onnx

    model = onnx.load_model_from_string(bundle.graph_bytes)
    try:
        give_out(model, routing_values(bundle.manifest.config.num_hidden_layers))
    except KeyError as error:
        raise BundleError(
            f"the step graph of {bundle.directory} does not show {error.args[0]}; build the bundle again."
        ) from None
    return bytes(model.SerializeToString())


def open_routing_session(
    bundle: Bundle, *, max_context: int, threads: int | None = None, max_rows: int = 0
) -> RoutingSession:
    """A session of `routing_graph` on the CPU; steps of at least `max_rows` rows. Raises BundleError."""
    config = bundle.manifest.config
    return RoutingSession(
        routing_graph(bundle),
        bundle.directory,
        config.num_hidden_layers,
        config.num_experts_per_tok,
        max_context=max_context,
        max_rows=max(PREFILL_ROWS, 2 * max(bundle.manifest.block_sizes), max_rows),
        threads=threads,
        prepack=fits_in_memory(bundle),
    )


def replay(session: OrtSession, rows: Sequence[SequenceRows]) -> None:
    """Runs the steps of a reply once more, from an empty state of slot 0."""
    session.reset(0)
    for step in rows:
        session.step([step])
