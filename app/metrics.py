"""Prometheus metrics: one table of names, and the calls that fill it.

Names follow vLLM's under a prefix of our own, so `--metrics-prefix vllm:` serves its dashboards. Prometheus adds
`_total` to the name of a counter. Every `Metrics` has its own registry, because one process may have several servers.
"""

import logging
import time
from bisect import bisect_left
from collections import Counter as Sums
from collections.abc import Iterator
from itertools import accumulate
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from app.messages import SpecStep, StepOutput, StepStats

logger = logging.getLogger(__name__)

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metric(NamedTuple):
    """Row of the table. A histogram is of seconds."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    label: str | None = None


TABLE = (
    Metric("num_requests_running", "gauge", "Requests that the last engine step worked on or could have"),
    Metric("num_requests_waiting", "gauge", "Requests queued in the engine"),
    Metric("kv_cache_usage_perc", "gauge", "KV pages in use, 0 to 1"),
    Metric("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache"),
    Metric("prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache"),
    Metric("prompt_tokens", "counter", "Prompt tokens of requests handed to the engine"),
    Metric("generation_tokens", "counter", "Tokens emitted by the engine"),
    Metric("request_success", "counter", "Requests ended, by reason", "finished_reason"),
    Metric("time_to_first_token_seconds", "histogram", "From arrival to the first token"),
    Metric("inter_token_latency_seconds", "histogram", "Per token after the first; tokens of a step share its time"),
    Metric("e2e_request_latency_seconds", "histogram", "From arrival to the last token"),
    Metric("decode_rows", "counter", "Rows that decoding sequences had in a step, the anchors included"),
    Metric("decode_sequences", "counter", "Decoding sequences of every step, by whether they drafted", "drafting"),
    Metric("spec_decode_num_drafts", "counter", "Steps of a request that verified at least one draft token"),
    Metric("spec_decode_num_draft_tokens", "counter", "Draft tokens that were verified"),
    Metric("spec_decode_num_accepted_tokens", "counter", "Draft tokens accepted, without the bonus token"),
    Metric("spec_decode_num_accepted_tokens_per_pos", "counter", "Accepted draft tokens by position", "position"),
    Metric("spec_decode_num_verified_tokens_per_pos", "counter", "Verified draft tokens by position", "position"),
    Metric("preemptions", "counter", "Requests preempted for want of KV pages"),
    Metric("engine_restarts", "counter", "Engine processes started because the one before had ended or hung"),
    Metric("requests_not_finite", "counter", "Requests ended because the target's logits were NaN or infinite"),
    Metric("requests_dropped", "counter", "Requests ended because a step failed on them alone"),
    Metric("requests_turned_away", "counter", "Requests answered 429 or 503 before any work was done, by code", "code"),
    Metric("request_refused", "counter", "Requests refused because of a field, by field", "param"),
    Metric("step_seconds", "histogram", "Engine steps by kind", "kind"),
)


class Metrics:
    """Every metric of one server. `prefix` stands before each name ("dflash:", "vllm:")."""

    def __init__(self, prefix: str = "dflash:") -> None:
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for name, kind, text, label in TABLE:
            labels = [label] if label else []
            if kind == "counter":
                self._counters[name] = Counter(prefix + name, text, labels, registry=self._registry)
            elif kind == "gauge":
                self._gauges[name] = Gauge(prefix + name, text, labels, registry=self._registry)
            elif name == "inter_token_latency_seconds":
                self._token_latencies = _TokenLatencies(prefix + name, text)
                self._registry.register(self._token_latencies)
            else:
                self._histograms[name] = Histogram(
                    prefix + name, text, labels, registry=self._registry, buckets=_LATENCY
                )
        self._engine_totals: dict[str, int] = {}
        self._last_stats: StepStats | None = None
        self._since_log = Sums[str]()
        self._logged_at = time.monotonic()

    def render(self) -> bytes:
        """Return the exposition text for GET /metrics."""
        return generate_latest(self._registry)

    def request_accepted(self, prompt_tokens: int) -> None:
        self._counters["prompt_tokens"].inc(prompt_tokens)

    def request_refused(self, param: str) -> None:
        self._counters["request_refused"].labels(param).inc()

    def turned_away(self, code: str) -> None:
        self._counters["requests_turned_away"].labels(code).inc()

    def request_ended(self, reason: str, seconds: float) -> None:
        self._counters["request_success"].labels(reason).inc()
        self._histograms["e2e_request_latency_seconds"].observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._histograms["time_to_first_token_seconds"].observe(seconds)

    def later_tokens(self, seconds: float, count: int) -> None:
        """Observe `count` tokens of one step, which share the `seconds` since the token before them."""
        self._token_latencies.observe(seconds / count, count)

    def engine_restarted(self) -> None:
        self._counters["engine_restarts"].inc()

    def engine_ended(self) -> None:
        """Set the gauges to 0. The next engine process counts from 0 again."""
        self._engine_totals = {}
        for gauge in self._gauges.values():
            gauge.set(0)

    def step(self, output: StepOutput) -> None:
        """Count one engine step of the whole batch. The kind "idle" is a state without a step."""
        stats = self._last_stats = output.stats
        steps = [step for delta in output.deltas for step in delta.steps]
        drafted = [step for step in steps if step.n_verified > 0]
        tokens = sum(len(delta.token_ids) for delta in output.deltas)
        drafts = sum(step.n_verified for step in drafted)
        self._gauges["num_requests_running"].set(stats.num_running)
        self._gauges["num_requests_waiting"].set(stats.num_waiting)
        self._gauges["kv_cache_usage_perc"].set(_kv_usage(stats))
        if stats.kind != "idle":
            self._histograms["step_seconds"].labels(stats.kind).observe(stats.seconds)
        self._count_on("preemptions", stats.num_preemptions)
        self._count_on("requests_not_finite", stats.num_not_finite)
        self._count_on("requests_dropped", stats.num_faults)
        self._counters["generation_tokens"].inc(tokens)
        self._counters["decode_rows"].inc(stats.num_decoding + drafts)
        self._counters["decode_sequences"].labels("yes").inc(stats.num_drafting)
        self._counters["decode_sequences"].labels("no").inc(stats.num_decoding - stats.num_drafting)
        if drafted:
            self._count_drafts(drafted)
        self._since_log.update(
            queries=self._count_on("prefix_cache_queries", stats.prefix_cache_queries),
            hits=self._count_on("prefix_cache_hits", stats.prefix_cache_hits),
            tokens=tokens,
            decoding=stats.num_decoding,
            drafting=stats.num_drafting,
            drafts=drafts,
            drafted_tokens=sum(step.n_tokens for step in drafted),
            drafted_steps=len(drafted),
        )

    def _count_on(self, name: str, total: int) -> int:
        """Raise a counter by the growth of an engine's total, and return the growth."""
        growth = max(0, total - self._engine_totals.get(name, 0))
        self._engine_totals[name] = total
        self._counters[name].inc(growth)
        return growth

    def _count_drafts(self, steps: list[SpecStep]) -> None:
        verified = [step.n_verified for step in steps]
        accepted = [step.n_accepted for step in steps]
        self._counters["spec_decode_num_drafts"].inc(len(steps))
        self._counters["spec_decode_num_draft_tokens"].inc(sum(verified))
        self._counters["spec_decode_num_accepted_tokens"].inc(sum(accepted))
        for name, lengths in (("verified", verified), ("accepted", accepted)):
            counter = self._counters[f"spec_decode_num_{name}_tokens_per_pos"]
            for position, count in enumerate(_num_beyond(lengths, max(verified))):
                counter.labels(str(position)).inc(count)

    def log_line(self) -> None:
        """Log the sums since the last call. Without a StepOutput in that time nothing is logged."""
        now, sums, stats = time.monotonic(), self._since_log, self._last_stats
        seconds, self._logged_at = now - self._logged_at, now
        self._since_log, self._last_stats = Sums[str](), None
        if stats is None:
            return
        logger.info(
            "running %d, waiting %d, %.1f tok/s, mean acceptance length %s, drafting %s, mean width %s, "
            "KV use %.1f %%, prefix cache hits %s",
            stats.num_running,
            stats.num_waiting,
            sums["tokens"] / max(1e-9, seconds),
            _ratio(sums["drafted_tokens"], sums["drafted_steps"], ".2f"),
            _ratio(100 * sums["drafting"], sums["decoding"], ".0f", " %"),
            _ratio(sums["decoding"] + sums["drafts"], sums["decoding"], ".1f"),
            100 * _kv_usage(stats),
            _ratio(100 * sums["hits"], sums["queries"], ".1f", " %"),
        )


class _TokenLatencies(Collector):
    """Histogram that observes all tokens of a step at once. Prometheus' own takes one value a call."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._counts = [0] * (len(_LATENCY) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int) -> None:
        self._counts[bisect_left(_LATENCY, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        limits = [*map(floatToGoString, _LATENCY), "+Inf"]
        buckets = list(zip(limits, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


def _num_beyond(lengths: list[int], num_positions: int) -> list[int]:
    """Return for each of the positions the number of `lengths`, at most `num_positions` each, that reach beyond it."""
    counts = Sums(lengths)
    return list(accumulate(counts[length] for length in range(num_positions, 0, -1)))[::-1]


def _kv_usage(stats: StepStats) -> float:
    return stats.used_pages / max(1, stats.num_pages)


def _ratio(part: float, whole: int, form: str, unit: str = "") -> str:
    return f"{part / whole:{form}}{unit}" if whole else "-"
