"""Spans of requests, sent by OpenTelemetry's protocol (OTLP) with vLLM's names of attributes.

Only this file imports OpenTelemetry. It is imported if `--otlp-traces-endpoint` is set.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app import log
from app.api.stream import Choices
from app.config.settings import otlp_protocol
from app.engine_client.request_stream import Timeline
from app.messages import Request


class Tracer:
    """Spans of one server. `processor` takes those that have ended, and does not wait for the network."""

    def __init__(self, processor: SpanProcessor) -> None:
        name = {"service.name": "dflash-server", "service.version": version("dflash-server")}
        given = OTELResourceDetector().detect().attributes
        self._provider = TracerProvider(resource=Resource.create(name | dict(given)), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("dflash-server")

    def begin(
        self, headers: Mapping[str, str], model_name: str, num_choices: int, request: Request, choices: Choices
    ) -> Callable[[], None]:
        """Return what ends the span of `choices`, whose first request is `request`. Its parent is `traceparent`."""
        sampling = request.sampling
        asked: dict[str, Any] = {
            "gen_ai.request.id": log.request.get({}).get("request_id", request.request_id),
            "gen_ai.request.n": num_choices,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.response.model": model_name,
        }
        parent = TraceContextTextMapPropagator().extract(headers)

        def end() -> None:
            timelines = choices.timelines
            ended, seconds = time.time_ns(), time.monotonic() - timelines[0].arrived
            usage = choices.usage
            attributes = asked | {
                "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
                "gen_ai.usage.completion_tokens": usage["completion_tokens"],
                "gen_ai.usage.num_sequences": len(timelines),
                "gen_ai.response.finish_reasons": [timeline.outcome for timeline in timelines],
                "gen_ai.latency.e2e": seconds,
                "dflash.cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            }
            attributes |= dict(_latencies(timelines)) | _speculation(timelines)
            arrived = ended - int(1e9 * seconds)
            span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, attributes, start_time=arrived)
            if (failure := _failure(timelines)) is not None:
                span.set_status(Status(StatusCode.ERROR, failure))
            span.end(ended)

        return end

    async def close(self, grace: float) -> None:
        """Send the spans that are left, for `grace` seconds. A collector that has not taken them by then gets none."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, grace)


def tracer_to(endpoint: str) -> Tracer:
    """Return a tracer that sends to a collector."""
    module = import_module(f"opentelemetry.exporter.otlp.proto.{otlp_protocol().partition('/')[0]}.trace_exporter")
    return Tracer(BatchSpanProcessor(module.OTLPSpanExporter(endpoint)))


def _latencies(timelines: list[Timeline]) -> Iterator[tuple[str, float]]:
    """Yield the seconds of the phases that were reached. Choices count together, from the first to the last."""
    arrived = timelines[0].arrived
    scheduled = min((moment for one in timelines if (moment := one.scheduled) is not None), default=None)
    first = min((moment for one in timelines if (moment := one.first_token) is not None), default=None)
    latest = max((moment for one in timelines if (moment := one.latest_token) is not None), default=None)
    if scheduled is not None:
        yield "gen_ai.latency.time_in_queue", scheduled - arrived
    if first is not None and latest is not None:
        yield "gen_ai.latency.time_to_first_token", first - arrived
        yield "gen_ai.latency.time_in_model_decode", latest - first
        if scheduled is not None:
            yield "gen_ai.latency.time_in_model_prefill", first - scheduled
            yield "gen_ai.latency.time_in_model_inference", latest - scheduled


def _speculation(timelines: list[Timeline]) -> dict[str, float]:
    steps = sum(one.steps for one in timelines)
    if not steps:
        return {}
    return {
        "dflash.speculation.steps": steps,
        "dflash.speculation.verified": sum(one.verified for one in timelines),
        "dflash.speculation.accepted": sum(one.accepted for one in timelines),
        "dflash.acceptance_length": sum(one.drafted_tokens for one in timelines) / steps,
    }


def _failure(timelines: list[Timeline]) -> str | None:
    """Return why the answer is not whole, or None if it is. The error of one choice ends the others."""
    outcomes = {one.outcome for one in timelines}
    if "error" in outcomes:
        return next((one.error for one in timelines if one.error), "error")
    return next((reason for reason in ("deadline", "abort") if reason in outcomes), None)
