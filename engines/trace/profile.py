"""Where the time of a step goes, by part of the model: ONNX Runtime's node times, added up."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clover.engines.bundle import Bundle
from clover.engines.cpu_cache import fits_in_memory
from clover.engines.open import PREFILL_ROWS
from clover.engines.trace.routing import replay
from clover.runtime.ort_session import OrtSession
from clover.runtime.session import SequenceRows

# In the order of a step. The first: what each row is, masks, rotary angles.
PARTS = ("rows and rope", "embed", "GDN", "attention", "routing", "experts", "shared expert", "lm_head", "other")
_SCOPES = {
    "rows": PARTS[0],
    "rope": PARTS[0],
    "embed": "embed",
    "head": "lm_head",
    "gdn": "GDN",
    "attention": "attention",
}
MOE = "moe"


def parts_of_nodes(graph: Any) -> dict[str, str]:
    """The part of the model that each node of a step graph (onnx.GraphProto) belongs to, by the node's name.

    In the expert layer, what comes before the routing is settled is `routing`, what depends on it is `experts`, the rest
    is the shared expert.
    """
    parts: dict[str, str] = {}
    routed: set[str] = set()  # values that depend on the routing of the layer at hand
    settled = False
    for node in graph.node:
        words = node.name.split(".")
        scope = words[2] if words[0] == "layers" else words[0]
        if scope != MOE:
            parts[node.name] = _SCOPES.get(scope, "other")
            routed, settled = set(), False
        elif not settled:
            parts[node.name] = "routing"
            settled = f"layers.{words[1]}.routing" in node.output
            routed = set(node.output)
        elif routed & set(node.input):
            parts[node.name] = "experts"
            routed |= set(node.output)
        else:
            parts[node.name] = "shared expert"
    return parts


def part_times(
    bundle: Bundle,
    rows: Sequence[SequenceRows],
    *,
    max_context: int,
    threads: int | None = None,
    repeats: int = 1,
) -> list[dict[str, float]]:
    """Milliseconds of every part in each step of a reply, run again on the CPU with the profiler on, PARTS in order.

    Of `repeats` runs the least time of each node in each step. The profiler's own time, which is what the least of all
    nodes takes, is taken off.
    """
    import onnx

    parts = parts_of_nodes(onnx.load_model_from_string(bundle.graph_bytes).graph)
    most = max(PREFILL_ROWS, 2 * max(bundle.manifest.block_sizes), *(len(r.tokens) for r in rows))
    with tempfile.TemporaryDirectory() as folder:
        session = OrtSession(
            bundle.graph_bytes,
            bundle.directory,
            max_context=max_context,
            max_rows=most,
            threads=threads,
            prepack=fits_in_memory(bundle),
            profile=Path(folder) / "profile",
        )
        try:
            for _ in range(repeats):
                replay(session, rows)
            events = json.loads(session.end_profile().read_text())
        finally:
            session.close()
    return _add_up(events, parts, len(rows))


def _add_up(events: Sequence[Mapping[str, Any]], parts: Mapping[str, str], steps: int) -> list[dict[str, float]]:
    starts = sorted(e["ts"] for e in events if e["name"] == "model_run")
    least: dict[tuple[int, str], int] = {}  # microseconds, by step and node
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            node = event["name"].removesuffix("_kernel_time").partition("/")[0]  # a fused one: its node's, / and more
            key = ((bisect_right(starts, event["ts"]) - 1) % steps, node)
            least[key] = min(least.get(key, event["dur"]), event["dur"])
    own = min(least.values())
    found: list[Counter[str]] = [Counter() for _ in range(steps)]
    for (step, node), duration in least.items():
        found[step][parts.get(node, "other")] += duration - own
    return [{part: found[step][part] / 1e3 for part in PARTS if part in found[step]} for step in range(steps)]
