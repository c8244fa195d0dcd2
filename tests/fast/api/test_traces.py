"""A span of each request has vLLM's attributes, the client's span as its parent, and a status for what went wrong."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from app.api.tracing import Tracer
from app.config import settings
from app.config.error import ConfigError
from app.config.settings import OTLP_PROTOCOL, Config, check_settings
from tests.fast.api.errors import CHAT, TEXT
from tests.fast.api.served import PATIENCE, until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SPANS = InMemorySpanExporter()
LATENCIES = "e2e time_in_queue time_to_first_token time_in_model_prefill time_in_model_decode time_in_model_inference"
SERVED = {"tracer": Tracer(SimpleSpanProcessor(SPANS))}


def span() -> ReadableSpan:
    """Return the one span that has ended since the last call."""
    until(SPANS.get_finished_spans)
    (found,) = SPANS.get_finished_spans()
    SPANS.clear()
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "asked"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
def test_a_request_is_one_span_with_vllms_attributes(server, path, asked, stream):
    words = server.ids("hello world")
    server.script.plan(words[:1], [*words[1:], 2], cached_tokens=1)
    body = asked | {"stream": stream, "max_tokens": 50, "temperature": 0.5, "top_p": 0.25}
    answer = server.http.post(path, json=body, headers={"X-Request-Id": "mine"})
    submitted = server.script.see("Submit")
    found = span()
    attributes = dict(found.attributes)
    times = {name: attributes.pop(f"gen_ai.latency.{name}") for name in LATENCIES.split()}
    assert attributes == {
        "gen_ai.request.id": answer.headers["X-Request-Id"],
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.prompt_tokens": len(submitted["token_ids"]),
        "gen_ai.usage.completion_tokens": len(words) + 1,
        "gen_ai.usage.num_sequences": 1,
        "dflash.cached_tokens": 1,
        "dflash.speculation.steps": 2,
        "dflash.speculation.verified": 30,
        "dflash.speculation.accepted": len(words) - 1,
        "dflash.acceptance_length": (len(words) + 1) / 2,
    }
    assert attributes["gen_ai.request.id"] == "mine"
    assert all(seconds >= 0 for seconds in times.values())
    assert times["time_in_queue"] + times["time_in_model_prefill"] == pytest.approx(times["time_to_first_token"])
    assert times["time_in_model_prefill"] + times["time_in_model_decode"] == pytest.approx(
        times["time_in_model_inference"]
    )
    assert times["time_to_first_token"] + times["time_in_model_decode"] <= times["e2e"]
    assert (found.end_time - found.start_time) / 1e9 == pytest.approx(times["e2e"], abs=1e-6)
    assert (found.name, found.kind, found.status.status_code) == ("llm_request", SpanKind.SERVER, StatusCode.UNSET)
    assert found.parent is None
    assert found.resource.attributes["service.name"] == "dflash-server"


def test_the_clients_span_is_the_parent_and_its_decision_not_to_sample_holds(server):
    server.script.plan([5, 2])
    for flags in ("00", "01"):
        server.http.post("/v1/completions", json=TEXT, headers={"traceparent": f"00-{TRACE}-{PARENT}-{flags}"})
    found = span()
    assert (f"{found.context.trace_id:x}", f"{found.parent.span_id:016x}") == (TRACE, PARENT)


def test_all_choices_are_one_span(server):
    server.script.plan([5, 2])
    server.http.post("/v1/completions", json=TEXT | {"n": 3})
    attributes = span().attributes
    assert attributes["gen_ai.usage.num_sequences"] == attributes["gen_ai.request.n"] == 3
    assert attributes["gen_ai.usage.completion_tokens"] == 6
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",) * 3


def test_the_time_in_the_queue_is_that_of_the_choice_that_was_scheduled_first(server, background):
    asked = background.submit(lambda: server.http.post("/v1/completions", json=TEXT | {"n": 2}))
    first, second = (server.script.see("Submit")["request_id"] for _ in range(2))
    server.script.emit(first, [5, 2])
    time.sleep(0.5)
    server.script.emit(second, [5, 2])
    assert asked.result().status_code == 200
    attributes = span().attributes
    assert attributes["gen_ai.latency.e2e"] - attributes["gen_ai.latency.time_in_queue"] > 0.25


def test_an_error_of_the_engine_is_the_status(server, background):
    asked = background.submit(lambda: server.http.post("/v1/completions", json=TEXT | {"n": 2}))
    server.script.emit(server.script.see("Submit")["request_id"], [], finish="error", error="no such luck")
    assert asked.result().status_code == 500
    found = span()
    assert (found.status.status_code, found.status.description) == (StatusCode.ERROR, "no such luck")
    assert set(found.attributes["gen_ai.response.finish_reasons"]) == {"error", "abort"}
    assert "gen_ai.latency.time_to_first_token" not in found.attributes


def test_a_client_that_leaves_is_the_status(server, background):
    def read_one_line():
        with server.http.stream("POST", "/v1/completions", json=TEXT | {"stream": True, "max_tokens": 50}) as answer:
            next(answer.iter_lines())

    left = background.submit(read_one_line)
    server.script.emit(server.script.see("Submit")["request_id"], server.ids("hello"))
    left.result()
    found = span()
    assert (found.status.status_code, found.status.description) == (StatusCode.ERROR, "abort")
    assert "gen_ai.latency.time_to_first_token" in found.attributes


def test_a_deadline_is_the_status(server):
    answer = server.http.post("/v1/completions", json=TEXT, headers={"X-Request-Timeout": "0.05"})
    assert answer.status_code == 504
    found = span()
    assert (found.status.status_code, found.status.description) == (StatusCode.ERROR, "deadline")
    assert "gen_ai.latency.time_in_queue" not in found.attributes, "no step began"


def test_a_request_that_is_refused_before_the_engine_has_no_span(server):
    assert server.http.post("/v1/completions", json=TEXT | {"temperature": -1}).status_code == 400
    server.script.plan([5, 2])
    server.http.post("/v1/completions", json=TEXT)
    assert span().status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(("protocol", "package"), [("grpc", "grpc"), ("http/protobuf", "http")])
def test_a_missing_extra_is_refused_with_the_line_that_installs_it(monkeypatch, protocol, package):
    config = Config(otlp_traces_endpoint="http://127.0.0.1:4317")
    monkeypatch.setenv(OTLP_PROTOCOL, protocol)
    check_settings(config)

    def without_a_parent(name):
        raise ModuleNotFoundError

    exporter = f"opentelemetry.exporter.otlp.proto.{package}"
    for absent in (without_a_parent, lambda name: None if name == exporter else pytest.fail(name)):
        monkeypatch.setattr(settings, "find_spec", absent)
        with pytest.raises(ConfigError, match="--otlp-traces-endpoint") as refused:
            check_settings(config)
        assert refused.value.hint == "pip install '.[otlp]' in the source tree"


def test_a_protocol_that_is_not_otlps_and_an_address_without_a_scheme_are_refused(monkeypatch):
    monkeypatch.setenv(OTLP_PROTOCOL, "http/json")
    with pytest.raises(ConfigError, match="http/json"):
        check_settings(Config(otlp_traces_endpoint="http://127.0.0.1:4317"))
    monkeypatch.setenv(OTLP_PROTOCOL, "http/protobuf")
    with pytest.raises(ConfigError, match="needs an http:// address"):
        check_settings(Config(otlp_traces_endpoint="grpc://127.0.0.1:4317"))
    monkeypatch.delenv(OTLP_PROTOCOL)
    check_settings(Config(otlp_traces_endpoint="grpc://127.0.0.1:4317"))
    with pytest.raises(ValueError, match="begins with http"):
        Config(otlp_traces_endpoint="127.0.0.1:4317")


def test_without_grace_the_end_waits_for_no_collector():
    answered = threading.Event()

    class Silent(SpanProcessor):
        def shutdown(self):
            assert answered.wait(PATIENCE)

    asyncio.run(Tracer(Silent()).close(0.0))
    assert not answered.is_set()
    answered.set()


def test_without_the_flag_neither_the_sdk_nor_an_exporter_is_imported():
    """FastAPI itself imports OpenTelemetry's interface where that is installed, which records nothing."""
    unwanted = ("opentelemetry.sdk", "opentelemetry.exporter", "grpc", "app.api.tracing")
    code = f"import sys, app.api.process; print([name for name in sys.modules if name.startswith({unwanted})])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
