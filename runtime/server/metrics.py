"""Numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from clover.runtime.scheduler.scheduler import Scheduler, StepReport
from clover.runtime.server.generation import Usage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        r = self._registry
        self._requests = Counter("clover_requests", "HTTP requests answered.", ["route", "status"], registry=r)
        self._seconds = Histogram("clover_request_seconds", "Request to last byte.", buckets=_SECONDS, registry=r)
        self._first = Histogram("clover_first_token_seconds", "Request to first token.", buckets=_SECONDS, registry=r)
        self._step = Histogram("clover_step_seconds", "One step of the engine.", buckets=_SECONDS, registry=r)
        self._engine = Counter("clover_engine_seconds", "Steps, only the time inside the engine.", registry=r)
        self._step_sequences = Counter("clover_step_sequences", "Sequences in all steps.", registry=r)
        self._step_rows = Counter("clover_step_rows", "Rows in all steps, without padding.", registry=r)
        self._prompt = Counter("clover_prompt_tokens", "Prompt tokens of finished requests.", registry=r)
        self._completion = Counter("clover_completion_tokens", "Reply tokens of finished requests.", registry=r)
        self._blocks = Counter("clover_blocks", "Blocks begun by finished requests.", registry=r)
        self._reply_steps = Counter("clover_reply_steps", "Steps of finished requests.", registry=r)
        self._cancelled = Counter("clover_cancelled", "Requests whose client left.", registry=r)

    def watch(self, scheduler: Scheduler) -> None:
        """Reads queue, slots and cache when asked."""
        self._registry.register(_SchedulerCollector(scheduler))

    def step(self, report: StepReport) -> None:
        self._step.observe(report.seconds)
        self._engine.inc(report.engine_seconds)
        self._step_sequences.inc(report.sequences)
        self._step_rows.inc(report.rows)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.observe(seconds)

    def refused(self, status: int) -> None:
        """A connection that was answered before there was a request."""
        self._requests.labels("none", str(status)).inc()

    def reply(self, usage: Usage, first_token: float | None) -> None:
        self._prompt.inc(usage.prompt_tokens)
        self._completion.inc(usage.completion_tokens)
        self._blocks.inc(usage.blocks)
        self._reply_steps.inc(usage.steps)
        if first_token is not None:
            self._first.observe(first_token)

    def cancelled(self) -> None:
        self._cancelled.inc()

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class _SchedulerCollector:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        s, cache = self._scheduler, self._scheduler.cache
        yield GaugeMetricFamily("clover_running", "Replies in slots.", value=s.live)
        yield GaugeMetricFamily("clover_queued", "Replies that wait for a slot.", value=s.queued)
        yield GaugeMetricFamily("clover_cache_bytes", "Bytes of kept conversation states.", value=cache.nbytes)
        yield GaugeMetricFamily("clover_cache_states", "Kept conversation states.", value=len(cache))
        counts = cache.counts
        yield CounterMetricFamily("clover_cache_hits", "Prompts that continued a kept state.", value=counts.hits)
        yield CounterMetricFamily("clover_cache_misses", "Prompts that did not.", value=counts.misses)
        yield CounterMetricFamily(
            "clover_cache_reused_tokens", "Prompt tokens not computed again.", value=counts.reused_tokens
        )
        yield CounterMetricFamily("clover_cache_evictions", "States dropped for room.", value=counts.evictions)
