"""Whatever JSON comes, the answer is one, or an error in OpenAI's shape: never a bug of ours, never silence."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.api.refusals import REFUSED
from app.api.responses_schemas import ResponsesRequest
from app.api.schemas import ChatCompletionRequest, CompletionRequest
from tests.fast.api.served import Server

CHAT, COMPLETIONS, RESPONSES = PATHS = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MODELS = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponsesRequest}
HELLO: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"prompt": "hello"},
    RESPONSES: {"input": "hello"},
}
CLIENTS_FAULT = {400, 404}
ANY = settings(suppress_health_check=list(HealthCheck))

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["", "user", "auto", "text", "function", "\x00", "\ud7ff", "\U0001f600", "1e999", "NaN"])
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def fields_of(path: str) -> list[str]:
    """All names that mean something there, those that are refused included."""
    return sorted({*MODELS[path].model_fields, *(refusal.field for refusal in REFUSED[MODELS[path]])} - {"stream"})


def near(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """A good body, with a few fields of any value."""
    strange = st.dictionaries(st.sampled_from(fields_of(path)), anything, max_size=3)
    return st.builds(lambda fields, stream: {**HELLO[path], **fields, "stream": stream}, strange, st.booleans())


parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "input_text", "summary_text"]) | anything, "text": anything}
)
calls = st.fixed_dictionaries({"id": anything, "type": anything, "function": anything})
message = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]) | anything,
        "content": st.text(max_size=20) | st.lists(parts, max_size=3) | anything,
        "name": anything,
        "tool_calls": st.lists(calls, max_size=2) | anything,
        "tool_call_id": anything,
        "reasoning_content": anything,
    },
)


item = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | anything,
        "role": st.sampled_from(["system", "user", "assistant", "developer"]) | anything,
        "content": st.text(max_size=20) | st.lists(parts, max_size=3) | anything,
        "output": st.text(max_size=20) | st.lists(parts, max_size=3) | anything,
        "call_id": st.text(max_size=5) | anything,
        "name": st.text(max_size=5) | anything,
        "arguments": st.sampled_from(["{}", "[]", ""]) | anything,
        "summary": st.lists(parts, max_size=2) | anything,
    },
)


@pytest.fixture(scope="module")
def talkative(shared_server: Server) -> Iterator[Server]:
    """Every request that is taken gets two steps of text."""
    shared_server.script.plan(shared_server.ids("hello"), [*shared_server.ids(" world"), 2])
    yield shared_server
    for gauge in ("num_requests_running", "num_requests_waiting"):
        shared_server.until_metric(gauge, 0)


def check(response: httpx.Response, body: object) -> None:
    """An answer with an end, or an error that tells the client what to change."""
    if response.status_code == 200 and "response.created" in response.text:
        assert "\nevent: response.completed\n" in response.text or "\nevent: response.incomplete\n" in response.text, (
            body
        )
    elif response.status_code == 200 and '"object":"response"' in response.text:
        assert response.json()["status"] in ("completed", "incomplete"), body
    elif response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n"), body
        assert '"finish_reason":"' in response.text, body
    elif response.status_code == 200:
        assert all(choice["finish_reason"] for choice in response.json()["choices"]), body
    else:
        assert response.status_code in CLIENTS_FAULT, (response.status_code, response.text, body)
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, body
        assert error["message"] and error["type"] == "invalid_request_error" and error["code"], body
        assert "Traceback" not in error["message"] and len(error["message"]) < 1000, body


@pytest.mark.parametrize("path", PATHS)
def test_any_json_gets_an_answer_or_an_error(talkative: Server, path: str) -> None:
    @settings(ANY, max_examples=150)
    @given(anything | near(path))
    def ask(body: Any) -> None:
        check(talkative.http.post(path, content=json.dumps(body)), body)

    ask()


@pytest.mark.parametrize(("path", "field", "of_field"), [(CHAT, "messages", message), (RESPONSES, "input", item)])
def test_any_conversation_gets_an_answer_or_an_error(talkative, path, field, of_field):
    @settings(ANY, max_examples=150)
    @given(st.lists(of_field, max_size=4))
    def ask(conversation: Any) -> None:
        body = {field: conversation}
        check(talkative.http.post(path, content=json.dumps(body)), body)

    ask()


@pytest.mark.parametrize("path", PATHS)
def test_any_bytes_get_an_error(talkative: Server, path: str) -> None:
    good = json.dumps({**HELLO[path], "temperature": 0.5, "stop": ["a", "\u00e9"]}, ensure_ascii=False).encode()

    @settings(ANY, max_examples=100)
    @given(
        st.binary(max_size=60)
        | st.integers(0, len(good)).map(lambda end: good[:end])
        | st.tuples(st.integers(0, len(good) - 1), st.binary(min_size=1, max_size=3)).map(
            lambda cut: good[: cut[0]] + cut[1] + good[cut[0] + 1 :]
        )
    )
    def ask(body: bytes) -> None:
        check(talkative.http.post(path, content=body), body)

    ask()
