"""The API counts hits of the prefix cache, and only the right keys flush it."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fast.api.served import Server, serving_ready

CHAT = ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hello world"}]})
TEXT = ("/v1/completions", {"model": "tiny", "prompt": "hello world"})
FLUSHES = ["/reset_prefix_cache", "/flush_cache"]


@pytest.fixture(scope="module")
def guarded(model_folder: Path) -> Iterator[dict[str, Server]]:
    """Ready servers by what keys they have."""
    keys = {
        "none": {},
        "api": {"api_key": ["user"]},
        "admin": {"admin_key": ["root", "toor"]},
        "both": {"api_key": ["user"], "admin_key": ["root"], "root_path": "/llm"},
    }
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(serving_ready(model_folder, **options)) for name, options in keys.items()}


def bearer(key):
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def usages(response, stream):
    """Every usage that an answer tells, the last one last."""
    if not stream:
        return [response.json()["usage"]]
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return [event["usage"] for event in events if event.get("usage")]


@pytest.mark.parametrize(("path", "base"), [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cached", [0, 16])
def test_usage_says_how_much_of_the_prompt_was_cached(server, path, base, stream, cached):
    server.script.plan(server.ids("fine"), [2], cached_tokens=cached)
    streamed = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    told = usages(server.http.post(path, json=base | (streamed if stream else {})), stream)
    assert {usage["prompt_tokens_details"]["cached_tokens"] for usage in told} == {cached}


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_are_summed_and_choices_of_a_prompt_count_once(server, background, stream):
    server.script.by_hand(cached_tokens=16)
    body = TEXT[1] | {"prompt": ["hello", "world"], "n": 3, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    running = background.submit(lambda: server.http.post(TEXT[0], json=body))
    for request_id in [server.script.see("Submit")["request_id"] for _ in range(6)]:
        server.script.emit(request_id, [2])
    assert usages(running.result(), stream)[-1]["prompt_tokens_details"] == {"cached_tokens": 32}


@pytest.mark.parametrize("path", FLUSHES)
def test_a_flush_is_told_to_the_engine(server, path):
    response = server.http.post(path)
    assert (response.status_code, response.json()) == (200, {"success": True})
    assert server.script.see("FlushCache")


def test_a_flush_while_a_request_runs_disturbs_it_in_no_way(server, background):
    running, request_id = server.begin(background)
    assert server.http.post("/reset_prefix_cache").status_code == 200
    server.script.see("FlushCache")
    server.script.emit(request_id, [*server.ids("fine"), 2])
    assert running.result().json()["choices"][0]["text"] == "fine"


def test_a_flush_reaches_the_engine_before_a_later_request(server, background):
    server.http.post("/reset_prefix_cache")
    running, request_id = server.begin(background)
    assert [event["what"] for event in server.script.later if event["what"] != "obeyed"] == ["FlushCache"]
    server.script.emit(request_id, [2])
    assert running.result().status_code == 200


@pytest.mark.parametrize("path", FLUSHES)
def test_while_the_engine_loads_or_drains_there_is_nothing_to_flush(own_server, path):
    refused = own_server.http.post(path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_loading")
    assert int(refused.headers["retry-after"]) > 0
    own_server.ready()
    own_server.call(lambda: own_server.engine.drain(1))
    assert own_server.http.post(path).json()["error"]["code"] == "engine_draining"


def test_an_engine_that_answered_a_flush_is_idle_again(own_server):
    own_server.ready()
    own_server.http.post("/reset_prefix_cache")
    own_server.script.see("FlushCache")

    async def idle():
        while own_server.engine.supervisor._has_work.is_set():
            await asyncio.sleep(0.01)

    own_server.call(idle)


@pytest.mark.parametrize(
    ("has", "key", "status"),
    [
        ("none", None, 200),
        ("none", "whatever", 200),
        ("api", None, 401),
        ("api", "wrong", 401),
        ("api", "user", 200),
        ("admin", None, 401),
        ("admin", "wrong", 401),
        ("admin", "root", 200),
        ("admin", "toor", 200),
        ("both", None, 401),
        ("both", "wrong", 401),
        ("both", "user", 401),
        ("both", "root", 200),
    ],
)
@pytest.mark.parametrize("path", FLUSHES)
def test_who_may_flush(guarded, has, key, status, path):
    prefixes = ["", "/llm"] if has == "both" else [""]
    for prefix in prefixes:
        response = guarded[has].http.post(prefix + path, headers=bearer(key))
        assert response.status_code == status
        if status == 401:
            error = response.json()["error"]
            assert (error["code"], response.headers["www-authenticate"]) == ("invalid_api_key", "Bearer")
            assert ("admin" in error["message"]) == (has == "admin" or key == "user")
        else:
            guarded[has].script.see("FlushCache")


@pytest.mark.parametrize(
    ("has", "key", "status"),
    [("admin", None, 200), ("admin", "wrong", 200), ("both", None, 401), ("both", "user", 200), ("both", "root", 200)],
)
def test_an_admin_key_opens_what_an_api_key_opens_and_closes_nothing_else(guarded, has, key, status):
    assert guarded[has].http.get("/v1/models", headers=bearer(key)).status_code == status
