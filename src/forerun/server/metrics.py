"""What the server counts, for Prometheus.

Knows: names and labels of metrics, and how figures of finished requests add to them. Does not know: HTTP, the engine
beyond the figures it publishes. Each server has a registry of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forerun.core import RequestStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
LENGTHS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0)
TIER_COUNTS = {
    "stored_blocks": "Blocks of KV written to a tier.",
    "stored_bytes": "Bytes of these.",
    "loaded_blocks": "Blocks of KV read from a tier.",
    "loaded_bytes": "Bytes of these.",
    "evicted_blocks": "Blocks a tier dropped to make room.",
    "corrupted_blocks": "Blocks that were damaged, and computed again.",
    "failed_writes": "Errors of writing, after each of which a tier rests.",
    "used_bytes": "Bytes a tier takes, as last counted by this process.",
}
SPEEDUPS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is now."""

    num_running: int
    num_waiting: int
    kv_used: float  # share of the KV cache in use
    healthy: bool
    phase_s: Mapping[str, float]  # seconds since the start by phase of the step
    num_steps: int
    drafters: Mapping[str, tuple[int, float]]  # errors so far, and seconds for which it is not used
    tiers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # by tier of KV: what it counts
    num_tier_hits: int = 0  # requests whose prefix came back from a tier


class Metrics:
    """Counters and histograms of one server, and the gauges read from its engine when asked."""

    def __init__(self, read_load: Callable[[], EngineLoad]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_LoadCollector(read_load))
        self.http = self._counter("http_requests", "HTTP requests by path and status.", "path", "status")
        self.finished = self._counter(
            "samples_finished", "Samples by how they ended: stop, length, abort, deadline or error.", "reason"
        )
        self.prompt = self._counter("prompt_tokens", "Prompt tokens of samples that ended.")
        self.generated = self._counter("generation_tokens", "Tokens written.")
        self.cached = self._counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache.")
        self.drafted = self._counter("draft_tokens", "Tokens drafted, by drafter.", "drafter")
        self.accepted = self._counter("accepted_tokens", "Drafted tokens that were accepted, by drafter.", "drafter")
        self.wasted = self._counter("wasted_nodes", "Drafted tokens that were verified in vain, by drafter.", "drafter")
        self.preemptions = self._counter("preemptions", "Times a request lost its blocks and began again.")
        self.errors = self._counter("engine_errors", "Steps of the engine that failed.")
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self.tpot = self._histogram("time_per_output_token_seconds", "Between tokens after the first.", TOKEN_SECONDS)
        self.queue = self._histogram("queue_seconds", "From arrival to the first step.", SECONDS)
        self.grammar = self._histogram("grammar_seconds", "Until a request's grammar was there.", SECONDS)
        self.duration = self._histogram("request_seconds", "From arrival to the last token.", SECONDS)
        self.tau = self._histogram("acceptance_length", "Tokens a target pass, by sample.", LENGTHS)
        self.speedup = self._histogram(
            "estimated_speedup", "Decoding speed over plain decoding at that load, by sample with drafts.", SPEEDUPS
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"forerun_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"forerun_{name}", text, buckets=buckets, registry=self.registry)

    def sample_finished(self, stats: RequestStats, reason: str) -> None:
        """Count one sample that ended for `reason`."""
        self.finished.labels(reason).inc()
        self.prompt.inc(stats.num_prompt_tokens)
        self.cached.inc(stats.num_cached_tokens)
        self.generated.inc(stats.num_tokens - stats.num_elsewhere)
        self.preemptions.inc(stats.num_preemptions)
        for name, count in stats.drafters.items():
            self.drafted.labels(name).inc(count.drafted)
            self.accepted.labels(name).inc(count.accepted)
            self.wasted.labels(name).inc(count.drafted - count.accepted)
        self._observe_times(stats)
        if stats.estimated_speedup is not None:
            self.speedup.observe(stats.estimated_speedup)

    def _observe_times(self, stats: RequestStats) -> None:
        num_tokens = stats.num_tokens - stats.num_elsewhere
        if num_tokens == 0:
            return
        if not stats.num_elsewhere:  # else another engine wrote the first token, after a wait of its own
            self.queue.observe(stats.queue_s)
            self.ttft.observe(stats.ttft_s)
        self.duration.observe(stats.ttft_s + stats.decode_s)
        self.tau.observe(stats.acceptance_length)
        if num_tokens > 1:
            self.tpot.observe(stats.decode_s / (num_tokens - 1))

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)


class _LoadCollector(Collector):
    """Gauges that are read only when the metrics are scraped."""

    def __init__(self, read: Callable[[], EngineLoad]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        load = self._read()
        gauges = {
            "requests_running": ("Samples the engine works on.", load.num_running),
            "requests_waiting": ("Samples that wait for room.", load.num_waiting),
            "kv_cache_usage_ratio": ("Share of the KV cache in use.", load.kv_used),
            "healthy": ("1 while the engine works.", float(load.healthy)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"forerun_{name}", text, value=value)
        phases = CounterMetricFamily("forerun_step_seconds", "Seconds by phase of the step.", labels=["phase"])
        for phase, seconds in load.phase_s.items():
            phases.add_metric([phase], seconds)
        yield phases
        errors = CounterMetricFamily("forerun_drafter_errors", "Calls of a drafter that failed.", labels=["drafter"])
        resting = GaugeMetricFamily(
            "forerun_drafter_resting", "1 while a drafter is not asked after errors.", labels=["drafter"]
        )
        for name, (num_errors, rest_s) in load.drafters.items():
            errors.add_metric([name], num_errors)
            resting.add_metric([name], float(rest_s > 0))
        yield from (errors, resting)
        yield CounterMetricFamily("forerun_steps", "Steps of the engine.", value=load.num_steps)
        yield from _tier_metrics(load)


def _tier_metrics(load: EngineLoad) -> Iterator[Metric]:
    """Nothing for an engine without tiers of KV."""
    if not load.tiers:
        return
    names = {name: text for name, text in TIER_COUNTS.items() if name != "used_bytes"}
    for name, text in names.items():
        counts = CounterMetricFamily(f"forerun_kv_tier_{name}", text, labels=["tier"])
        for tier, counted in load.tiers.items():
            counts.add_metric([tier], counted[name])
        yield counts
    used = GaugeMetricFamily("forerun_kv_tier_used_bytes", TIER_COUNTS["used_bytes"], labels=["tier"])
    for tier, counted in load.tiers.items():
        used.add_metric([tier], counted["used_bytes"])
    yield used
    yield CounterMetricFamily("forerun_kv_tier_hits", "Requests whose prefix a tier had.", value=load.num_tier_hits)
