"""Conversations as OpenAI, vLLM and their SDKs write them: what an answer had may be sent back. Unknown notes beside it
pass with a warning that names their path."""

import json
from typing import Any

import pytest

from tests.fast.api.errors import error_of
from tests.fast.api.served import Server
from tests.fast.api.templates import HEAD, HELLO, QWEN, TURN, prompt_of

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SAID = {"role": "assistant", "content": "5."}
CALL = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
TOOL = {"type": "function", "function": {"name": "clock"}}
ITEM = {"type": "function_call", "call_id": "a", "name": "clock", "arguments": {"zone": "UTC"}}
CLOCK = {"type": "function", "name": "clock"}
SPACE: dict[str, Any] = {"type": "namespace", "name": "n", "tools": [CLOCK | {"name": name} for name in "ab"]}
OUTPUT = {"type": "output_text", "text": "5."}
REFUSAL = {"type": "refusal", "refusal": "I cannot."}
SERVED = {"template": QWEN, "tool_call_parser": "qwen3"}


def turn(text: str) -> str:
    """The prompt of HELLO, an answer with this text, and HELLO."""
    return f"{HEAD}{TURN}{text}<|im_end|>\n{HEAD}{TURN}"


def asked(path: str, *turns: Any, **fields: Any) -> dict[str, Any]:
    """A body of chat or of responses with these turns between two greetings."""
    return {"messages" if path == CHAT else "input": [HELLO, *turns, HELLO]} | fields


def warnings(server: Server, path: str, body: dict[str, Any]) -> list[str]:
    """Return the paths of unknown fields that a whole answer and a streamed one name. All are counted in both."""
    told = []
    server.script.plan([2])
    for stream in (False, True):
        before = server.metric("unknown_fields_total")
        response = server.http.post(path, json=body | {"stream": stream})
        assert response.status_code == 200, response.text
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")] or [response.text]
        answers = [event.get("response", event) for event in map(json.loads, lines)]
        of_answer = [warning for answer in answers for warning in answer.get("warnings", [])]
        assert all(
            warning["code"] == "unknown_field" and f"`{warning['param']}`" in warning["message"]
            for warning in of_answer
        )
        assert server.metric("unknown_fields_total") == before + len(of_answer)
        told.append([warning["param"] for warning in of_answer])
    assert told[0] == told[1]
    return told[0]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None, "reasoning_content": "2 + 3"}, "<think>\n2 + 3\n</think>\n\n"),
        ({"content": None, "reasoning": "2 + 3"}, "<think>\n2 + 3\n</think>\n\n"),
        ({"content": None, "reasoning": "2 + 3", "reasoning_content": "2 + 3"}, "<think>\n2 + 3\n</think>\n\n"),
        ({"reasoning": "2 + 3"}, "<think>\n2 + 3\n</think>\n\n"),
        ({"content": None, "reasoning_content": ""}, "<think>\n\n</think>\n\n"),
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": "", "refusal": "I cannot."}, "I cannot."),
        ({"content": "Well.", "refusal": "I cannot."}, "Well.\nI cannot."),
        ({"content": [REFUSAL]}, "I cannot."),
        ({"content": [{"type": "text", "text": "Well."}, REFUSAL]}, "Well.\nI cannot."),
        ({"content": [{"type": "output_text", "text": "5.", "annotations": [{"a": 1}], "logprobs": []}]}, "5."),
        (
            {"content": "5.", "refusal": None, "annotations": [{"type": "url_citation"}], "audio": None}
            | {"function_call": None, "tool_calls": None, "parsed": None},
            "5.",
        ),
    ],
    ids=str,
)
def test_an_answer_of_openai_or_vllm_is_a_turn_of_history(server, message, text):
    messages = [HELLO, {"role": "assistant", **message}, HELLO]
    assert prompt_of(server, messages=messages) == turn(text)
    assert warnings(server, CHAT, {"messages": messages}) == []


@pytest.mark.parametrize("content", [[REFUSAL], [OUTPUT | {"text": "I cannot.", "annotations": [{"a": 1}]}]], ids=str)
def test_a_refusal_and_annotations_may_be_sent_back_to_responses(server, content):
    message = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": content}
    assert warnings(server, RESPONSES, asked(RESPONSES, message)) == []
    assert server.prompt() == turn("I cannot.")


def test_an_assistants_turn_without_anything_is_still_refused(server):
    for nothing in ({}, {"content": None}, {"content": None, "tool_calls": [], "refusal": None}):
        error = error_of(server.http.post(CHAT, json=asked(CHAT, {"role": "assistant", **nothing})), 400)
        assert (error["param"], error["code"]) == ("messages.1.content", "missing_parameter")


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("arguments", [{"zone": "UTC"}, '{"zone": "UTC"}'], ids=["object", "text"])
def test_arguments_of_a_call_are_an_object_or_its_text(server, path, arguments):
    called = {"role": "assistant", "content": None, "tool_calls": [CALL | {"type": None}]}
    called["tool_calls"][0]["function"] = {"name": "clock", "arguments": arguments}
    assert warnings(server, path, asked(path, called if path == CHAT else ITEM | {"arguments": arguments})) == []
    assert '{"name": "clock", "arguments": {"zone": "UTC"}}' in server.prompt()


def answered(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    server.script.plan([2])
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def history_of(path: str, arguments: Any) -> dict[str, Any]:
    called = {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "clock", "arguments": arguments}}]}
    return asked(path, called if path == CHAT else ITEM | {"arguments": arguments})


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("text", ['{"zone": "UT', '{"zone"', '{"zone": ["UTC",', "{"])
def test_arguments_that_a_limit_has_cut_reach_the_prompt_as_a_text_with_a_warning(server, path, text):
    (warning,) = answered(server, path, history_of(path, text))["warnings"]
    param = "messages.1.tool_calls.0.function.arguments" if path == CHAT else "input.1"
    assert (warning["code"], warning["param"]) == ("arguments_cut", param)
    assert json.dumps({"arguments": text}) in server.prompt()


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_an_argument_of_that_name_that_is_whole_json_is_not_cut(server, path):
    assert "warnings" not in answered(server, path, history_of(path, {"arguments": '{"zone": "UTC"}'}))


def test_encrypted_reasoning_is_the_text_for_clients_that_send_only_that_back(start):
    server = start(QWEN, reasoning_parser="qwen3")
    sent = {"include": ["reasoning.encrypted_content"], "store": False}
    thoughts = []
    for fields in (sent, {}):
        server.plan_text("<think>2 + 3</think>5.")
        thoughts.append(server.http.post(RESPONSES, json=asked(RESPONSES, **fields)).json()["output"][0])
        server.prompt()
    sealed = thoughts[0].pop("encrypted_content")
    assert "2 + 3" not in sealed and [thought["content"][0]["text"] for thought in thoughts] == ["2 + 3"] * 2
    assert "encrypted_content" not in thoughts[1]
    back = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    assert "warnings" not in answered(server, RESPONSES, asked(RESPONSES, back, SAID, **sent))
    assert "2 + 3" in server.prompt()


@pytest.mark.parametrize("foreign", ["x", "text:x", "text:/w=="])
def test_reasoning_that_another_server_encrypted_is_left_out_with_a_warning(server, foreign):
    body = asked(RESPONSES, *[{"type": "reasoning", "summary": [], "encrypted_content": foreign}] * 2)
    (warning,) = answered(server, RESPONSES, body)["warnings"]
    assert (warning["code"], warning["param"]) == ("reasoning_left_out", "input.1.encrypted_content")


NOTES = [
    (CHAT, asked(CHAT, SAID | {"colour": "red"}), "messages.1.colour"),
    (CHAT, asked(CHAT, SAID | {"audio": {"id": "audio_1"}}), "messages.1.audio"),
    (CHAT, asked(CHAT, SAID | {"parsed": {"regex": "a", "logprobs": 1}}), "messages.1.parsed"),
    (CHAT, asked(CHAT, SAID | {"logprobs": {"content": [{"top_logprobs": [{"token": "a"}]}]}}), "messages.1.logprobs"),
    (CHAT, asked(CHAT, SAID | {"content": [{"type": "text", "text": "5.", "role": "x"}]}), "messages.1.content.0.role"),
    (CHAT, asked(CHAT, SAID | {"content": [REFUSAL | {"x": 1}]}), "messages.1.content.0.x"),
    (
        CHAT,
        asked(CHAT, SAID | {"tool_calls": [CALL | {"extra_content": {"a": 1}}]}),
        "messages.1.tool_calls.0.extra_content",
    ),
    (
        CHAT,
        asked(CHAT, SAID | {"tool_calls": [CALL | {"function": CALL["function"] | {"parsed_arguments": {"a": 1}}}]}),
        "messages.1.tool_calls.0.function.parsed_arguments",
    ),
    (CHAT, asked(CHAT, tools=[TOOL | {"x": 1}]), "tools.0.x"),
    (CHAT, asked(CHAT, tools=[TOOL | {"function": {"name": "clock", "x": 1}}]), "tools.0.function.x"),
    (CHAT, asked(CHAT, tools=[TOOL], tool_choice={**TOOL, "x": 1}), "tool_choice.x"),
    (CHAT, asked(CHAT, stream_options={"include_usage": False, "more": 1}, stream=True), "stream_options.more"),
    (RESPONSES, asked(RESPONSES, SAID | {"parsed": 1}), "input.1.parsed"),
    (RESPONSES, asked(RESPONSES, SAID | {"content": [OUTPUT | {"parsed": 1}]}), "input.1.content.0.parsed"),
    (
        RESPONSES,
        asked(RESPONSES, SAID | {"content": [OUTPUT | {"logprobs": [{"a": 1}]}]}),
        "input.1.content.0.logprobs",
    ),
    (RESPONSES, asked(RESPONSES, ITEM | {"parsed_arguments": {"zone": "UTC"}}), "input.1.parsed_arguments"),
    (RESPONSES, asked(RESPONSES, tools=[SPACE, {"type": "function", "name": "f", "x": 1}]), "tools.1.x"),
    (RESPONSES, asked(RESPONSES, tools=[{**SPACE, "tools": [*SPACE["tools"], CLOCK | {"x": 1}]}]), "tools.0.tools.2.x"),
    (RESPONSES, asked(RESPONSES, reasoning={"mode": "pro"}), "reasoning.mode"),
    (RESPONSES, asked(RESPONSES, text={"x": 1}), "text.x"),
    (RESPONSES, asked(RESPONSES, stream=True, stream_options={"include_usage": True}), "stream_options.include_usage"),
]


@pytest.mark.parametrize(("path", "body", "param"), NOTES, ids=[param for _, _, param in NOTES])
def test_an_unknown_note_passes_with_a_warning_that_names_its_path(server, path, body, param):
    if "stream_options" in body and path == CHAT:
        server.script.plan([2])
        chunks = server.chunks(path, body)
        assert [warning["param"] for chunk in chunks for warning in chunk.get("warnings", [])] == [param]
    else:
        assert warnings(server, path, body) == [param]
    prompt = server.prompt()
    assert "red" not in prompt and '"x"' not in prompt


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"messages": [HELLO | {"colour": "red"}]}),
        ("/v1/chat/completions/render", {"messages": [HELLO | {"colour": "red"}]}),
        ("/tokenize", {"prompt": "a", "colour": "red"}),
        ("/detokenize", {"tokens": [5], "colour": "red"}),
        ("/v1/completions/render", {"prompt": "a", "colour": "red"}),
    ],
)
def test_endpoints_that_generate_nothing_warn_too(server, path, body):
    before = server.metric("unknown_fields_total")
    answer = server.http.post(path, json=body).json()
    (warning,) = (answer[0] if isinstance(answer, list) else answer)["warnings"]
    assert warning["param"] == ("messages.0.colour" if "messages" in body else "colour")
    assert server.metric("unknown_fields_total") == before + 1


def test_sixteen_notes_are_told_and_all_are_counted_with_paths_of_128_characters(server):
    server.script.plan([2])
    noted = [SAID | {f"{'x' * 200}{i}": 1 for i in range(10)} for _ in range(4)]
    before = server.metric("unknown_fields_total")
    told = server.http.post(CHAT, json=asked(CHAT, *noted, colour=1)).json()["warnings"]
    assert len(told) == 16 and told[0]["param"] == "colour" and max(len(warning["param"]) for warning in told) == 128
    assert server.metric("unknown_fields_total") == before + 41


ASKS = [
    {"logprobs": True},
    {"logprobs": 5},
    {"top_logprobs": 2},
    {"prompt_logprobs": 0} | {"prompt_logprobs": 1},
    {"return_logprob": True},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
    {"guided_json": {"type": "object"}},
    {"guided_choice": ["a"]},
    {"grammar": "root ::= x"},
    {"format": {"type": "json_schema", "schema": {}}},
    {"note": {"response_format": {"type": "json_object"}}},
    {"note": [[{"logprobs": True}]]},
]
PLACES = {
    "messages.1": lambda ask: (CHAT, asked(CHAT, SAID | ask)),
    "messages.1.content.0": lambda ask: (CHAT, asked(CHAT, SAID | {"content": [{"type": "text", "text": "5."} | ask]})),
    "messages.1.tool_calls.0.function": lambda ask: (
        CHAT,
        asked(CHAT, SAID | {"tool_calls": [CALL | {"function": CALL["function"] | ask}]}),
    ),
    "tools.0": lambda ask: (CHAT, asked(CHAT, tools=[TOOL | ask])),
    "tools.0.function": lambda ask: (CHAT, asked(CHAT, tools=[TOOL | {"function": {"name": "clock"} | ask}])),
    "stream_options": lambda ask: (CHAT, asked(CHAT, stream=True, stream_options=ask)),
    "options": lambda ask: (CHAT, asked(CHAT, options=ask)),
    "input.1": lambda ask: (RESPONSES, asked(RESPONSES, SAID | ask)),
    "input.1.content.0": lambda ask: (RESPONSES, asked(RESPONSES, SAID | {"content": [OUTPUT | ask]})),
    "text": lambda ask: (RESPONSES, asked(RESPONSES, text={"verbosity": "low"} | ask)),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_asks_for_log_probabilities_or_a_grammar_is_refused_at_any_depth(server, place):
    for ask in ASKS:
        if place == "text" and "format" in ask:
            continue
        path, body = PLACES[place](ask)
        error = error_of(server.http.post(path, json=body), 400)
        ((name, value),) = ask.items()
        inner = {"note": ".note.response_format" if isinstance(value, dict) else ".note.0.0.logprobs"}.get(
            name, f".{name}"
        )
        assert (error["param"], error["code"]) == (place + inner, "unsupported_parameter"), ask
        assert f"`{place}{inner}`" in error["message"]


def test_schemas_of_tools_may_have_fields_of_any_name(server):
    fields = {"response_format": {"type": "string"}, "regex": {"type": "string"}}
    schema = {"type": "object", "properties": fields, "$defs": fields, "definitions": fields}
    tool = {"type": "function", "function": {"name": "speak", "parameters": schema, "outputSchema": schema}}
    assert warnings(server, CHAT, asked(CHAT, tools=[tool])) == ["tools.0.function.outputSchema"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_wish_for_a_length_of_the_answer_passes_with_a_warning(server, path):
    server.script.plan([2])
    fields = {"verbosity": "low"}
    if path == RESPONSES:
        fields |= {"text": {"verbosity": "high"}, "reasoning": {"summary": "detailed"}}
    before = server.metric("unknown_fields_total")
    told = server.http.post(path, json=asked(path, **fields)).json()["warnings"]
    wanted = ["verbosity"] if path == CHAT else ["verbosity", "text.verbosity", "reasoning.summary"]
    assert [(one["code"], one["param"]) for one in told] == [("field_left_out", name) for name in wanted]
    assert server.metric("unknown_fields_total") == before
    nothing = {"verbosity": None} | (
        {"text": {"verbosity": None}, "reasoning": {"summary": "auto"}} if path != CHAT else {}
    )
    assert "warnings" not in server.http.post(path, json=asked(path, **nothing)).json()
