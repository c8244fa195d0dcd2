"""Bytes as odd clients send them: upgrades, HTTP/1.0, stalled and packed bodies, paths made to forge the log."""

import json
import logging

import pytest

from app.api import body
from tests.fast.api.connections import exchange
from tests.fast.api.errors import TEXT as ASK
from tests.fast.api.errors import error_of


def raw(head: str, sent: dict) -> bytes:
    """A request with this head, whose connection the server or the request itself closes."""
    data = json.dumps(sent).encode()
    return "\r\n".join([*head.format(length=len(data)).splitlines(), "", ""]).encode() + data


def test_an_offer_of_h2c_as_javas_client_makes_it_is_passed_over(server):
    server.script.plan([*server.ids("fine"), 2])
    head = (
        "POST /v1/completions HTTP/1.1\nHost: a\nConnection: Upgrade, HTTP2-Settings, close\nUpgrade: h2c\n"
        "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\nContent-Length: {length}"
    )
    answer = exchange(server, raw(head, ASK))
    assert answer.startswith(b"HTTP/1.1 200") and b'"text":"fine"' in answer


def test_a_stream_to_an_http_1_0_client_is_not_chunked(server):
    server.script.plan([*server.ids("fine"), 2])
    head = "POST /v1/completions HTTP/1.0\nContent-Length: {length}\nContent-Type: application/json"
    answer = exchange(server, raw(head, ASK | {"stream": True}))
    head, _, text = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert text.startswith(b"data: {") and text.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("version", "headers"),
    [
        ("1.1", "Content-Length: 5\nTransfer-Encoding: chunked"),
        ("1.1", "Transfer-Encoding: chunked\nContent-Length: 5"),
        ("1.1", "Transfer-Encoding: chunked\nContent-Length: 0"),
        ("1.0", "Transfer-Encoding: chunked\nConnection: keep-alive"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/nothing", "/live"])
def test_a_body_with_two_ends_is_refused_and_what_follows_is_not_read(server, version, headers, path):
    hidden = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
    data = json.dumps(ASK).encode()
    head = f"POST {path} HTTP/{version}\nHost: a\n{headers}".replace("\n", "\r\n").encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    answer = exchange(server, head + b"\r\n\r\n" + chunked + hidden)
    assert answer.startswith(b"HTTP/1.1 400") and b"\r\nconnection: close" in answer.lower()
    assert b'"code":"invalid_http"' in answer and answer.count(b"HTTP/1.1 ") == 1


def test_a_chunked_body_alone_keeps_its_connection(server):
    server.script.plan([*server.ids("fine"), 2])
    data = json.dumps(ASK).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    after = b"GET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    answer = exchange(server, head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data) + after)
    assert answer.count(b"HTTP/1.1 200") == 2


def test_a_path_cannot_forge_a_line_of_the_log(server, caplog):
    with caplog.at_level(logging.INFO, logger="app.access"):
        server.http.get("/a%0aFORGED%1b[31m%00")
        server.http.get("/version")  # On the same connection: by now the first line is written.
    assert "FORGED" in caplog.text
    assert "\nFORGED" not in caplog.text and "\x1b" not in caplog.text and "\0" not in caplog.text


def test_a_body_that_does_not_come_is_not_waited_for_forever(server, monkeypatch):
    monkeypatch.setattr(body, "BODY_SECONDS", 0.05)
    answer = exchange(server, raw("POST /v1/completions HTTP/1.1\nHost: a\nContent-Length: 5000", ASK))
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_a_packed_body_is_refused_by_its_header(server, encoding):
    response = server.http.post("/v1/completions", content=b"\x1f\x8b", headers={"Content-Encoding": encoding})
    assert response.status_code == 415
    assert encoding in response.json()["error"]["message"]


def test_an_empty_body_is_called_empty(server):
    error = server.http.post("/v1/completions", content=b"").json()["error"]
    assert "empty" in error["message"] and error["code"] == "invalid_json"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("digits", [20, 400, 640, 641])
def test_a_number_of_any_length_is_a_clear_400(server, path, digits):
    ask = ASK if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    number = "9" * digits
    response = server.http.post(path, content=json.dumps(ask | {"max_tokens": 0}).replace(": 0}", f": {number}}}"))
    error = response.json()["error"]
    assert response.status_code == 400 and len(error["message"]) < 300
    assert error["param"] == ("max_tokens" if digits <= 640 else None)
    assert (error["code"] == "invalid_json") == (digits > 640), "as a number that no parser reads"


@pytest.mark.parametrize("depth", [65, 500, 900, 957, 958, 959, 960, 2000])
def test_arguments_nested_too_deeply_are_a_clear_400(server, depth):
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    response = server.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages.1.tool_calls.0.function.arguments"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_that_is_no_text_is_told_what_this_model_reads(server, kind):
    part = {"type": kind, kind: {"url": "data:image/png;base64,AA"}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    error = error_of(server.http.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == "messages.0.content.0.type"
    assert all(word in error["message"] for word in ("images", '"text"', '"thinking"'))


def test_more_tokens_than_the_context_has_names_the_field_that_asks(server):
    error = server.http.post("/v1/completions", json=ASK | {"max_tokens": 257}).json()["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    error = server.http.post("/v1/completions", json=ASK | {"max_tokens": 256}).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize("value", ["false", 0, "no"])
def test_a_switch_that_is_no_boolean_is_not_taken_for_true(server, value):
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"enable_thinking": value}}
    error = server.http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "chat_template_kwargs.enable_thinking"
