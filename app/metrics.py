"""Prometheus metrics: one table of names, and the few calls that fill it.

Names follow vLLM's under a prefix of our own, so `--metrics-prefix vllm:` serves its dashboards. Counters appear with
`_total` behind the name. Nothing here is global: every `Metrics` has its own registry.
"""

import logging
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
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
    """A row of the table; buckets are seconds."""

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
    """Every metric of one server. `prefix` is put before each name as it stands ("dflash:", "vllm:")."""

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
        self._engine_counts: dict[str, int] = {}
        self._window = _Window()

    def render(self) -> bytes:
        """The exposition text for GET /metrics."""
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
        """`count` tokens came together, `seconds` after the one before them: each took its share."""
        self._token_latencies.observe(seconds / count, count)

    def engine_ended(self) -> None:
        """Nothing runs any more, and the next engine process counts from 0 again."""
        self._engine_counts = {}
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            self._gauges[name].set(0)

    def engine_restarted(self) -> None:
        self._counters["engine_restarts"].inc()

    def step(self, output: StepOutput) -> None:
        """Book one engine step of the whole batch; "idle" tells where the engine stands without one."""
        stats = output.stats
        self._gauges["num_requests_running"].set(stats.num_running)
        self._gauges["num_requests_waiting"].set(stats.num_waiting)
        self._gauges["kv_cache_usage_perc"].set(stats.used_pages / max(1, stats.num_pages))
        if stats.kind != "idle":
            self._histograms["step_seconds"].labels(stats.kind).observe(stats.seconds)
        queries = self._count_on("prefix_cache_queries", stats.prefix_cache_queries)
        hits = self._count_on("prefix_cache_hits", stats.prefix_cache_hits)
        self._count_on("preemptions", stats.num_preemptions)
        self._count_on("requests_not_finite", stats.num_not_finite)
        self._count_on("requests_dropped", stats.num_faults)
        tokens = sum(len(delta.token_ids) for delta in output.deltas)
        self._counters["generation_tokens"].inc(tokens)
        self._decoding(stats, output)
        drafted = [step for delta in output.deltas for step in delta.steps if step.n_verified > 0]
        if drafted:
            self._speculation(drafted)
        self._window.add(stats, tokens, drafted, queries, hits)

    def _decoding(self, stats: StepStats, output: StepOutput) -> None:
        drafts = sum(step.n_verified for delta in output.deltas for step in delta.steps)
        self._counters["decode_rows"].inc(stats.num_decoding + drafts)
        self._counters["decode_sequences"].labels("yes").inc(stats.num_drafting)
        self._counters["decode_sequences"].labels("no").inc(stats.num_decoding - stats.num_drafting)

    def _count_on(self, name: str, count: int) -> int:
        """Bring a counter on by what an engine, which counts from its start, has counted since it last spoke."""
        more = max(0, count - self._engine_counts.get(name, 0))
        self._engine_counts[name] = count
        self._counters[name].inc(more)
        return more

    def _speculation(self, steps: list[SpecStep]) -> None:
        self._counters["spec_decode_num_drafts"].inc(len(steps))
        self._counters["spec_decode_num_draft_tokens"].inc(sum(step.n_verified for step in steps))
        self._counters["spec_decode_num_accepted_tokens"].inc(sum(step.n_accepted for step in steps))
        most = max(step.n_verified for step in steps)
        verified = _reaching([step.n_verified for step in steps], most)
        accepted = _reaching([step.n_accepted for step in steps], most)
        for position in range(most):
            self._counters["spec_decode_num_verified_tokens_per_pos"].labels(str(position)).inc(verified[position])
            self._counters["spec_decode_num_accepted_tokens_per_pos"].labels(str(position)).inc(accepted[position])

    def log_line(self) -> None:
        """Log what happened since the last call, if anything did."""
        line = self._window.read()
        if line:
            logger.info(line)


def _reaching(lengths: Sequence[int], most: int) -> list[int]:
    """How many of the lengths, none above `most`, go beyond each position from 0 on."""
    counts = Counts(lengths)
    return list(accumulate(counts[length] for length in range(most, 0, -1)))[::-1]


class _TokenLatencies(Collector):
    """A histogram that books the tokens of a step at once: Prometheus' own takes one value at a time."""

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


class _Window:
    """What the line in the log says: sums since it was last read."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._since = time.monotonic()
        self._tokens = self._drafted_tokens = self._drafted_steps = self._queries = self._hits = 0
        self._decoding = self._drafting = self._drafts = 0
        self._last: StepStats | None = None

    def add(self, stats: StepStats, tokens: int, drafted: list[SpecStep], queries: int, hits: int) -> None:
        self._last = stats
        self._queries += queries
        self._hits += hits
        self._tokens += tokens
        self._decoding += stats.num_decoding
        self._drafting += stats.num_drafting
        self._drafts += sum(step.n_verified for step in drafted)
        self._drafted_tokens += sum(step.n_tokens for step in drafted)
        self._drafted_steps += len(drafted)

    def read(self) -> str | None:
        stats = self._last
        if stats is None:
            self._clear()
            return None
        rate = self._tokens / max(1e-9, time.monotonic() - self._since)
        length = f"{self._drafted_tokens / self._drafted_steps:.2f}" if self._drafted_steps else "-"
        usage = 100 * stats.used_pages / max(1, stats.num_pages)
        share = f"{100 * self._drafting / self._decoding:.0f} %" if self._decoding else "-"
        width = f"{1 + self._drafts / self._decoding:.1f}" if self._decoding else "-"
        hits = f"{100 * self._hits / self._queries:.1f} %" if self._queries else "-"
        self._clear()
        return (
            f"running {stats.num_running}, waiting {stats.num_waiting}, {rate:.1f} tok/s, "
            f"mean acceptance length {length}, drafting {share}, mean width {width}, KV use {usage:.1f} %, "
            f"prefix cache hits {hits}"
        )
