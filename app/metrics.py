"""Prometheus metrics: the table of names, which is metrics.toml, and the calls that fill it.

Names follow vLLM's under a different prefix, so `--metrics-prefix vllm:` serves its dashboards and the routers that
read them. Every `Metrics` has a separate registry, because one process may have several servers.
"""

import logging
import time
import tomllib
from collections import Counter as Sums
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import prometheus_client as prometheus

from app.messages import EngineInfo, StepOutput, StepStats

logger = logging.getLogger(__name__)
prometheus.disable_created_metrics()  # a third of all samples, which neither the alerts nor vLLM's dashboards read

_FROM_1_MS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_SECONDS = (0.0001, 0.0002, 0.0005, *_FROM_1_MS)
_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
_KINDS: dict[str, Any] = {
    "gauge": prometheus.Gauge,
    "counter": prometheus.Counter,
    "seconds": partial(prometheus.Histogram, buckets=_SECONDS),
    "tokens": partial(prometheus.Histogram, buckets=_TOKENS),
}


class Metric(NamedTuple):
    """Row of the table. `kind` is one of _KINDS. A label has values that are known from the start."""

    name: str
    kind: str
    help: str
    labels: Mapping[str, Sequence[str]]


_TABLE = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))
TABLE = tuple(
    Metric(name, kind, help, _TABLE["labels"].get(name, {})) for kind in _KINDS for name, help in _TABLE[kind].items()
)


class Metrics:
    """Every metric of one server. Each name begins with `prefix`. Under "vllm:" samples have vLLM's labels too."""

    def __init__(self, prefix: str = "dflash:", model_name: str = "") -> None:
        self._registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self._registry)
        labels = {"model_name": model_name, "engine": "0"} if prefix == "vllm:" else {}
        self._metrics: dict[str, Any] = {}
        self._labels = tuple(labels.values())
        for metric in TABLE:
            names = (*labels, *metric.labels)
            family = _KINDS[metric.kind](prefix + metric.name, metric.help, names, registry=self._registry)
            self._metrics[metric.name] = family.labels(*self._labels) if labels and not metric.labels else family
            for known in next(iter(metric.labels.values()), ()):
                self._labelled(metric.name, known)
        self._labelled("build_info", version("dflash-server")).set(1)
        self._engine_totals = Sums[str]()
        self._last_stats: StepStats | None = None
        self._since_log = Sums[str]()
        self._logged_at = time.monotonic()

    def render(self) -> bytes:
        """Return the exposition text for GET /metrics."""
        return prometheus.generate_latest(self._registry)

    def count(self, name: str, amount: int = 1, label: str | None = None) -> None:
        """Raise the counter `name`, at the value `label` of its label if it has one."""
        (self._metrics[name] if label is None else self._labelled(name, label)).inc(amount)
        self._since_log[name] += amount

    def _labelled(self, name: str, *values: str) -> Any:
        return self._metrics[name].labels(*self._labels, *values)

    def observe(self, name: str, amount: float, count: int = 1) -> None:
        """Add `count` events that share an amount of seconds or tokens to the histogram `name`."""
        for _ in range(count):
            self._metrics[name].observe(amount / count)

    def engine_ready(self, info: EngineInfo) -> None:
        """Set the sizes of the KV cache, by which routers count the prefixes that fit, and those in bytes."""
        for name in ("quantised_bytes", "state_bytes", "state_cache_bytes"):
            self._metrics[name].set(getattr(info, name))
        self._labelled("cache_config_info", str(info.page_size), str(info.num_pages)).set(1)

    def engine_ended(self) -> None:
        """Set the gauges to 0. The next engine process counts from 0 again."""
        self._engine_totals = Sums()
        self._metrics["cache_config_info"].clear()
        for metric in TABLE:
            if metric.kind == "gauge" and not metric.labels:
                self._metrics[metric.name].set(0)

    def step(self, output: StepOutput) -> None:
        """Count one engine step of the whole batch. The kind "idle" is a state without a step."""
        stats = self._last_stats = output.stats
        self._metrics["num_requests_running"].set(stats.num_running)
        self._metrics["num_requests_waiting"].set(stats.num_waiting)
        self._metrics["kv_cache_usage_perc"].set(stats.used_pages / max(1, stats.num_pages))
        self._metrics["state_slots_usage_perc"].set(stats.used_state_slots / max(1, stats.num_state_slots))
        self._metrics["state_cache_usage_perc"].set(stats.used_state_checkpoints / max(1, stats.num_state_checkpoints))
        if stats.not_ahead:
            self.count("steps_not_ahead", label=stats.not_ahead)
        totals = Sums(
            num_preemptions=stats.num_preemptions,
            requests_not_finite=stats.num_not_finite,
            requests_dropped=stats.num_faults,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
        )
        new, self._engine_totals = totals - self._engine_totals, totals
        for name, grown in new.items():
            self.count(name, grown)
        drafted = [step for delta in output.deltas for step in delta.steps if step.n_verified]
        num_drafts = sum(step.n_verified for step in drafted)
        num_tokens = sum(len(delta.token_ids) for delta in output.deltas)
        self.count("generation_tokens", num_tokens)
        if stats.kind != "idle":
            self._labelled("step_seconds", stats.kind).observe(stats.seconds)
            self.observe("iteration_tokens_total", num_tokens + new["prefix_cache_queries"])
        self.count("decode_rows", stats.num_decoding + num_drafts)
        self.count("decode_sequences", stats.num_drafting, "yes")
        self.count("decode_sequences", stats.num_decoding - stats.num_drafting, "no")
        self.count("spec_decode_num_drafts", len(drafted))
        self.count("spec_decode_num_draft_tokens", num_drafts)
        self.count("spec_decode_num_accepted_tokens", sum(step.n_accepted for step in drafted))
        for k in range(max((step.n_verified for step in drafted), default=0)):
            self.count("spec_decode_num_verified_tokens_per_pos", sum(step.n_verified > k for step in drafted), str(k))
            self.count("spec_decode_num_accepted_tokens_per_pos", sum(step.n_accepted > k for step in drafted), str(k))
        self._since_log["drafting"] += stats.num_drafting
        self._since_log["drafted_tokens"] += sum(step.n_tokens for step in drafted)

    def log_line(self) -> None:
        """Log the sums since the last call. Without a StepOutput in that time nothing is logged."""
        now, sums, stats = time.monotonic(), self._since_log, self._last_stats
        seconds, self._logged_at = now - self._logged_at, now
        self._since_log, self._last_stats = Sums[str](), None
        if stats is None:
            return
        length = _ratio(sums["drafted_tokens"], sums["spec_decode_num_drafts"], ".2f")
        drafting = _ratio(100 * sums["drafting"], sums["decode_sequences"], ".0f", " %")
        width = _ratio(sums["decode_rows"], sums["decode_sequences"], ".1f")
        hits = _ratio(100 * sums["prefix_cache_hits"], sums["prefix_cache_queries"], ".1f", " %")
        logger.info(
            f"running {stats.num_running}, waiting {stats.num_waiting}, "
            f"{sums['generation_tokens'] / max(1e-9, seconds):.1f} tok/s, mean acceptance length {length}, "
            f"drafting {drafting}, mean width {width}, "
            f"KV use {100 * stats.used_pages / max(1, stats.num_pages):.1f} %, prefix cache hits {hits}"
        )


def _ratio(part: float, whole: int, form: str, unit: str = "") -> str:
    return f"{part / whole:{form}}{unit}" if whole else "-"
