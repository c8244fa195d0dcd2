"""Spans of the real server reach a collector, by both protocols of OTLP."""

import http.server
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest as Sent
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse as Taken
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from app import demo
from app.config.settings import OTLP_PROTOCOL
from tests.fast.api.served import PATIENCE, until
from tests.server.demo import ENDLESS, ROOM, num_running, process

PROMPT = list(demo.token_ids(1)[0])
BODY = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
PHASES = "time_in_queue", "time_in_model_inference", "e2e"


@contextmanager
def http_collector(sent: "Queue[Sent]") -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            sent.put(Sent.FromString(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(Taken().SerializeToString())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{collector.server_port}/v1/traces"
        collector.shutdown()


@contextmanager
def grpc_collector(sent: "Queue[Sent]") -> Iterator[str]:
    class Service(TraceServiceServicer):
        def Export(self, request: Sent, context: object) -> Taken:
            sent.put(request)
            return Taken()

    collector = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Service(), collector)
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    yield f"http://127.0.0.1:{port}"
    collector.stop(None).wait()


@pytest.mark.parametrize(("protocol", "collector"), [("grpc", grpc_collector), ("http/protobuf", http_collector)])
def test_a_collector_gets_the_spans_with_their_time_in_the_queue(protocol, collector, monkeypatch):
    """One sequence runs at a time, so the second request waits at least until the first one's client leaves."""
    monkeypatch.setenv(OTLP_PROTOCOL, protocol)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "named")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    sent: Queue[Sent] = Queue()
    with collector(sent) as endpoint:
        flags = ("demo", "--otlp-traces-endpoint", endpoint, "--max-num-seqs", "1", "--verify", "full", *ROOM)
        with process(*flags) as (url, server), ThreadPoolExecutor(1) as pool:
            with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=PATIENCE) as first:
                events = first.iter_lines()
                assert next(events).startswith("data: ")
                second = pool.submit(httpx.post, f"{url}/v1/completions", json=BODY, timeout=PATIENCE)
                until(lambda: num_running(url) == len(ENDLESS["prompt"]) + 1)
                waits = time.monotonic()
                time.sleep(0.2)
                leaves = time.monotonic()
            usage = second.result().json()["usage"]
            spans = []
            while len(spans) < 2:
                (resource,) = sent.get(timeout=PATIENCE).resource_spans
                assert {"service.name": "named"}.items() <= values(resource.resource).items()
                spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert server.returncode == 0
    left, served = sorted(map(values, spans), key=lambda found: found["gen_ai.usage.num_sequences"], reverse=True)
    assert {one.string_value for one in left["gen_ai.response.finish_reasons"].values} == {"abort"}
    assert served["gen_ai.usage.completion_tokens"] == usage["completion_tokens"] == 40
    assert served["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert 1 < served["dflash.acceptance_length"] <= 16
    queue, inference, whole = (served[f"gen_ai.latency.{name}"] for name in PHASES)
    assert leaves - waits <= queue < queue + inference < whole


def test_a_stop_sends_the_spans_that_wait_for_the_next_batch(monkeypatch):
    monkeypatch.setenv(OTLP_PROTOCOL, "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    sent: Queue[Sent] = Queue()
    with http_collector(sent) as endpoint, process("demo", "--otlp-traces-endpoint", endpoint, *ROOM) as (url, server):
        assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=PATIENCE).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
        (resource,) = sent.get_nowait().resource_spans
        (span,) = [span for scope in resource.scope_spans for span in scope.spans]
        assert values(span)["gen_ai.usage.completion_tokens"] == 40


def values(described) -> dict[str, object]:
    """Return the attributes of a span or of a resource."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in described.attributes}


def test_a_collector_that_is_not_there_costs_no_request_and_not_the_end():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # Without `listen` each connection is refused.
        with process("demo", "--otlp-traces-endpoint", f"http://127.0.0.1:{silent.getsockname()[1]}") as (url, server):
            assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=PATIENCE).status_code == 200
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE) == 0
