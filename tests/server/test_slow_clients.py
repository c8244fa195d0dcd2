"""Clients that send byte by byte or never read are cut off, and delay no other client."""

import contextlib
import json
import socket
import time

import pytest

from app.api import body, connection
from tests.fast.api.connections import connect, connection_address, exchange, request
from tests.fast.api.errors import TEXT
from tests.fast.api.served import PATIENCE, serving, until

CUT_OFF = 0.4


def drip(client: socket.socket, drop: bytes) -> tuple[bytes, float]:
    """Send a drop now and then until the server ends it. Return its answer, and the seconds until then."""
    began = time.monotonic()
    answer = b""
    client.settimeout(CUT_OFF / 8)
    with contextlib.suppress(ConnectionError):
        while True:
            with contextlib.suppress(TimeoutError):
                if not (part := client.recv(65536)):
                    break
                answer += part
            with contextlib.suppress(ConnectionError):  # There may be more to read.
                client.sendall(drop)
            assert time.monotonic() < began + PATIENCE, "it may go on dripping for ever"
    return answer, time.monotonic() - began


def open_connection(server, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(connection_address(server), timeout=PATIENCE)
    client.sendall(sent)
    return client


@pytest.mark.parametrize(("begin", "drop"), [(b"", b""), (b"", b"G"), (b"GET /live HTTP/1.1\r\n", b"X: y\r\n")])
def test_a_head_must_come_in_time(server, monkeypatch, begin, drop):
    monkeypatch.setattr(connection, "HEAD_SECONDS", CUT_OFF)
    began = time.monotonic()
    with open_connection(server, begin) as client:
        answer, _ = drip(client, drop)
    assert time.monotonic() - began > CUT_OFF / 2
    assert b"200" not in answer


@pytest.mark.parametrize(
    ("asked", "status", "drop"),
    [(b"GET /live HTTP/1.1\r\n", 200, b"G"), (b"POST /nothing HTTP/1.1\r\nContent-Length: 1000000\r\n", 404, b"{")],
    ids=["a second head", "the rest of a refused body"],
)
def test_what_follows_an_answer_must_come_in_time_too(server, monkeypatch, asked, status, drop):
    with open_connection(server, asked + b"Host: x\r\n\r\n") as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 %d" % status)
        monkeypatch.setattr(connection, "HEAD_SECONDS", CUT_OFF)
        answer, seconds = drip(client, drop)
    assert seconds > CUT_OFF / 2 or status != 200
    assert b"200" not in answer


def test_a_body_must_come_in_time(server, monkeypatch):
    monkeypatch.setattr(body, "BODY_SECONDS", CUT_OFF)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    began = time.monotonic()
    with open_connection(server, head) as client:
        answer, _ = drip(client, b"{")
    assert answer.startswith(b"HTTP/1.1 408") and b'"code":"request_timeout"' in answer
    assert time.monotonic() - began > CUT_OFF / 2


def test_a_large_body_over_a_slow_line_gets_more_time(server, monkeypatch):
    """Every 100 bytes that come buy it all the patience there is; without that it would be too late with the rest."""
    asked = json.dumps(TEXT | {"user": "x" * 300}).encode()
    monkeypatch.setattr(body, "BODY_SECONDS", CUT_OFF)
    monkeypatch.setattr(body, "MIN_BYTES_PER_SECOND", 100 / PATIENCE)
    server.script.plan([2])
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(asked)
    with open_connection(server, head + asked[:100]) as client:
        time.sleep(2 * CUT_OFF)
        client.sendall(asked[100:])
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_a_connection_that_has_closed_waits_for_nothing(server):
    with open_connection(server, b"GET /li"):
        until(lambda: waiting_for_heads(server))
        (connection,) = waiting_for_heads(server)
    until(lambda: connection._timer is None)


def waiting_for_heads(server):
    return server.call(lambda: [one for one in server.uvicorn.server_state.connections if one._timer is not None])


def test_an_answer_may_take_longer_than_a_head(server, background):
    asked, request_id = server.begin(background)
    assert waiting_for_heads(server) == []
    server.script.emit(request_id, [2])
    assert asked.result().status_code == 200


def test_a_client_that_never_reads_costs_no_memory_and_no_other_clients_time(model_folder):
    with never_reading(model_folder) as (server, client, request_id):
        until(lambda: any(server.call(lambda: buffers(server))))  # The sockets are full.
        for _ in range(60):
            server.script.emit(request_id, server.bytes("x" * 5000))
            (waiting,) = server.call(lambda: buffers(server))
            assert waiting < 200_000, "of 400 KB of text"
        server.script.plan([*server.ids("quick"), 2])
        assert server.openai.completions.create(model="tiny", prompt="quick").choices[0].text == "quick"
        client.close()
        assert server.script.see("Abort")["request_id"] == request_id


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="no other system than Linux can")
def test_a_client_that_never_reads_is_cut_off(model_folder, monkeypatch):
    monkeypatch.setattr(connection, "STALLED_SECONDS", 1.0)
    with never_reading(model_folder) as (server, _, request_id):
        assert server.script.see("Abort")["request_id"] == request_id
        assert server.call(lambda: buffers(server)) == []


@contextlib.contextmanager
def never_reading(model_folder):
    """A server, a client that reads nothing of the stream that it has asked for, and the request's id."""
    with serving(model_folder) as server, socket.socket() as client:
        server.ready(max_model_len=2**20)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(connection_address(server))
        client.sendall(request(stream=True, max_tokens=1_000_000))
        request_id = server.script.see("Submit")["request_id"]
        server.script.emit(request_id, server.bytes("x" * 100_000))
        yield server, client, request_id


def buffers(server):
    """Return the bytes that each streaming connection has still to send."""
    every = server.uvicorn.server_state.connections
    return [one.transport.get_write_buffer_size() for one in every if one.cycle and not one.cycle.response_complete]


def test_who_closes_one_direction_counts_as_gone(server):
    """A client that has gone for good looks the same."""
    with connect(server, stream=True) as client:
        request_id = server.script.see("Submit")["request_id"]
        client.shutdown(socket.SHUT_WR)
        assert server.script.see("Abort")["request_id"] == request_id


@pytest.mark.parametrize("count", [100, 101])
def test_a_head_has_a_greatest_number_of_headers(server, count):
    headers = b"".join(b"X-%d: y\r\n" % i for i in range(count - 2))
    answer = exchange(server, b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%s\r\n" % headers)
    assert answer.startswith(b"HTTP/1.1 200" if count == 100 else b"HTTP/1.1 431")


@pytest.mark.parametrize(("size", "end"), [(2**15, b"\r\n\r\n"), (2**20, b"\r\n\r\n"), (200_000, b"")])
def test_a_head_has_a_greatest_size_and_is_refused_before_it_is_whole(server, size, end):
    answer = exchange(server, b"GET /live HTTP/1.1\r\nHost: x\r\nX-A: %s%s" % (b"y" * size, end))
    assert answer.startswith(b"HTTP/1.1 431") and b'"code":"headers_too_large"' in answer


def test_what_is_no_http_is_told_so_in_openais_shape(server):
    head, _, content = exchange(server, b"what is this\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"application/json" in head
    assert json.loads(content)["error"]["code"] == "invalid_http"
    assert b"\r\nconnection: close" in head.lower()
