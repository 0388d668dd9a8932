"""Measured replies against the roofline: experts counted in an untimed pass, then bytes and operations of every step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clover.engines.bench.measure import Run, Spread
from clover.engines.bundle import Bundle
from clover.engines.gpus import Gpu
from clover.engines.planner.measured import MeasuredStep, floor_seconds, machine_on
from clover.engines.planner.roofline import Machine
from clover.engines.trace.routing import RoutingSession, open_routing_session
from clover.runtime.errors import CloverError
from clover.runtime.session import SequenceRows

DEFAULT_CARDS = ("rtx-5070-ti", "h200")


@dataclass(frozen=True)
class CountedPlan:
    """The steps of a reply with their experts.

    developing: experts a layer, one number a step, of the rows that develop the reply: previews, drafts that are verified,
    single tokens. What only commits the prompt or a block is not among them.
    """

    steps: tuple[MeasuredStep, ...]
    developing: tuple[float, ...]


@dataclass(frozen=True)
class Roofline:
    """One setting: experts that developing rows touch in a layer, the share of the roofline of the machine it ran on, and
    the tokens/s that the roofline of a card allows the same steps."""

    experts_per_layer: Spread | None
    percent: Spread | None  # None: the machine's roofline is not known
    cards: Mapping[str, float] = field(default_factory=dict)


def count_experts(
    bundle: Bundle,
    plans: Sequence[Sequence[SequenceRows]],
    *,
    max_context: int,
    max_rows: int,
    threads: int | None,
    progress: Callable[[int, int], None] | None = None,
) -> list[CountedPlan]:
    """Runs the steps of replies again, on the CPU with the routing given out."""
    session = open_routing_session(bundle, max_context=max_context, threads=threads, max_rows=max_rows)
    found: list[CountedPlan] = []
    try:
        for rows in plans:
            if progress:
                progress(len(found), len(plans))
            found.append(_count(session, rows))
        if progress:
            progress(len(found), len(plans))
    finally:
        session.close()
    return found


def _count(session: RoutingSession, plan: Sequence[SequenceRows]) -> CountedPlan:
    session.reset(0)
    steps, developing = [], []
    for rows in plan:
        session.step([rows])
        preview = len(rows.tokens) - rows.commit
        distinct = float(session.experts.pop().mean())
        context = session.position(0) - rows.commit
        steps.append(MeasuredStep(rows.commit, preview, len(rows.logit_rows), context, distinct))
        if preview:
            developing.append(float(session.touched.pop()[:, 0].mean()))
            session.masks.clear()
        elif rows.tentative or rows.commit == 1:
            developing.append(distinct)
    return CountedPlan(tuple(steps), tuple(developing))


def machines_on(
    bundle: Bundle, cards: Sequence[Gpu], max_context: int | None
) -> tuple[dict[str, Machine], dict[str, str]]:
    """The bundle's model on each card where it fits, and why not on the others."""
    machines, reasons = {}, {}
    for card in cards:
        try:
            machines[card.name] = machine_on(
                bundle.manifest.config, bundle.manifest.precision_plan, card, max_context=max_context
            )
        except CloverError as error:
            reasons[card.name] = str(error)
    return machines, reasons


def against_roofline(
    runs: Mapping[str, Sequence[Run]],
    counted: Sequence[CountedPlan],
    here: Machine | None,
    cards: Mapping[str, Machine],
) -> dict[str, Roofline]:
    """Every setting against the roofline. `counted` by the runs' plans; `here`: what they ran on, None: not known."""
    floors = [floor_seconds(here, plan.steps) for plan in counted] if here else None
    on_cards = {name: [floor_seconds(machine, plan.steps) for plan in counted] for name, machine in cards.items()}
    found = {}
    for name, own in runs.items():
        tokens = sum(r.tokens for r in own)
        developing = [counted[r.plan].developing for r in own]
        found[name] = Roofline(
            Spread.of([statistics.mean(d) for d in developing if d]),
            Spread.of([100 * floors[r.plan] / r.seconds for r in own]) if floors else None,
            {card: tokens / sum(seconds[r.plan] for r in own) for card, seconds in on_cards.items()},
        )
    return found


def to_json(roofline: Roofline) -> dict[str, Any]:
    return {
        "experts_per_layer": None if roofline.experts_per_layer is None else vars(roofline.experts_per_layer),
        "roofline_percent": None if roofline.percent is None else vars(roofline.percent),
        "roofline_tokens_per_second": dict(roofline.cards),
    }
