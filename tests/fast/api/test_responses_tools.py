"""Tools of /v1/responses that are no plain functions, and results with images: as Codex sends them."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from app.api import stream
from app.api.responses_schemas import Tool
from app.api.responses_tools import check_names, flatten
from tests.fast.api.errors import error_of
from tests.fast.api.served import CHATML, Server
from tests.fast.api.templates import HELLO, QWEN

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
SERVED = {"template": QWEN, "reasoning_parser": "qwen3", "tool_call_parser": "qwen3"}
EXEC = {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object"}}
SPAWN = {"type": "function", "name": "spawn_agent", "description": "Starts one.", "defer_loading": True}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Tools for sub-agents.",
    "tools": [SPAWN, {"type": "function", "name": "close_agent"}],
}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch"}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Patches", "format": GRAMMAR}
SEARCH = {"type": "web_search", "external_web_access": False, "filters": {"allowed_domains": ["a"]}}
TOOLS = [EXEC, AGENTS, PATCH, SEARCH]
OTHERS = ["custom", "web_search", "local_shell", "tool_search", "image_generation", "mcp", "x" * 100]
CALL = '<tool_call>\n{"name": "multi_agent_v1__spawn_agent", "arguments": {"message": "hi"}}\n</tool_call>'
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "high"}


def ask(server: Server, path: str = PATH, status: int = 200, **fields: Any) -> dict[str, Any]:
    asked = {"input": "hello"} if path == PATH else {"messages": [HELLO]}
    response = server.http.post(path, json={"model": "tiny"} | asked | fields)
    assert response.status_code == status, response.text
    return response.json()


def offered(server: Server) -> list[dict[str, Any]]:
    """The functions that the prompt shows."""
    tools = server.prompt().partition("<tools>\n")[2].partition("\n</tools>")[0]
    return [json.loads(line)["function"] for line in tools.splitlines()]


def refused(server: Server, path: str = PATH, **fields: Any) -> dict[str, Any]:
    asked = {"input": "hello"} if path == PATH else {"messages": [HELLO]}
    return error_of(server.http.post(path, json=asked | fields), 400)


def events(server: Server, **fields: Any) -> list[dict[str, Any]]:
    text = server.http.post(PATH, json={"input": "hello", "stream": True} | fields).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_functions_of_a_namespace_are_offered_under_joined_names_and_other_tools_are_left_out_with_warnings(server):
    server.script.plan([2])
    answer = ask(server, tools=TOOLS)
    assert [tool["name"] for tool in offered(server)] == [
        "exec_command",
        "multi_agent_v1__spawn_agent",
        "multi_agent_v1__close_agent",
    ]
    assert [(one["code"], one["param"]) for one in answer["warnings"]] == [
        ("tool_left_out", "tools.2"),
        ("tool_left_out", "tools.3"),
    ]
    assert "the type `custom`" in answer["warnings"][0]["message"]
    told = [tool["name"] for tool in answer["tools"]]
    assert told == ["exec_command", "multi_agent_v1"], "the answer repeats what the model may call"


def test_what_a_namespace_is_for_stands_with_its_first_function(server):
    server.script.plan([2])
    ask(server, tools=[AGENTS])
    first, second = offered(server)
    assert first["description"] == "multi_agent_v1: Tools for sub-agents.\n\nStarts one."
    assert "description" not in second and "defer_loading" not in first


@pytest.mark.parametrize("path", [PATH, CHAT])
@pytest.mark.parametrize("kind", OTHERS)
def test_a_tool_of_another_type_is_left_out_with_a_warning_and_never_reaches_the_prompt(server, path, kind):
    server.script.plan([2])
    other = {"type": kind, "name": "other", kind: {"name": "other", "format": GRAMMAR}, "logprobs": True}
    answer = ask(server, path, tools=[other])
    assert [(one["code"], one["param"]) for one in answer["warnings"]] == [("tool_left_out", "tools.0")]
    assert len(answer["warnings"][0]["message"]) < 200
    assert (prompt := server.prompt()) and "other" not in prompt and "<tools>" not in prompt


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_with_no_function_left_a_template_without_tools_serves_and_no_text_is_a_call(start, path):
    server = start(CHATML, tool_call_parser="qwen3")
    server.plan_text(CALL)
    answer = ask(server, path, tools=[SEARCH])
    told = answer["output"][0]["content"][0]["text"] if path == PATH else answer["choices"][0]["message"]["content"]
    assert told == CALL


def test_a_tool_inside_a_namespace_is_left_out_under_its_own_path(server):
    server.script.plan([2])
    group = AGENTS | {"tools": [PATCH, AGENTS, SPAWN]}
    answer = ask(server, tools=[EXEC, group])
    assert [one["param"] for one in answer["warnings"]] == ["tools.1.tools.0", "tools.1.tools.1"]
    plain, spawn = offered(server)
    assert [plain["name"], spawn["name"]] == ["exec_command", "multi_agent_v1__spawn_agent"]
    assert AGENTS["description"] in spawn["description"], "of the first that is offered"
    assert [tool["name"] for tool in answer["tools"][1]["tools"]] == ["spawn_agent"]


def test_many_tools_left_out_make_few_warnings(server):
    server.script.plan([2])
    assert len(ask(server, tools=[SEARCH] * 256)["warnings"]) == 16


@pytest.mark.parametrize("path", [PATH, CHAT])
@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "custom", "name": "apply_patch"},
        {"type": "web_search"},
        "named",
    ],
    ids=str,
)
def test_a_choice_of_a_tool_left_out_is_refused(server, path, choice):
    name = {"name": "apply_patch"}
    named = {"type": "function", **(name if path == PATH else {"function": name})}
    error = refused(server, path, tools=[PATCH, SEARCH], tool_choice=named if choice == "named" else choice)
    assert error["param"].startswith("tool_choice") and "function" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", {"type": "function", "namespace": "multi_agent_v1", "name": "spawn_agent"}])
def test_a_call_is_answered_with_its_namespace_and_its_bare_name(server, choice, stream):
    begun = '<tool_call>\n{"name": "multi_agent_v1__spawn_agent", "arguments": ' if choice != "auto" else ""
    server.plan_text(CALL.removeprefix(begun))
    if stream:
        *earlier, last = events(server, tools=TOOLS, tool_choice=choice)
        answer = last["response"]
        (done,) = [one for one in earlier if one["type"] == "response.function_call_arguments.done"]
        assert done["name"] == "spawn_agent"
        items = [one["item"] for one in earlier if one["type"].startswith("response.output_item")]
        assert [(item["namespace"], item["name"]) for item in items] == [("multi_agent_v1", "spawn_agent")] * 2
    else:
        answer = ask(server, tools=TOOLS, tool_choice=choice)
    (item,) = answer["output"]
    assert (item["namespace"], item["name"]) == ("multi_agent_v1", "spawn_agent")
    assert json.loads(item["arguments"]) == {"message": "hi"}
    assert answer["tool_choice"] == choice
    server.script.see("Submit")
    server.script.plan([2])
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "started"}
    ask(server, input=[HELLO, item, result], tools=TOOLS)
    assert CALL in server.prompt(), "the model reads the name that it wrote"


CALLS = {
    "qwen3": CALL,
    "hermes": CALL,
    "llama3_json": '{"name": "multi_agent_v1__spawn_agent", "parameters": {"message": "hi"}}',
    "harmony": "<|channel|>commentary to=functions.multi_agent_v1__spawn_agent <|constrain|>json<|message|>"
    '{"message": "hi"}<|call|>',
    "qwen3_coder": "<tool_call>\n<function=multi_agent_v1__spawn_agent>\n<parameter=message>\nhi\n</parameter>\n"
    "</function>\n</tool_call>",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", CALLS)
def test_a_call_of_every_format_is_answered_with_its_namespace(start, form, stream):
    server = start(QWEN, tool_call_parser=form)
    server.plan_text(CALLS[form])
    answer = events(server, tools=TOOLS)[-1]["response"] if stream else ask(server, tools=TOOLS)
    (item,) = answer["output"]
    assert (item["namespace"], item["name"]) == ("multi_agent_v1", "spawn_agent")
    assert json.loads(item["arguments"]) == {"message": "hi"}


def test_a_call_of_a_plain_function_has_no_namespace(server):
    server.plan_text('<tool_call>\n{"name": "exec_command", "arguments": {}}\n</tool_call>')
    (item,) = ask(server, tools=TOOLS)["output"]
    assert item["name"] == "exec_command" and "namespace" not in item


def group(name: str, *functions: str) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": [{"type": "function", "name": each} for each in functions]}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([group("a", "f" * 62)], "tools.0.tools.0.name"),
        ([EXEC, group("a", "ok", "f" * 62)], "tools.1.tools.1.name"),
        ([group("a", "b__c"), group("a__b", "c")], "tools.0.tools.0.name"),
        ([{"type": "function", "name": "a__b"}, group("a", "b")], "tools.1.tools.0.name"),
        ([group("a", "b", "b")], "tools.0.tools.0.name"),
    ],
    ids=["long", "long second", "two namespaces", "a function", "one namespace"],
)
def test_a_joined_name_that_is_too_long_or_another_tools_is_refused(server, tools, param):
    error = refused(server, tools=tools)
    assert error["param"] == param and "is offered as `a__" in error["message"]


def test_a_joined_name_of_64_characters_passes(server):
    server.script.plan([2])
    ask(server, tools=[group("a", "f" * 61)])
    assert offered(server)[0]["name"] == "a__" + "f" * 61


def test_names_of_a_body_full_of_tools_are_compared_once_each():
    groups = TypeAdapter(list[Tool]).validate_python(
        [group(f"n{i}", *(f"f{j}" for j in range(250))) for i in range(200)]
    )
    check_names(list(flatten(groups)))  # 50,000, which took 20 s each with all


def test_an_error_about_a_function_of_a_namespace_names_its_place(server):
    many = [group("n", *(f"f{i}" for i in range(200))), group("m", *(f"f{i}" for i in range(200)))]
    assert refused(server, tools=many)["param"] == "tools"


CALLED = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}
TOOL_TURN = {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "view_image", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    ("kind", "what"), [("input_image", "an image"), ("input_file", "a file"), ("image_url", "an image")]
)
@pytest.mark.parametrize("path", [PATH, CHAT])
def test_an_image_in_a_tools_result_becomes_a_text_with_a_warning(server, path, kind, what):
    server.script.plan([2])
    parts = [{"type": "input_text" if path == PATH else "text", "text": "Here:"}, IMAGE | {"type": kind}]
    if path == PATH:
        result = {"type": "function_call_output", "call_id": "c", "output": parts}
        answer = ask(server, input=[HELLO, CALLED, result], tools=[EXEC])
    else:
        result = {"role": "tool", "tool_call_id": "c", "content": parts}
        answer = ask(server, path, messages=[HELLO, {"role": "assistant"} | TOOL_TURN, result])
    assert f"<tool_response>\nHere:\n({what}, which this model cannot see)\n" in server.prompt()
    (warning,) = answer["warnings"]
    assert (warning["code"], warning["param"]) == (
        "media_left_out",
        "input.2" if path == PATH else "messages.2.content.1",
    )


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_an_image_of_a_message_that_is_no_tools_result_is_refused(server, role, kind):
    messages = [HELLO, {"role": role, "content": [{"type": "text", "text": "x"}, {"type": kind, kind: {}}]}]
    error = refused(server, CHAT, messages=messages)
    assert error["param"] == "messages.1.content.1.type" and "no images" in error["message"]


def test_a_silent_stream_of_responses_sends_events_that_clients_count_as_life(server, background, monkeypatch):
    monkeypatch.setattr(stream, "KEEP_ALIVE_SECONDS", 0.02)
    started = background.submit(server.answer, server.bytes("a"))
    received, ended = "", False
    with server.http.stream("POST", PATH, json={"input": "hello", "stream": True}) as response:
        request_id = started.result()
        for text in response.iter_text():
            received += text
            if not ended and received.count("event: response.in_progress\n") >= 3:
                server.script.emit(request_id, [*server.bytes("b"), 2])
                ended = True
    told = [json.loads(line[6:]) for line in received.splitlines() if line.startswith("data: ")]
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    assert [one["type"] for one in told].count("response.created") == 1
    assert ": keep-alive" not in received and told[-1]["response"]["output"][0]["content"][0]["text"] == "ab"
