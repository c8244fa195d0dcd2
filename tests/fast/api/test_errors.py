"""Mistakes of every kind get OpenAI's error shape and name what is wrong."""

import asyncio
import gc
import json
import socket
import time

import pytest

from app.api.body import MAX_BODY_BYTES
from tests.fast.api.connections import connection_address
from tests.fast.api.errors import CHAT, TEXT, error_of
from tests.fast.api.served import PATIENCE


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b"[]", b'"text"'])
def test_a_body_that_is_no_json_object_is_a_400(server, content):
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert error_of(server.http.post(path, content=content), 400)["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages.0.content"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        (
            {"messages": [{"role": "user", "content": "hi", "tool_calls": [{"id": "1"}]}]},
            "messages.0.tool_calls.0.function",
        ),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stop_token_ids": [5, 512]}, "stop_token_ids.1"),
        ({"stop_token_ids": [2**64]}, "stop_token_ids.0"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids"),
        ({"stop": "x" * 1025}, "stop"),
        ({"messages": [{"role": "user", "content": "hi"}] * 4097}, "messages"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"speculate": -1}, "speculate"),
        ({"speculate": 1.5}, "speculate"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 1}, "stream_options"),
        ({"model": 5}, "model"),
    ],
)
def test_a_wrong_value_is_named_by_its_dotted_path(server, fields, param):
    error = error_of(server.http.post("/v1/chat/completions", json=CHAT | fields), 400)
    assert error["type"] == "invalid_request_error" and error["code"]
    assert error["param"] == param or (param.endswith(".") and error["param"].startswith(param))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [-1]}, "`prompt.0` must be greater than or equal to 0, not -1."),
        ({"prompt": [5, -1]}, "`prompt.1` must be greater than or equal to 0, not -1."),
        ({"prompt": [[5], [-1]]}, "`prompt.1.0` must be greater than or equal to 0, not -1."),
        ({"speculate": -1}, "`speculate` must be greater than or equal to 0, not -1."),
        ({"stop": ""}, '`stop` must have at least 1 character, not "".'),
    ],
    ids=str,
)
def test_a_value_of_the_right_type_is_judged_by_its_own_type_alone(server, fields, message):
    assert error_of(server.http.post("/v1/completions", json=TEXT | fields), 400)["message"] == message


def test_a_token_that_the_model_does_not_know_is_a_400_and_the_server_goes_on(own_server):
    own_server.ready(vocab_size=3)
    for path, asked, param in (("/v1/completions", TEXT, "prompt"), ("/v1/chat/completions", CHAT, "messages")):
        error = error_of(own_server.http.post(path, json=asked), 400)
        assert (error["param"], error["code"]) == (param, "invalid_value") and "tokenizer.json" in error["message"]


@pytest.mark.parametrize("told", [True, False])
def test_a_body_above_the_limit_is_a_413_whether_its_length_is_told_or_not(server, told):
    body = b'{"prompt": "' + b"a" * MAX_BODY_BYTES + b'"}'
    content = body if told else iter([body[:100_000]] * (len(body) // 100_000 + 1))
    error = error_of(server.http.post("/v1/completions", content=content), 413)
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_too_large")
    assert f"{MAX_BODY_BYTES:,}" in error["message"]


def test_a_body_that_is_announced_as_too_large_is_not_waited_for(server):
    with socket.create_connection(connection_address(server), timeout=PATIENCE) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("content", [b"{}", b"{", b'{"a": 1, "a": 2}'])
def test_reading_json_does_not_leave_the_collector_off(server, monkeypatch, content):
    monkeypatch.setattr("app.api.body.MAX_BYTES_IN_PLACE", 0)
    server.http.post("/v1/completions", content=content)
    assert gc.isenabled()


def test_a_text_that_is_far_too_long_is_refused_without_tokenising_it(server, monkeypatch):
    monkeypatch.setattr(server.tokenizer, "backend", None)
    text = "a" * 1_000_000
    error = error_of(server.http.post("/v1/completions", json=TEXT | {"prompt": text}), 400)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    chat = [{"role": "user", "content": text}]
    error = error_of(server.http.post("/v1/chat/completions", json=CHAT | {"messages": chat}), 400)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "hello " * 1_300_000}),
        ("/v1/completions", {"prompt": [["a"] * 1_500_000]}),
        ("/v1/completions", {"prompt": [[]] * 1_500_000}),
        ("/v1/completions", {"prompt": [5] * 2_000_000}),
        ("/v1/completions", {"prompt": "hi", "stop_token_ids": [-1] * 1_500_000}),
        ("/v1/completions", {"prompt": "hi", "stop": [""] * 1_500_000}),
        ("/v1/chat/completions", {"messages": [0] * 1_500_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}] * 170_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [0] * 1_500_000}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}] * 300_000}]}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_no_body_freezes_the_server(own_server, path, fields):
    """/live answers at any time while the largest bodies are read and refused."""
    own_server.ready(max_model_len=2**20)
    body = json.dumps(fields, separators=(",", ":")).encode()
    assert len(body) <= MAX_BODY_BYTES
    longest = own_server.call(lambda: longest_stall(own_server, path, body))
    assert longest < max(1.0, 10 * seconds_to_read(body)), "which is more on a slow machine only"


def seconds_to_read(body):
    """Return the seconds that a thread takes for its JSON alone."""
    gc.disable()
    try:
        began = time.thread_time()
        json.loads(body)
        return time.thread_time() - began
    finally:
        gc.enable()


async def longest_stall(server, path, body):
    """Return the longest absence of the server's loop during a refusal, in seconds of this process's CPU time.

    All of its threads count, because one lock serves them. Other processes do not count.
    """
    asking = asyncio.get_running_loop().run_in_executor(None, lambda: server.http.post(path, content=body))
    longest, last = 0.0, time.process_time()
    while not asking.done():
        await asyncio.sleep(0.005)
        longest, last = max(longest, time.process_time() - last), time.process_time()
    assert asking.result().status_code in (400, 413)
    return longest


def test_what_a_client_sent_is_said_back_only_in_part(server):
    huge = "x" * 1_000_000
    server.script.plan([2])
    for path, fields in (
        ("/v1/completions", TEXT | {"model": huge}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "hi", huge: 1}]}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "hi", huge: {"logprobs": True}}]}),
        ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {huge: 1}}),
    ):
        response = server.http.post(path, json=fields)
        assert len(response.content) < 1500


def test_a_missing_prompt_is_named(server):
    error = error_of(server.http.post("/v1/completions", json={"model": "tiny"}), 400)
    assert (error["param"], error["code"]) == ("prompt", "missing_parameter")


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", TEXT),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_an_unknown_model_is_a_404_with_the_names_that_are_served(server, path, base):
    server.script.plan([2])
    assert server.http.post(path, json=base | {"model": "also-tiny"}).status_code == 200
    error = error_of(server.http.post(path, json=base | {"model": "gpt-9"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "gpt-9" in error["message"] and "`tiny`" in error["message"]


def test_a_prompt_that_fills_the_context_is_refused_with_the_limit_and_the_count(server):
    ids = [5] * 256
    error = error_of(server.http.post("/v1/completions", json=TEXT | {"prompt": ids}), 400)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert error["message"].count("256") == 2
    long = [{"role": "user", "content": "x" * 300}]
    error = error_of(server.http.post("/v1/chat/completions", json=CHAT | {"messages": long}), 400)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        *((path, "GET, HEAD") for path in ("/v1/models", "/v1/models/tiny", "/", "/metrics", "/openapi.json")),
        ("/version", "GET, HEAD"),
        *((path, "POST") for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")),
        ("/reset_prefix_cache", "POST"),
    ],
)
def test_a_wrong_method_is_told_every_right_one(server, path, allowed):
    for method in {"GET", "POST", "PUT", "DELETE"} - set(allowed.split(", ")):
        response = server.http.request(method, path)
        assert f"use {allowed}." in error_of(response, 405)["message"]
        assert response.headers["allow"] == allowed


@pytest.mark.parametrize("path", ["/v2/nothing", "/v1/chat/completions/"])
def test_an_unknown_path_is_a_404_in_the_same_shape(server, path):
    error_of(server.http.get(path), 404)


def test_a_bug_of_ours_is_a_500_in_the_same_shape_with_the_request_id(server, monkeypatch):
    def fail(text, most):
        raise RuntimeError("a secret")

    monkeypatch.setattr(server.tokenizer, "encode", fail)
    error = error_of(server.http.post("/v1/completions", json=TEXT), 500)
    assert error["type"] == "server_error" and "secret" not in error["message"]


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ('{"prompt": "a", "max_tokens": 5, "max_tokens": 500}', "max_tokens"),
        ('{"prompt": "a", "max_tokens": 5, "max_to\\u006bens": 5}', "max_tokens"),
        (
            '{"prompt": "a", "stream": true, "stream_options": {"include_usage": true, "include_usage": null}}',
            "include_usage",
        ),
        ('{"prompt": "a", "metadata": [{"deep": [{"k": 1, "": 2, "k": 3}]}]}', "k"),
        ('{"\\ud800": 1, "\\ud800": 2}', "?"),
    ],
)
def test_a_key_that_stands_twice_is_refused_by_name(server, body, key):
    """Parsers differ in which of the two they take: a proxy in front could have checked the other one."""
    error = error_of(server.http.post("/v1/completions", content=body), 400)
    assert error["param"] == key and "twice" in error["message"]


def test_the_same_key_in_two_objects_is_fine(server):
    server.script.plan([2])
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": 'role": "user", "role": "b'}]
    assert server.http.post("/v1/chat/completions", json=CHAT | {"messages": messages}).status_code == 200


def test_who_asks_from_another_origin_is_told_the_flag(server):
    asked = server.http.options("/v1/chat/completions", headers={"Origin": "http://a", "X": "y"})
    assert "--allowed-origins" in error_of(asked, 405)["message"]
    assert "--allowed-origins" not in error_of(server.http.get("/v1/chat/completions"), 405)["message"]
