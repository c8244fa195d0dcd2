"""The access log: who asked, what for, what came of it. In JSON each fact is a field."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from app import log
from tests.fast.api.connections import connect
from tests.fast.api.served import Server, until

ASK = {"model": "tiny", "prompt": "hi"}


@pytest.fixture
def access(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "app.access"):
        yield caplog


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the line of a record in JSON."""
    found: dict[str, Any] = json.loads(log._Json().format(record))
    return found


def line_of(access: pytest.LogCaptureFixture) -> dict[str, Any]:
    """Return the only line, which is written after the client has its answer."""
    until(lambda: any(record.name == "app.access" for record in access.records))
    (line,) = [fields(record) for record in access.records if record.name == "app.access"]
    return line


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_its_client_model_tokens_and_reasons(server: Server, access, stream: bool) -> None:
    server.script.plan([*server.ids("hello"), 2])
    assert server.http.post("/v1/completions", json=ASK | {"stream": stream, "n": 2}).status_code == 200
    line = line_of(access)
    prompt, answer = len(server.ids("hi")), len(server.ids("hello")) + 1
    counts = {"prompt_tokens": prompt, "completion_tokens": 2 * answer, "finish_reason": "stop,stop"}
    asked = {"method": "POST", "path": "/v1/completions", "status": 200, "client": "127.0.0.1", "model": "tiny"}
    assert line.items() >= (asked | counts).items() and line["ms"] > 0
    assert f"client=127.0.0.1 model=tiny prompt_tokens={prompt}" in line["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "param"),
    [
        ("POST", "/v1/completions", ASK | {"temperature": -1}, 400, "invalid_value", "temperature"),
        ("POST", "/v1/completions", ASK | {"model": "gpt"}, 404, "model_not_found", "model"),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "x"}]}, 400, "invalid_value", "messages.0.role"),
        ("GET", "/nothing", None, 404, "not_found", None),
        ("GET", "/v1/completions", None, 405, "method_not_allowed", None),
    ],
)
def test_a_refusal_has_its_code_and_param(server: Server, access, method, path, body, status, code, param) -> None:
    assert server.http.request(method, path, json=body).status_code == status
    line = line_of(access)
    assert (line["status"], line["code"], line.get("param")) == (status, code, param)
    assert f"code={code}" in line["message"]


def test_a_line_cannot_be_forged_by_the_name_of_a_field(server: Server, access) -> None:
    body = {"messages": [{"role": "user", "content": "hi", "a\nb c": {"logprobs": True}}]}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 400
    line = line_of(access)
    assert line["param"] == "messages.0.a\nb c.logprobs" and "param=messages.0.a%0Ab%20c" in line["message"]


def test_a_stream_whose_client_left_is_logged_and_counted_as_499(own_server: Server, access) -> None:
    own_server.ready()
    with connect(own_server, "/v1/completions", stream=True) as connection:
        request_id = own_server.script.see("Submit")["request_id"]
        own_server.script.emit(request_id, own_server.ids("hello"))
        while b"hello" not in connection.recv(10_000):
            pass
    own_server.script.see("Abort")
    line = line_of(access)
    assert (line["status"], line["finish_reason"], line["path"]) == (499, "abort", "/v1/completions")
    own_server.until_metric("http_responses_total", 1, status="499")


def test_statuses_are_counted(own_server: Server) -> None:
    own_server.ready()
    own_server.http.post("/v1/completions", json=ASK | {"temperature": -1})
    own_server.until_metric("http_responses_total", 1, status="400")
    assert own_server.metric("http_responses_total", status="200") > 0
    assert 'dflash:http_responses_total{status="500"} 0.0' in own_server.http.get("/metrics").text, (
        "known from the start"
    )


def test_a_line_has_no_more_of_a_path_or_an_address_than_names_them(server: Server, access) -> None:
    server.http.get("/" + "\u00ff" * 1000, headers={"X-Forwarded-For": "a" * 20_000})
    line = line_of(access)
    assert len(line["path"]) <= 128 * len("%C3%BF") and len(line["client"]) <= 128
