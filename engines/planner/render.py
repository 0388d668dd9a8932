"""A plan for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from clover.engines.planner.memory import Component
from clover.engines.planner.plan import Plan
from clover.engines.planner.roofline import BlockPerformance, StepCost


def render_plan(plan: Plan) -> RenderableType:
    """Verdict, memory table, step costs and throughput per block size, assumptions and notes."""
    parts: list[RenderableType] = [_verdict(plan), _memory(plan)]
    for performance in plan.performance:
        parts += [_steps(plan, performance), _throughput(performance), Text(_break_even(performance))]
    parts += [Text(f"assumed: {line}", style="dim") for line in plan.assumptions]
    parts += [Text(f"note: {line}") for line in plan.notes]
    return Group(*parts)


def _verdict(plan: Plan) -> Text:
    p = plan.placement
    head = f"{_count(plan.counts.total)} parameters, {plan.precision.name}, on {plan.gpu.title} ({plan.backend}): "
    if plan.problem is not None:
        return Text(f"{head}does not fit. {plan.problem}", style="red")
    where = (
        "all experts on the card"
        if not p.experts_host
        else f"{p.experts_host:,} of {plan.experts_total:,} experts on the host"
    )
    if plan.gpu.is_cpu:
        where = "everything in RAM"
    limits = f"Largest context {plan.largest_context:,} tokens"
    if p.experts_host and plan.largest_context_on_card:
        limits += f" ({plan.largest_context_on_card:,} with every expert on the card)"
    return Text(f"{head}fits, {where}. {limits}.", style="green")


def _count(n: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if n >= scale / 10:
            return f"{n / scale:.2f} {unit}"
    return f"{n:,}"


def _memory(plan: Plan) -> Table:
    p = plan.placement
    unit, scale = ("GB", 1e9) if plan.counts.total >= 1e8 else ("MB", 1e6)
    table = Table(title="Memory")
    table.add_column("what", no_wrap=True)
    table.add_column(unit, justify="right")
    table.add_column("how much")

    def add(components: tuple[Component, ...], title: str, total: int, capacity: int) -> None:
        for c in components:
            table.add_row(c.name, f"{c.nbytes / scale:,.3f}", c.detail)
        limit = f"of {capacity / scale:,.3f} {unit}"
        table.add_row(title, f"{total / scale:,.3f}", limit, style="bold", end_section=True)

    add(p.device, "total in RAM" if plan.gpu.is_cpu else "total on the card", p.device_total, p.device_capacity)
    if p.host:
        add(p.host, "total pinned on the host", p.host_total, p.host_capacity)
    return table


def _steps(plan: Plan, performance: BlockPerformance) -> Table:
    b = performance
    table = Table(title=f"Floor of a step, block size {b.block_size}, {plan.shape.sequences} sequence(s)")
    table.add_column("run", no_wrap=True)
    for heading in ("rows", "experts/layer", "on card", "dense GB", "experts GB", "link GB", "GFLOP", "floor ms"):
        table.add_column(heading, justify="right")
    table.add_column("bound by", no_wrap=True)
    for step in (b.prefill, b.denoise, b.commit_and_preview, b.autoregressive, b.verify):
        table.add_row(*_step_row(step))
    return table


def _step_row(s: StepCost) -> tuple[str, ...]:
    return (
        s.name, str(s.rows), f"{s.distinct:.1f}", f"{s.hit_rate:.0%}", f"{s.dense_bytes / 1e9:.2f}",
        f"{s.card_expert_bytes / 1e9:.2f}", f"{s.host_expert_bytes / 1e9:.2f}",
        f"{(s.dense_flops + s.expert_flops) / 1e9:,.0f}", f"{s.seconds * 1e3:.2f}", s.bound,
    )  # fmt: skip


def _throughput(performance: BlockPerformance) -> Table:
    table = Table(title="Tokens per second at most, by distinct experts per layer (rows) and tokens per step (columns)")
    table.add_column("experts/layer", justify="right")
    for n in performance.tokens_per_step:
        table.add_column(str(n), justify="right")
    for row in performance.throughput:
        name = f"{row.distinct:.1f} (expected)" if row.expected else f"{row.distinct:.0f}"
        table.add_row(name, *(f"{v:,.0f}" for v in row.tokens_per_second), style="bold" if row.expected else "")
    return table


def _break_even(performance: BlockPerformance) -> str:
    plain = f"Autoregressive decoding: at most {performance.autoregressive_tokens_per_second:,.0f} tokens/s."
    if performance.break_even is None:
        return f"{plain} Blocks are slower at any number of tokens per step."
    return f"{plain} Blocks are faster from {performance.break_even:.2f} tokens per step."
