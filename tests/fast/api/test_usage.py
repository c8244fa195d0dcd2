"""Usage and ends of answers: tokens that were sent, tokens of reasoning, and what ended a choice."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.text.parsers import qwen3
from tests.fast.api.served import Server
from tests.fast.api.templates import ASK, CALL, WEATHER, serving_template

TEXT = {"model": "tiny", "prompt": "x", "max_tokens": 400}
PATHS = {"chat": ("/v1/chat/completions", ASK), "completions": ("/v1/completions", TEXT)}
both = pytest.mark.parametrize("kind", PATHS)
CONTINUOUS = {"continuous_usage_stats": True, "include_usage": True}
THOUGHT = "<think>hm</think>"


@pytest.fixture(scope="module")
def shared_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("usage") / "qwen"
    with serving_template(model_folder, folder, reasoning=True, tool_family=qwen3.FAMILY) as server:
        yield server


def chunks(server: Server, kind: str, options: dict[str, Any] | None = None, **fields: Any) -> list[dict[str, Any]]:
    path, ask = PATHS[kind]
    response = server.http.post(path, json=ask | fields | {"stream": True, "stream_options": options})
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def whole(server: Server, kind: str = "chat", **fields: Any) -> dict[str, Any]:
    path, ask = PATHS[kind]
    return server.http.post(path, json=ask | fields).json()


def counted(chunk: dict[str, Any]) -> tuple[str, int]:
    """Return the text of a chunk, and the tokens that it counts."""
    (choice,) = chunk["choices"]
    delta = choice.get("delta") or {"content": choice.get("text")}
    text = delta.get("content") or delta.get("reasoning_content") or ("a call" if "tool_calls" in delta else "")
    return text, chunk["usage"]["completion_tokens"]


def stepwise(server: Server, kind: str, *steps: list[int], **fields: Any) -> list[tuple[str, int]]:
    """Return what each chunk shows and counts. A step is emitted when the step before has shown something."""
    server.script.by_hand()
    path, ask = PATHS[kind]
    body = ask | fields | {"stream": True, "stream_options": CONTINUOUS}
    left = [*steps, [2]]
    found: list[tuple[str, int]] = []

    def emit() -> None:
        server.script.emit(request_id, left.pop(0))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(lambda: server.http.send(server.http.build_request("POST", path, json=body), stream=True))
        request_id = server.script.see("Submit")["request_id"]
        emit()
        response = asking.result()
        for line in response.iter_lines():
            if line.startswith("data: {") and (chunk := json.loads(line[6:]))["choices"]:
                found.append(counted(chunk))
                if found[-1][0] and left:
                    emit()
        response.close()
    return found


@both
def test_the_opening_counts_no_token(server, kind):
    echo = {"echo": True} if kind == "completions" else {}
    server.script.plan(server.bytes("abc"), [2])
    received = [counted(chunk) for chunk in chunks(server, kind, CONTINUOUS, **echo) if chunk["choices"]]
    assert received[0] == ("x" if echo else "", 0)
    assert received[-1] == ("", 4)


@both
def test_tokens_that_a_stop_string_holds_back_are_not_counted(server, kind):
    received = stepwise(server, kind, server.bytes("ab<s"), server.bytes("tx"), stop="<stop>")
    assert received[-3:] == [("ab", 2), ("<stx", 6), ("", 7)]


@both
def test_tokens_of_a_character_that_is_not_whole_are_not_counted(server, kind):
    ids = server.bytes("a漢b")
    assert stepwise(server, kind, ids[:2], ids[2:])[-3:] == [("a", 1), ("漢b", 5), ("", 6)]


def test_tokens_that_the_parser_of_reasoning_holds_back_are_not_counted(server):
    received = stepwise(server, "chat", server.bytes("<think>hm \n</th"), server.bytes("ink>So."))
    assert received == [("", 0), ("hm", 9), ("So.", 22), ("", 23)]


def test_tokens_of_a_call_are_counted_with_the_whole_call(server):
    text = f"So {CALL}"
    received = stepwise(server, "chat", server.bytes(text[:20]), server.bytes(text[20:]), tools=[WEATHER])
    assert received == [("", 0), ("So", 2), ("a call", len(text)), ("", len(text) + 1)]


def test_a_chunk_of_reasoning_counts_no_token_of_the_content(server):
    server.script.plan(server.bytes(f"{THOUGHT}So."), [2])
    received = [counted(chunk) for chunk in chunks(server, "chat", CONTINUOUS) if chunk["choices"]]
    assert received[:2] == [("", 0), ("hm", len(THOUGHT))]
    assert received[2][0] == "So." and received[2][1] >= len(THOUGHT) + 3


@both
def test_each_choice_counts_what_it_has_sent(server, kind):
    server.script.plan(server.bytes("ab"), [2])
    numbers = [counted(chunk)[1] for chunk in chunks(server, kind, CONTINUOUS, n=2) if chunk["choices"]]
    assert numbers == sorted(numbers)
    assert numbers[0] <= (0 if kind == "chat" else 3)
    assert numbers[-1] == 6


@both
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"include_usage": False, "continuous_usage_stats": True}, False),
        ({"continuous_usage_stats": True}, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True),
        ({"include_usage": False}, False),
    ],
    ids=str,
)
def test_usage_is_sent_only_where_it_is_asked_for(server, kind, options, wanted):
    server.script.plan(server.bytes("ab"), [2])
    assert any(chunk.get("usage") for chunk in chunks(server, kind, options)) is wanted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHT}So.", len(THOUGHT)),
        ("\n<think>\nhm\n</think>\n\nSo.", len("\n<think>\nhm\n</think>")),
        ("So.", 0),
        ("<think>hm", len("<think>hm") + 1),
        ("<thi", 0),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_tokens_of_the_reasoning_are_counted(server, text, expected, size):
    ids = [*server.bytes(text), 2]
    server.script.plan(*[ids[start : start + size] for start in range(0, len(ids), size)])
    answer = whole(server)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
    assert chunks(server, "chat", {"include_usage": True})[-1]["usage"] == answer["usage"]
    response = server.http.post("/v1/responses", json={"input": "hello"}).json()
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": expected}
    bare = whole(server, "completions")
    assert bare["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@both
@pytest.mark.parametrize(
    ("fields", "stop_reason", "matched_stop"),
    [
        ({}, None, 2),
        ({"stop": ["zz", "b"]}, "b", "b"),
        ({"stop": ["bc", "abc"]}, "abc", "abc"),
        ({"max_tokens": 2}, None, None),
        ({"stop_token_ids": ["c"]}, "c", "c"),
        ({"stop_token_ids": ["c"], "stop": "b"}, "b", "b"),
        ({"ignore_eos": True, "stop_token_ids": [2]}, 2, 2),
        ({"stop_token_ids": [2]}, None, 2),
    ],
    ids=str,
)
def test_a_choice_says_what_ended_it(server, kind, fields, stop_reason, matched_stop):
    token = server.bytes("c")[0]
    if "stop_token_ids" in fields:
        fields = fields | {"stop_token_ids": [token if item == "c" else item for item in fields["stop_token_ids"]]}
    ends = {None: None, "c": token}
    expected = (ends.get(stop_reason, stop_reason), ends.get(matched_stop, matched_stop))
    for steps in (([*server.bytes("abc"), 2],), ([token] for token in [*server.bytes("abc"), 2])):
        server.script.plan(*steps)
        (choice,) = whole(server, kind, **fields)["choices"]
        assert (choice["stop_reason"], choice["matched_stop"]) == expected
        *earlier, last = [chunk["choices"][0] for chunk in chunks(server, kind, **fields)]
        assert (last["stop_reason"], last["matched_stop"]) == expected
        assert not any("stop_reason" in choice or "matched_stop" in choice for choice in earlier)
