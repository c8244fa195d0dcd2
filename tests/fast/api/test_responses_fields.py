"""Every field of /v1/responses is honoured or refused by name, and items become the prompt that chat makes."""

from typing import Any

import pytest

from app.api.refusals import REFUSED, RESPONSES
from app.api.responses_schemas import ResponsesRequest
from app.api.schemas import ChatCompletionRequest
from tests.fast.api.errors import error_of, refuses
from tests.fast.api.served import CHATML, Server
from tests.fast.api.templates import HELLO, QWEN

PATH = "/v1/responses"
ASK = {"model": "tiny", "input": "hello"}
CALLED = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city":  "Bern"}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
CHAT_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
NO_THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
TOOL = {"name": "weather", "description": "How it is", "parameters": {"type": "object", "properties": {}}}
OFFER: dict[str, Any] = {"tools": [{"type": "function", **TOOL}]}
CHAT_OFFER: dict[str, Any] = {"tools": [{"type": "function", "function": TOOL}]}
SERVED = {"template": QWEN, "reasoning_parser": "qwen3", "tool_call_parser": "qwen3"}


def said(text: str, **more: Any) -> dict[str, Any]:
    """An assistant's message as an answer has it."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part], **more}


def submitted(server: Server, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the request that reaches the engine, with its prompt as text."""
    server.script.plan([2])
    response = server.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    request: dict[str, Any] = server.script.see("Submit")
    prompt = server.tokenizer.decode(request.pop("token_ids"), skip_special_tokens=False)
    return {k: v for k, v in request.items() if k not in ("request_id", "what")} | {"prompt": prompt}


def turn(content: str | None, *calls: Any, **more: Any) -> dict[str, Any]:
    """An assistant's message as chat has it."""
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


BRIEF = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Be brief."}
SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
PARTS = {"role": "user", "content": [{"type": "input_text", "text": text} for text in "ab"]}
CHAT_PARTS = {"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}
AGAIN = {**CALLED, "id": "fc_1", "status": "completed"}


@pytest.mark.parametrize(
    ("items", "instructions", "messages"),
    [
        ("hello", None, [HELLO]),
        ("hello", "", [HELLO]),
        ("hello", "Be brief.", [BRIEF, HELLO]),
        ([HELLO] * 80, "Be brief.", [BRIEF, *[HELLO] * 80]),
        ([HELLO], None, [HELLO]),
        ([{"type": "message", **HELLO}], None, [HELLO]),
        ([DEVELOPER, HELLO], None, [DEVELOPER, HELLO]),
        ([PARTS], None, [CHAT_PARTS]),
        ([HELLO, said("Hi."), HELLO], None, [HELLO, turn("Hi."), HELLO]),
        (
            [HELLO, THOUGHT, said("Look:"), CALLED, RESULT],
            None,
            [HELLO, turn("Look:", CHAT_CALL, reasoning_content="Hm."), CHAT_RESULT],
        ),
        (
            [HELLO, CALLED, AGAIN, RESULT, RESULT],
            None,
            [HELLO, turn(None, CHAT_CALL, CHAT_CALL), CHAT_RESULT, CHAT_RESULT],
        ),
        (
            [HELLO, said("One "), CALLED, said("two"), RESULT, said("three"), said("four", phase="final")],
            None,
            [HELLO, turn("One ", CHAT_CALL), turn("two"), CHAT_RESULT, turn("three"), turn("four")],
        ),
        (
            [HELLO, said("One"), CALLED, said("two"), CALLED, said("three"), RESULT],
            None,
            [HELLO, turn("One", CHAT_CALL), turn("two", CHAT_CALL), turn("three"), CHAT_RESULT],
        ),
        ([HELLO, CALLED, said("two"), RESULT], None, [HELLO, turn("", CHAT_CALL), turn("two"), CHAT_RESULT]),
        (
            [HELLO, THOUGHT, CALLED, RESULT, THOUGHT, said("Fine.")],
            None,
            [
                HELLO,
                turn("", CHAT_CALL, reasoning_content="Hm."),
                CHAT_RESULT,
                turn("Fine.", reasoning_content="Hm."),
            ],
        ),
        (
            [HELLO, said("Fine."), THOUGHT, said("No.")],
            None,
            [HELLO, turn("Fine."), turn("No.", reasoning_content="Hm.")],
        ),
        ([HELLO, SUMMARY, said("Hi.")], None, [HELLO, turn("Hi.", reasoning_content="Hm.")]),
        (
            [HELLO, CALLED, {**RESULT, "output": [{"type": "input_text", "text": "sunny"}]}],
            None,
            [HELLO, turn(None, CHAT_CALL), CHAT_RESULT],
        ),
    ],
)
def test_items_make_the_prompt_that_chat_makes_of_the_same_conversation(server, items, instructions, messages):
    fields = {"input": items} | ({} if instructions is None else {"instructions": instructions})
    ours = submitted(server, PATH, {"model": "tiny", "seed": 1, **fields})
    chats = submitted(server, "/v1/chat/completions", {"model": "tiny", "seed": 1, "messages": messages})
    assert ours == chats


@pytest.mark.parametrize(
    ("fields", "of_chat"),
    [
        (OFFER, CHAT_OFFER),
        (OFFER | {"tool_choice": "none"}, {}),
        (NO_THINKING | OFFER | {"tool_choice": "required"}, NO_THINKING | CHAT_OFFER | {"tool_choice": "required"}),
        (
            NO_THINKING | OFFER | {"tool_choice": {"type": "function", "name": "weather"}},
            NO_THINKING | CHAT_OFFER | {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        ({"max_output_tokens": 7}, {"max_completion_tokens": 7}),
        ({"temperature": 0.3, "top_p": 0.4}, {"temperature": 0.3, "top_p": 0.4}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"top_k": 3, "min_p": 0.1, "stop_token_ids": [9]}, {"top_k": 3, "min_p": 0.1, "stop_token_ids": [9]}),
        ({"speculate": False, "cache_salt": "x"}, {"speculate": False, "cache_salt": "x"}),
        ({"speculate": 3}, {"speculate": 3}),
        (NO_THINKING, NO_THINKING),
    ],
    ids=str,
)
def test_fields_ask_the_engine_for_what_those_of_chat_ask(server, fields, of_chat):
    ours = submitted(server, PATH, {**ASK, "seed": 1, **fields})
    assert ours == submitted(server, "/v1/chat/completions", {"messages": [HELLO], "seed": 1, **of_chat})


HARMFUL = {
    "background": [True],
    "conversation": ["conv_1", {"id": "conv_1"}],
    "prompt": [{"id": "pmpt_1"}],
    "max_tool_calls": [3],
    "moderation": [{"model": "m"}],
    "messages": [[HELLO]],
    "max_tokens": [5],
    "max_completion_tokens": [5],
    "top_logprobs": [2],
    "text.format": [{"type": "json_object"}, {"type": "json_schema", "name": "a", "schema": {}}],
    "truncation": ["auto"],
    "include": [["message.output_text.logprobs"], ["file_search_call.results"], "x"],
    "enable_thinking": [True, False],
    "reasoning_effort": ["low", "none"],
    "include_reasoning": [False],
    "n": [2, 0],
    "tool_choice": ["any", {"type": "allowed_tools", "mode": "auto", "tools": []}, {"type": "web_search_preview"}],
    "context_management": [[{"type": "compaction"}]],
    "max_new_tokens": [5],
    "n_predict": [5],
}


@pytest.mark.parametrize("refusal", REFUSED[ResponsesRequest], ids=lambda refusal: refusal.field)
def test_a_field_that_cannot_be_honoured_is_refused_by_name_and_never_reaches_the_engine(server, refusal):
    assert refusal not in RESPONSES or refusal.field in HARMFUL
    harmful = [value for value in (True, "x", 2) if not refusal.harmless(value)]
    refuses(server, PATH, ASK, refusal, HARMFUL.get(refusal.field, harmful[:1]))


def test_no_field_of_chat_is_ignored_here():
    known = ResponsesRequest.model_fields.keys() | {refusal.field for refusal in REFUSED[ResponsesRequest]}
    assert set(ChatCompletionRequest.model_fields) - known == set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {refusal.field: None for refusal in RESPONSES if "." not in refusal.field},
        {"store": False, "background": False, "truncation": "disabled", "include": [], "context_management": []},
        {"text": {"format": {"type": "text"}}, "reasoning": {"summary": "auto", "effort": None}},
        {"text": {"format": {"type": "text", "schema": None, "strict": False}}},
        {"text": {}, "reasoning": {}, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}},
        {
            "include": ["reasoning.encrypted_content"],
            "top_logprobs": 0,
            "stream_options": {"include_obfuscation": False},
        },
        {
            "user": "me",
            "client_metadata": {"a": "b"},
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "service_tier": "auto",
            "unheard_of": 1,
        },
        {"metadata": {f"key {n}": "v" * 512 for n in range(16)}},
        {"n": 1, "logprobs": False, "response_format": {"type": "text"}},
    ],
    ids=lambda fields: " ".join(fields)[:40],
)
def test_values_that_change_nothing_pass(server, fields, stream):
    server.script.plan([2])
    response = server.http.post(PATH, json=ASK | fields | {"stream": stream})
    assert response.status_code == 200, response.text


def asked(*items: Any) -> dict[str, Any]:
    return {"input": [HELLO, *items]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [HELLO] * 4097}, "input"),
        (asked("hello"), "input.1"),
        (asked({"type": "item_reference"}), "input.1.id"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"store": "yes"}, "store"),
        (asked({"type": "web_search_call", "id": "ws_1"}), "input.1.type"),
        (asked({"role": "tool", "content": "x"}), "input.1.role"),
        (asked({"role": "user"}), "input.1.content"),
        (asked({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}), "input.1.content.0.type"),
        (asked({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}), "input.1.content.0.type"),
        (asked({"role": "user", "content": [{"type": "input_text"}]}), "input.1.content.0.text"),
        (asked({**CALLED, "arguments": "not JSON"}), "input.1.arguments"),
        (asked({**CALLED, "arguments": "[]"}), "input.1.arguments"),
        (asked({"type": "function_call", "name": "f"}), "input.1.call_id"),
        (asked({**RESULT, "output": [{"type": "refusal"}]}), "input.1.output.0.type"),
        (asked({"type": "function_call_output", "output": "x"}), "input.1.call_id"),
        (asked({**THOUGHT, "content": [{"type": "text", "text": "x"}]}), "input.1.content.0.type"),
        ({"instructions": ["x"]}, "instructions"),
        ({"tools": [{"name": "f"}]}, "tools.0.type"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools.0.tools"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools.0.name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools.0.tools.0.name"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": "{}"}]}, "tools.0.parameters"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        (asked(*[CALLED] * 257), "input.257"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (OFFER | {"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "0"}, "temperature"),
        ({"stop_token_ids": [512]}, "stop_token_ids.0"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {f"{n}": "" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"metadata": {"a" * 65: "b"}}, f"metadata.{'a' * 61}..."),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_value_is_named_by_its_dotted_path(server, fields, param):
    error = error_of(server.http.post(PATH, json=ASK | fields), 400)
    assert error["param"] == param and "messages" not in error["message"]


@pytest.mark.parametrize(
    "name", ["messages.99", "messages.0", "max_tokens", "tool_choice.function.name", "`max_tokens`"]
)
def test_names_of_the_client_stay_as_they_are_in_an_error(server, name):
    fields = OFFER | {"tool_choice": {"type": "function", "name": name}}
    error = error_of(server.http.post(PATH, json=ASK | fields), 400)
    assert error["param"] == "tool_choice.name"
    assert error["message"] == f"`tool_choice.name` is `{name}`, which is none of the `tools`."
    server.script.plan([2])
    (warning,) = server.http.post(PATH, json=ASK | {"chat_template_kwargs": {name: True}}).json()["warnings"]
    assert warning["param"] == f"chat_template_kwargs.{name}" and f"does not know `{name}`," in warning["message"]


def test_names_of_fields_that_exclude_each_other_are_those_of_this_request(server):
    fields = {"reasoning": {"effort": "low"}} | NO_THINKING
    error = error_of(server.http.post(PATH, json=ASK | fields), 400)
    assert error["param"] == "chat_template_kwargs.enable_thinking"
    assert error["message"].startswith("`reasoning.effort` turns thinking on, and `chat_template_kwargs.enable_th")
    error = error_of(server.http.post(PATH, json=ASK | {"reasoning": {"effort": "`max_tokens`"}}), 400)
    assert error["param"] == "reasoning.effort" and 'not "`max_tokens`"' in error["message"]


def test_instructions_do_not_count_as_an_item(server):
    error = error_of(server.http.post(PATH, json={"instructions": "x", "input": [HELLO] * 4096}), 400)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


@pytest.mark.parametrize("path", ["input_tokens", "compact"])
def test_an_endpoint_beside_the_stored_responses_is_a_404_that_says_so(server, path):
    error = error_of(server.http.post(f"{PATH}/{path}", json=ASK), 404)
    assert error["message"].endswith(f"POST {PATH}/{path}. This server has no such endpoint.")


@pytest.mark.parametrize("kind", ["web_search_call", "image_generation_call"])
def test_an_unknown_item_is_refused_with_the_kinds_that_are_known(server, kind):
    message = error_of(server.http.post(PATH, json=asked({"type": kind, "id": "x"})), 400)["message"]
    for known in ("message", "function_call", "function_call_output", "reasoning", "item_reference", kind):
        assert known in message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "hello " * 5000}, "input"),
        ({"input": [HELLO, {"role": "user", "content": "hello " * 5000}]}, "input"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
    ],
)
def test_what_does_not_fit_the_context_is_named_as_it_was_sent(server, fields, param):
    error = error_of(server.http.post(PATH, json=ASK | fields), 400)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_errors_of_the_template_and_of_chat_bear_the_names_of_this_request(start):
    server = start(CHATML)
    error = error_of(server.http.post(PATH, json={"instructions": "x", **asked(said("y"), CALLED, RESULT)}), 400)
    assert error["param"] == "input.2" and "`input.2`" in error["message"]
    error = error_of(server.http.post(PATH, json=ASK | {"min_tokens": 9, "max_output_tokens": 8}), 400)
    assert error["param"] == "min_tokens" and "`max_output_tokens`" in error["message"]


@pytest.mark.parametrize(("method", "tail"), [("POST", "/cancel"), ("GET", "/input_items")])
def test_what_is_not_served_of_a_stored_response_is_a_404_that_says_so(server, method, tail):
    error = error_of(server.http.request(method, f"{PATH}/resp_1{tail}"), 404)
    assert error["code"] == "not_found" and "Only GET and DELETE" in error["message"]


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/messages", "/v1/chat/completions"),
        ("/messages", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/api/v1/responses", "/v1/responses"),
        ("/responses", "/v1/responses"),
        ("/v1//completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/api/chat", "/v1/chat/completions"),
        ("/generate", "/v1/completions"),
        ("/completion", "/v1/completions"),
        ("/props", "/server_info"),
    ],
)
def test_a_path_of_a_wrong_base_url_is_a_404_that_says_what_to_use(server, path, instead):
    message = error_of(server.http.post(path, json=ASK), 404)["message"]
    assert f" {instead}" in message and message.startswith("There is nothing at POST /")


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/v1/chat/completions/", "Use /v1/chat/completions, without the slash at the end."),
        ("/v1/chat/completions/x/models", "Use /v1/models: a base_url ends with /v1."),
        ("/v1/embeddings", "This model writes text: it embeds and ranks nothing."),
    ],
)
def test_a_slash_too_many_and_an_api_of_others_are_told_from_a_wrong_base_url(server, path, advice):
    assert error_of(server.http.post(path, json=ASK), 404)["message"] == f"There is nothing at POST {path}. {advice}"


def test_the_list_of_models_with_a_slash_too_many_is_no_model_without_a_name(server):
    error = error_of(server.http.get("/v1/models/"), 404)
    assert error["message"] == "There is nothing at GET /v1/models/. Use /v1/models, without the slash at the end."


def test_who_asks_for_the_tokenizers_files_learns_that_they_are_not_shown(server):
    assert "POST /tokenize" in error_of(server.http.get("/tokenizer_info"), 404)["message"]


@pytest.mark.parametrize("path", ["/nothing", "/v1"])
def test_another_path_is_a_404_without_advice(server, path):
    assert error_of(server.http.post(path, json=ASK), 404)["message"] == f"There is nothing at POST {path}."


def test_calls_in_a_row_have_a_limit_of_their_own(server):
    error = error_of(server.http.post(PATH, json=asked(*[CALLED] * 257)), 400)
    assert error["message"] == "`input.257`: at most 256 calls may follow each other."
