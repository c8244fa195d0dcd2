"""The head of a stream goes out once its request is admitted. What fails before has a status, and later an event."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from app.api import body, stream
from app.text.detokenizer import Detokenizer
from tests.fast.api.errors import error_of
from tests.fast.api.served import Server, until

PATHS = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
}
every_path = pytest.mark.parametrize("path", PATHS)


@contextmanager
def opened(server: Server, path: str, **headers: str) -> Iterator[httpx.Response]:
    with server.http.stream("POST", path, json=PATHS[path] | {"stream": True}, headers=headers) as response:
        yield response


def data_of(text: str) -> list[dict]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@every_path
def test_the_head_is_there_before_the_first_token(server, path):
    with opened(server, path) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        server.script.emit(server.script.see("Submit")["request_id"], [*server.ids("fine"), 2])
        text = response.read().decode()
    assert "fine" in text and "error" not in data_of(text)[0]


@every_path
def test_a_stream_shows_that_it_lives_before_the_first_token(server, path, monkeypatch):
    monkeypatch.setattr(stream, "KEEP_ALIVE_SECONDS", 0.02)
    sign = "event: response.in_progress\n" if path == "/v1/responses" else ": keep-alive\n\n"
    received = ""
    with opened(server, path) as response:
        for text in response.iter_text():
            before, received = received.count(sign), received + text
            if before < 3 <= received.count(sign):
                server.script.emit(server.script.see("Submit")["request_id"], [*server.ids("fine"), 2])
    assert "fine" not in "".join(received.split(sign)[:3]) and "fine" in received


@every_path
@pytest.mark.parametrize("failure", ["refused by the engine", "deadline", "death of the engine", "bug"])
def test_what_fails_later_is_an_error_event_and_no_done(own_server, path, failure, monkeypatch, caplog):
    own_server.ready()
    codes = {"refused by the engine": "engine_error", "deadline": "deadline_exceeded", "bug": "internal_error"}
    with opened(own_server, path, **({"X-Request-Timeout": "60"} if failure == "deadline" else {})) as response:
        request_id = own_server.script.see("Submit")["request_id"]
        if failure == "refused by the engine":
            own_server.script.emit(request_id, [], finish="error", error="it has too many tokens")
        elif failure == "deadline":
            own_server.call(lambda: own_server.engine.expire(request_id))
        elif failure == "bug":
            monkeypatch.setattr(Detokenizer, "push", None)
            own_server.script.emit(request_id, own_server.ids("hello"))
        else:
            own_server.script.order("die", code=9)
        text = ""
        try:
            for part in response.iter_text():
                text += part
        except httpx.RemoteProtocolError:
            assert failure == "bug", "after which the connection is closed too"
    assert response.status_code == 200 and "[DONE]" not in text and '"finish_reason":"' not in text
    events = data_of(text)
    if path == "/v1/responses":
        kinds = ["response.created", "response.in_progress", "error", "response.failed"]
        assert [event["type"] for event in events] == kinds
        assert events[3]["response"]["status"] == "failed"
        error = events[2]
    else:
        ((error,),) = [list(event.values()) for event in events]
    assert error["code"] == codes.get(failure, "engine_loading"), error
    if failure == "bug":
        until(lambda: any(record.exc_info for record in caplog.records))


@every_path
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"model": "other"}, 404, "model"),
        ({"logit_bias": {"999": 1}}, 400, "logit_bias.999"),
    ],
    ids=["field", "model", "token"],
)
def test_a_stream_that_is_refused_has_the_status_of_the_refusal(server, path, fields, status, param):
    asked = server.http.post(path, json=PATHS[path] | {"stream": True} | fields)
    assert error_of(asked, status)["param"] == param


@every_path
def test_a_prompt_that_is_too_long_is_a_400_of_a_stream_too(server, path):
    (field,) = PATHS[path]
    text = "long " * 300
    given = [{"role": "user", "content": text}] if field == "messages" else text
    asked = server.http.post(path, json={field: given, "stream": True})
    assert error_of(asked, 400)["code"] == "context_length_exceeded"


@every_path
def test_a_body_that_is_too_large_is_a_413_of_a_stream_too(server, path, monkeypatch):
    monkeypatch.setattr(body, "MAX_BODY_BYTES", 10)
    error_of(server.http.post(path, json=PATHS[path] | {"stream": True}), 413)


@every_path
def test_a_full_server_is_a_429_of_a_stream_too(server, path):
    maximum = server.call(lambda: server.engine.admission.max_at_once(4))
    taken = server.call(lambda: server.engine.admission.acquire("another", maximum, 4))
    try:
        refused = server.http.post(path, json=PATHS[path] | {"stream": True})
        assert error_of(refused, 429)["code"] == "server_busy" and refused.headers["retry-after"]
    finally:
        server.call(taken.close)


@every_path
def test_an_engine_that_is_not_there_is_a_503_of_a_stream_too(own_server, path):
    refused = own_server.http.post(path, json=PATHS[path] | {"stream": True})
    assert error_of(refused, 503)["code"] == "engine_loading" and refused.headers["retry-after"]
