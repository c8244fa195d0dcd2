"""Spans of the real server reach a collector, by both protocols of OTLP."""

import http.server
import signal
import socket
import threading
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

from app.config.models import OTLP_PROTOCOL
from tests.fast.api.served import PATIENCE
from tests.server.demo import process

BODY = {"model": "demo", "prompt": "Count from one to nine.", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


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
    monkeypatch.setenv(OTLP_PROTOCOL, protocol)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "named")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    sent: Queue[Sent] = Queue()
    with collector(sent) as endpoint:
        flags = ("--otlp-traces-endpoint", endpoint, "--max-num-seqs", "1", "--verify", "full")
        with process(*flags) as (url, server), ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(httpx.post, f"{url}/v1/completions", json=BODY, timeout=PATIENCE) for _ in range(2)]
            usages = [one.result().json()["usage"] for one in asked]
            spans = []
            while len(spans) < 2:
                (resource,) = sent.get(timeout=PATIENCE).resource_spans
                assert {"service.name": "named"}.items() <= values(resource.resource).items()
                spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert server.returncode == 0
    first, second = sorted(map(values, spans), key=lambda found: found["gen_ai.latency.time_in_queue"])
    for found in (first, second):
        assert found["gen_ai.usage.completion_tokens"] == usages[0]["completion_tokens"] == 40
        assert found["gen_ai.usage.prompt_tokens"] == usages[0]["prompt_tokens"]
        assert 1 < found["dflash.acceptance_length"] <= 16
    assert second["gen_ai.latency.time_in_queue"] > 0.5 * first["gen_ai.latency.time_in_model_inference"]


def values(described) -> dict[str, object]:
    """Return the attributes of a span or of a resource."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in described.attributes}


def test_a_collector_that_is_not_there_costs_no_request_and_not_the_end():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with process("--otlp-traces-endpoint", f"http://127.0.0.1:{port}") as (url, server):
        assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=PATIENCE).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
