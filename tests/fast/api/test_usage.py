"""Usage and ends of answers: tokens of reasoning, and what ended a choice."""

from typing import Any

import pytest

from tests.fast.api.served import Server
from tests.fast.api.templates import ASK, CALL, QWEN, WEATHER

TEXT = {"model": "tiny", "prompt": "x", "max_tokens": 400}
PATHS = {"chat": ("/v1/chat/completions", ASK), "completions": ("/v1/completions", TEXT)}
both = pytest.mark.parametrize("kind", PATHS)
THOUGHT = "<think>hm</think>"
SERVED = {"template": QWEN, "reasoning_parser": "qwen3", "tool_call_parser": "qwen3"}


def chunks(server: Server, kind: str, options: dict[str, Any] | None = None, **fields: Any) -> list[dict[str, Any]]:
    path, ask = PATHS[kind]
    return server.chunks(path, ask | fields | {"stream_options": options})


def whole(server: Server, kind: str = "chat", **fields: Any) -> dict[str, Any]:
    path, ask = PATHS[kind]
    return server.http.post(path, json=ask | fields).json()


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
        (THOUGHT + CALL, len(THOUGHT)),
        (CALL, 0),
        ("  So.", 0),
        ("", 0),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_tokens_of_the_reasoning_are_counted(server, text, expected, size):
    ids = [*server.bytes(text), 2]
    server.script.plan(*[ids[start : start + size] for start in range(0, len(ids), size)])
    answer = whole(server, tools=[WEATHER])
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert chunks(server, "chat", {"include_usage": True}, tools=[WEATHER])[-1]["usage"] == answer["usage"]
    tool = {"type": "function", **WEATHER["function"]}
    response = server.http.post("/v1/responses", json={"input": "hello", "tools": [tool]}).json()
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": expected}
    bare = whole(server, "completions")
    assert bare["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("text", [THOUGHT + "So.", CALL])
def test_bare_completions_are_text_even_if_it_reads_like_reasoning_or_a_call(server, text):
    server.plan_text(text)
    assert whole(server, "completions")["choices"][0]["text"] == text


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
