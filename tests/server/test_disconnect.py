"""A client that goes away frees its place in the engine, whatever it was waiting for."""

import asyncio
import contextlib
import json
import logging
import socket
from queue import Queue

import pytest
from starlette.requests import ClientDisconnect

from app.api import generate
from app.api import stream as streaming
from app.api.middleware import RequestIds
from app.api.stream import EventStream
from app.engine_client.supervisor import EngineUnavailable
from app.log import request as served_request
from app.messages import Request
from app.metrics import Metrics
from tests.fast.api.connections import connect, connection_address, request
from tests.fast.api.served import PATIENCE, next_delta


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_leaving_before_the_first_token_or_in_the_middle_sends_abort(server, path, stream, begun):
    prompt = {"input": "hi"} if path == "/v1/responses" else {}
    with connect(server, path, stream=stream, **prompt) as connection:
        request_id = server.script.see("Submit")["request_id"]
        if begun:
            server.script.emit(request_id, server.ids("hello"))
            received = b""
            while stream and b"hello" not in received:
                received += connection.recv(10_000)
    assert server.script.see("Abort")["request_id"] == request_id


@pytest.mark.parametrize("several", [{"prompt": ["a", "b", "c"]}, {"n": 3}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_aborts_every_prompt_and_choice_of_the_request(server, stream, several):
    with connect(server, stream=stream, **several):
        submitted = {server.script.see("Submit")["request_id"] for _ in range(3)}
    assert {server.script.see("Abort")["request_id"] for _ in range(3)} == submitted


def test_requests_of_those_who_left_are_booked_as_aborted(server):
    before = server.metric("request_success_total", finished_reason="abort")
    with connect(server):
        server.script.see("Submit")
    server.script.see("Abort")
    # The Abort is sent before the request is booked, in the same turn of the server's loop.
    server.call(lambda: asyncio.sleep(0))
    assert server.metric("request_success_total", finished_reason="abort") == before + 1


def test_after_an_abort_the_gauges_say_that_nothing_runs_even_if_a_step_was_in_flight(server, background):
    with connect(server):
        request_id = server.script.see("Submit")["request_id"]
        server.script.emit(request_id, server.ids("hello"))
        server.until_metric("num_requests_running", 1)
    server.script.see("Abort")
    server.until_metric("num_requests_running", 0)
    server.until_metric("kv_cache_usage_perc", 0)


def test_a_request_that_cannot_be_sent_leaves_nothing_behind(server):
    before = server.metric("prompt_tokens_total")
    with pytest.raises(OverflowError):
        server.call(lambda: server.engine.submit(Request("unsendable", [1], 5, stop_token_ids=[2**64])))
    assert (server.engine.num_running, server.engine.admission.num_in_flight) == (0, 0)
    server.call(server.engine.idle.wait)
    assert server.metric("prompt_tokens_total") == before


def test_a_request_that_the_engine_has_ended_has_no_place_before_it_is_read(server):
    server.script.plan([5, 2])

    stream = server.call(lambda: server.engine.submit(Request("unread", [1], 250, stop_token_ids=[2])))
    server.call(server.engine.idle.wait)
    assert server.engine.admission.num_in_flight == 0

    assert server.call(lambda: next_delta(stream)).token_ids == [5, 2]
    server.call(stream.close)
    left = (server.engine.num_running, server.engine.admission.num_unacknowledged)
    assert left == (0, 0), "and no Abort follows"


def test_a_client_that_does_not_read_is_sent_fewer_and_larger_chunks(own_server):
    """The sockets fill, the server stops writing, and what comes then waits as one delta."""
    own_server.ready(max_model_len=8192)
    own_server.script.plan(*[own_server.bytes("x")] * 6000)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect(connection_address(own_server))
        connection.sendall(request(stream=True, max_tokens=6000))
        own_server.script.see("Submit")
        own_server.call(own_server.engine.idle.wait)
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(1_000_000)
    chunks = [json.loads(line[6:]) for line in received.decode().split("\n") if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "x" * 6000
    assert len(chunks) < 5000


def test_leaving_while_the_body_is_sent_is_no_error_of_ours(server, background, caplog):
    logged: Queue[str] = Queue()
    caplog.set_level("INFO", logger="app.access")
    handler = logging.Handler()
    handler.emit = lambda record: (
        logged.put(record.getMessage()) if served_request.get({}).get("request_id") == "early-leaver" else None
    )
    logging.getLogger("app.access").addHandler(handler)
    with socket.create_connection(connection_address(server)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: early-leaver\r\nContent-Length: 99\r\n"
        connection.sendall(head + b"\r\n{")
    assert "POST /v1/completions 499" in logged.get(timeout=PATIENCE)
    logging.getLogger("app.access").removeHandler(handler)
    assert "Traceback" not in caplog.text


def test_a_connection_that_closes_under_the_answer_is_no_error_of_ours(caplog):
    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        if message["type"] == "http.response.body":
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    scope = {"type": "http", "method": "GET", "path": "/live", "headers": []}
    asyncio.run(RequestIds(application, Metrics())(scope, None, send))
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_who_has_left_before_anybody_looks_for_an_answer_is_aborted(server, monkeypatch, stream):
    async def gone(*given):
        if asyncio.iscoroutine(given[-1]):
            given[-1].close()
        raise ClientDisconnect

    monkeypatch.setattr(generate, "unless_gone", gone)
    monkeypatch.setattr(streaming.StreamingResponse, "__call__", gone)
    server.http.post("/v1/completions", json={"prompt": ["a", "b"], "stream": stream})
    submitted = {server.script.see("Submit")["request_id"] for _ in range(2)}
    assert {server.script.see("Abort")["request_id"] for _ in range(2)} == submitted


def test_where_one_choice_cannot_be_sent_those_before_it_are_aborted(server, monkeypatch):
    submit = server.engine.submit

    def fail_on_the_second(request, **options):
        if request.request_id.endswith("-1"):
            raise EngineUnavailable("It has just died.", "dead")
        return submit(request, **options)

    monkeypatch.setattr(server.engine, "submit", fail_on_the_second)
    refused = server.http.post("/v1/completions", json={"prompt": "hi", "n": 3})
    assert refused.status_code == 503 and "just died" in refused.json()["error"]["message"]
    assert server.script.see("Abort")["request_id"] == server.script.see("Submit")["request_id"]
    assert (server.engine.num_running, server.engine.admission.num_in_flight) == (0, 0)


def test_a_stream_that_cannot_be_sent_is_closed_at_once_and_not_by_the_collector():
    closed = []

    async def generator():
        try:
            yield b"first"
            yield b"second"
        finally:
            closed.append(True)

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        if message["type"] == "http.response.body":
            raise OSError

    async def respond():
        rest = generator()
        response = EventStream(rest, lambda: closed.append("choices"))
        with contextlib.suppress(Exception):
            await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
        return list(closed), rest

    assert asyncio.run(respond())[0] == [True, "choices"]


@pytest.mark.parametrize("begun", [False, True])
def test_who_has_no_answer_yet_when_the_server_goes_down_gets_one(begun):
    """uvicorn cancels what still runs then; an answer that has begun must not look whole."""
    sent = []

    async def application(scope, receive, send):
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise asyncio.CancelledError

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/live", "headers": []}
    if begun:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(RequestIds(application, Metrics())(scope, None, send))
        assert [message["type"] for message in sent] == ["http.response.start"]
    else:
        asyncio.run(RequestIds(application, Metrics())(scope, None, send))
        assert sent[0]["status"] == 503 and b"retry-after" in dict(sent[0]["headers"])
        assert b'"code":"engine_draining"' in sent[1]["body"]


def test_an_abort_by_id_ends_the_request_with_an_error(server, background):
    running, request_id = server.begin(background)
    for _ in range(2):
        server.call(lambda: server.engine.abort(request_id))
    assert server.script.see("Abort")["request_id"] == request_id
    assert running.result().status_code == 500
    assert "aborted" in running.result().json()["error"]["message"]


def test_a_delta_for_a_request_that_is_gone_is_dropped(server):
    tokens = server.metric("generation_tokens_total")
    server.script.emit("gone", [1])
    server.until_metric("generation_tokens_total", tokens + 1)
    assert server.http.get("/ready").status_code == 200
