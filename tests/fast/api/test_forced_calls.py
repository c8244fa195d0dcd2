"""Forced tool calls: the answer begins with the family's own opening of a call, after the reasoning if there is any."""

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from app.text.parsers import llama3_json, qwen3
from tests.fast.api.served import CHATML, Server, until
from tests.fast.api.templates import HEAD, HELLO, NO_THINKING, QWEN, TURN, WEATHER, refusal, serving_template

CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
OFFER = {"model": "tiny", "messages": [HELLO], "tools": [WEATHER, CLOCK]}
CHOICES = pytest.mark.parametrize(
    ("choice", "prefix"),
    [("required", '<tool_call>\n{"name": "'), (NAMED, '<tool_call>\n{"name": "weather", "arguments":')],
    ids=["required", "named"],
)
REST = {
    "required": 'weather", "arguments": {"city": "Bern"}}\n</tool_call>',
    "named": ' {"city": "Bern"}}\n</tool_call>',
}
ANSWER = ' {"city": "Bern"}}\n</tool_call>'
CALLED = [("weather", {"city": "Bern"})]
_LAST_TURN = "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable"
OPENED = QWEN.replace(_LAST_TURN, _LAST_TURN.replace("assistant\\n", "assistant\\n<think>\\n"))
PLAIN = QWEN.replace("<think>", "").replace("</think>", "")
"""Templates of a model whose prompt opens the reasoning, and of one that never reasons."""


def rest_of(choice: Any) -> str:
    return REST["required" if choice == "required" else "named"]


@pytest.fixture(scope="module")
def shared_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("plain") / "qwen"
    with serving_template(model_folder, folder, PLAIN, tool_family=qwen3.FAMILY) as server:
        yield server


@pytest.fixture(scope="module")
def thinking_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("thinking") / "qwen"
    with serving_template(model_folder, folder, reasoning=True, tool_family=qwen3.FAMILY) as server:
        yield server


@pytest.fixture
def thinking(thinking_server: Server) -> Server:
    thinking_server.settle()
    return thinking_server


def steps_of(server: Server, text: str, seed: int = 0, *, end: bool = True) -> list[list[int]]:
    """Return the tokens of a text, one for each byte, in steps of random sizes."""
    ids = [*(server.bytes(text) if text else []), *([2] if end else [])]
    random = Random(seed)
    cuts = sorted(random.choices(range(1, len(ids) + 1), k=random.randrange(len(ids)))) if ids else []
    return [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)]) if ids[a:b]]


def functions(calls: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls or []]


def whole(server: Server, **fields: Any) -> dict[str, Any]:
    return server.openai.chat.completions.create(**OFFER | fields).model_dump()


def streamed(server: Server, **fields: Any) -> dict[str, Any]:
    """Return the first choice that the SDK puts together from the chunks, with the usage."""
    body = OFFER | fields | {"stream_options": {"include_usage": True} | fields.get("stream_options", {})}
    text, thought, calls, reasons, usage = "", "", [], [], None
    with server.openai.chat.completions.create(**body, stream=True) as chunks:
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices[:1]:
                text += choice.delta.content or ""
                thought += getattr(choice.delta, "reasoning_content", None) or ""
                calls += [call.model_dump() for call in choice.delta.tool_calls or []]
                reasons += [choice.finish_reason] if choice.finish_reason else []
    return {"content": text, "reasoning": thought, "calls": calls, "reasons": reasons, "usage": usage.model_dump()}


def shown(server: Server, token_ids: list[int]) -> str:
    return server.tokenizer.decode(token_ids, skip_special_tokens=False)


@CHOICES
@pytest.mark.parametrize("seed", range(3))
def test_the_answer_begins_with_a_call_whose_opening_is_a_part_of_the_prompt(server, choice, prefix, seed):
    server.script.plan(*steps_of(server, rest_of(choice), seed))
    answer = whole(server, tool_choice=choice)
    submitted = server.script.see("Submit")["token_ids"]
    assert shown(server, submitted).endswith(TURN + prefix)
    (only,) = answer["choices"]
    assert functions(only["message"]["tool_calls"]) == CALLED
    assert (only["message"]["content"], only["finish_reason"]) == (None, "tool_calls")
    sent = len(server.bytes(rest_of(choice)))
    assert answer["usage"]["prompt_tokens"] == len(submitted)
    assert answer["usage"]["completion_tokens"] == sent + (0 if choice == NAMED else 1)


@CHOICES
@pytest.mark.parametrize("seed", range(3))
def test_a_stream_says_the_same(server, choice, prefix, seed):
    server.script.plan(*steps_of(server, rest_of(choice), seed))
    pieces = streamed(server, tool_choice=choice)
    assert functions(pieces["calls"]) == CALLED
    assert (pieces["content"], pieces["reasons"]) == ("", ["tool_calls"])


def test_the_prompt_is_the_one_of_auto_and_the_prefix(server):
    prompts = []
    for choice in ("auto", "required", NAMED):
        server.script.plan([2])
        whole(server, tool_choice=choice)
        prompts.append(shown(server, server.script.see("Submit")["token_ids"]))
    auto, required, named = prompts
    assert (required, named) == (
        auto + '<tool_call>\n{"name": "',
        auto + '<tool_call>\n{"name": "weather", "arguments":',
    )


def test_required_leaves_the_number_of_calls_to_the_model_and_a_named_function_is_called_once(server):
    more = f'{REST["required"]}\n<tool_call>\n{{"name": "clock"}}\n</tool_call>'
    server.script.plan(*steps_of(server, more))
    message = whole(server, tool_choice="required")["choices"][0]["message"]
    assert functions(message["tool_calls"]) == [*CALLED, ("clock", {})]
    server.script.plan(*steps_of(server, ANSWER + '\n<tool_call>\n{"name": "clock"}\n</tool_call>'))
    message = whole(server, tool_choice=NAMED)["choices"][0]["message"]
    assert functions(message["tool_calls"]) == CALLED


def test_every_choice_begins_with_the_call(server):
    server.script.plan(*steps_of(server, REST["required"]))
    choices = whole(server, tool_choice="required", n=3)["choices"]
    assert [functions(choice["message"]["tool_calls"]) for choice in choices] == [CALLED] * 3


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=["required", "named"])
def test_responses_force_a_call_as_chat_does(server, choice):
    tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
    server.script.plan(*steps_of(server, REST["required" if choice == "required" else "named"]))
    response = server.openai.responses.create(model="tiny", input="hello", tools=tools, tool_choice=choice)
    assert [(item.name, json.loads(item.arguments)) for item in response.output] == CALLED
    unknown = {"model": "tiny", "input": "hello", "tools": tools, "tool_choice": {"type": "function", "name": "f"}}
    error = server.http.post("/v1/responses", json=unknown).json()["error"]
    assert error["param"] == "tool_choice.name"


def test_llama_has_its_own_opening(start):
    template = CHATML + "{% if tools %}{% endif %}"
    server = start(template, tool_family=llama3_json.FAMILY)
    for choice, prefix, rest in [
        ("required", '{"name": "', 'weather", "parameters": {"city": "Bern"}}'),
        (NAMED, '{"name": "weather", "parameters":', ' {"city": "Bern"}}'),
    ]:
        server.script.plan(*steps_of(server, rest))
        (only,) = whole(server, tool_choice=choice)["choices"]
        assert shown(server, server.script.see("Submit")["token_ids"]).endswith(TURN + prefix)
        assert functions(only["message"]["tool_calls"]) == CALLED


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_and_the_limit_end_a_forced_call_too(server, stream):
    read = streamed if stream else whole
    server.script.plan(*steps_of(server, ANSWER))
    answer = read(server, tool_choice=NAMED, stop='"Bern')
    content = answer["content"] if stream else answer["choices"][0]["message"]["content"]
    assert content == '<tool_call>\n{"name": "weather", "arguments": {"city": '
    server.script.plan(*steps_of(server, ANSWER))
    answer = read(server, tool_choice=NAMED, max_tokens=5)
    content = answer["content"] if stream else answer["choices"][0]["message"]["content"]
    reasons = answer["reasons"] if stream else [answer["choices"][0]["finish_reason"]]
    assert (content, reasons) == ('<tool_call>\n{"name": "weather", "arguments": {"ci', ["length"])


# --- with thinking on ------------------------------------------------------------------------------------------------

THOUGHT = "<think>\nIt is about weather.\n</think>"


@CHOICES
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_call_begins_when_the_reasoning_has_ended(thinking, background, choice, prefix, stream, seed):
    script, read = thinking.script, streamed if stream else whole
    answering = background.submit(read, thinking, tool_choice=choice, max_tokens=200, seed=7, temperature=0.8)
    first = script.see("Submit")
    assert shown(thinking, first["token_ids"]).endswith(HEAD + TURN)
    for step in steps_of(thinking, THOUGHT + "\n\nHello, I", seed, end=False):
        script.emit(first["request_id"], step)
    second = script.see("Submit")
    reasoning = thinking.bytes(THOUGHT)
    assert script.see("Abort")["request_id"] == first["request_id"] != second["request_id"]
    assert second["token_ids"][: len(first["token_ids"])] == first["token_ids"]
    assert second["token_ids"][len(first["token_ids"]) :][: len(reasoning)] == reasoning
    assert shown(thinking, second["token_ids"]).endswith(f"{THOUGHT}\n\n{prefix}")
    assert second["max_tokens"] == 200 - len(reasoning)
    assert {**second["sampling"], "min_tokens": 0} == {**first["sampling"], "min_tokens": 0}
    for name in ("stop_token_ids", "speculate", "cache_salt"):
        assert second[name] == first[name]
    for step in steps_of(thinking, rest_of(choice), seed):
        script.emit(second["request_id"], step)
    answer = answering.result()
    if not stream:
        message = answer["choices"][0]["message"]
        answer |= {"calls": message["tool_calls"], "reasoning": message["reasoning_content"]}
        answer |= {"reasons": [answer["choices"][0]["finish_reason"]], "content": message["content"] or ""}
    assert functions(answer["calls"]) == CALLED
    assert (answer["reasoning"], answer["content"]) == ("It is about weather.", "")
    assert answer["reasons"] == ["tool_calls"]
    num_prefix = len(second["token_ids"]) - len(first["token_ids"]) - len(reasoning)
    assert answer["usage"]["prompt_tokens"] == len(first["token_ids"]) + num_prefix
    num_rest = len(thinking.bytes(rest_of(choice))) + (0 if choice == NAMED else 1)
    assert answer["usage"]["completion_tokens"] == len(reasoning) + num_rest


def play(server: Server, *outputs: str | list[int], finish: str | None = None, cached: int = 0) -> list[dict[str, Any]]:
    """Answer each of the next requests with its output, and return the requests."""
    seen = []
    for output in outputs:
        seen.append(server.script.see("Submit"))
        ids = server.bytes(output) if isinstance(output, str) else output
        server.script.emit(seen[-1]["request_id"], ids)
    return seen


def test_a_prompt_that_opens_the_reasoning_is_followed_to_its_end(start, background):
    server = start(OPENED, reasoning=True, tool_family=qwen3.FAMILY)
    server.script.by_hand()
    answering = background.submit(whole, server, tool_choice=NAMED)
    _, second = play(server, "Hm.\n</think>\n\nWell", ANSWER)
    assert shown(server, second["token_ids"]).endswith(
        '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments":'
    )
    message = answering.result()["choices"][0]["message"]
    assert (message["reasoning_content"], functions(message["tool_calls"])) == ("Hm.", CALLED)


@pytest.mark.parametrize("said", ["Hello", " \n<tool_call>", "</think>", [2], "<thought>"])
def test_a_model_that_does_not_reason_begins_with_the_call_at_once(thinking, background, said):
    answering = background.submit(whole, thinking, tool_choice=NAMED, max_tokens=100)
    first, second = play(thinking, said, ANSWER)
    assert shown(thinking, second["token_ids"]) == shown(thinking, first["token_ids"]) + (
        '<tool_call>\n{"name": "weather", "arguments":'
    )
    assert second["max_tokens"] == 100
    answer = answering.result()
    message = answer["choices"][0]["message"]
    assert (message["content"], functions(message["tool_calls"])) == (None, CALLED)
    assert answer["usage"]["completion_tokens"] == len(thinking.bytes(ANSWER))
    assert answer["usage"]["prompt_tokens"] == len(second["token_ids"])


def test_with_thinking_off_the_call_begins_the_answer(thinking):
    thinking.script.plan(*steps_of(thinking, ANSWER))
    fields = {"tool_choice": NAMED, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    (only,) = whole(thinking, **fields)["choices"]
    prompt = shown(thinking, thinking.script.see("Submit")["token_ids"])
    assert prompt.endswith(f'{TURN}{NO_THINKING}<tool_call>\n{{"name": "weather", "arguments":')
    assert functions(only["message"]["tool_calls"]) == CALLED


def test_reasoning_that_is_not_separated_is_content_before_the_call(thinking, background):
    answering = background.submit(whole, thinking, tool_choice=NAMED, extra_body={"separate_reasoning": False})
    play(thinking, THOUGHT, ANSWER)
    message = answering.result()["choices"][0]["message"]
    assert (message["content"], functions(message["tool_calls"])) == (THOUGHT, CALLED)


def test_llama_reasons_unseparated_before_its_call(start, background):
    server = start("{# <think> #}" + CHATML + "{% if tools %}{% endif %}", tool_family=llama3_json.FAMILY)
    server.script.by_hand()
    answering = background.submit(whole, server, tool_choice=NAMED, extra_body={"separate_reasoning": False})
    play(server, THOUGHT, ' {"city": "Bern"}}')
    (only,) = answering.result()["choices"]
    assert (only["message"]["content"], functions(only["message"]["tool_calls"])) == (THOUGHT, CALLED)
    assert only["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("said", ["H", " ", "<"])
def test_a_limit_that_ends_what_is_no_reasoning_leaves_the_call(thinking, background, said):
    answering = background.submit(whole, thinking, tool_choice="required", max_tokens=1)
    first = thinking.script.see("Submit")
    thinking.script.emit(first["request_id"], thinking.bytes(said), finish="length")
    second = thinking.script.see("Submit")
    thinking.script.emit(second["request_id"], thinking.bytes("w"), finish="length")
    answer = answering.result()
    (only,) = answer["choices"]
    assert second["max_tokens"] == 1
    assert (only["message"]["content"], only["finish_reason"]) == ('<tool_call>\n{"name": "w', "length")
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("field", ["tools.0.function.name", "tool_choice.function.name"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_the_name_of_a_function_has_a_maximum_length(server, path, field):
    long = {"type": "function", "function": {"name": "n" * 257}}
    tools, choice = ([long], "auto") if field.startswith("tools") else ([WEATHER], long)
    response = server.http.post(path, json=OFFER | {"tools": tools, "tool_choice": choice})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("field", ["tools.0.name", "tool_choice.name"])
def test_responses_have_the_same_maximum(server, field):
    names = ("n" * 257, "f") if field.startswith("tools") else ("f", "n" * 257)
    tool, choice = ({"type": "function", "name": name} for name in names)
    response = server.http.post("/v1/responses", json={"input": "a", "tools": [tool], "tool_choice": choice})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(("name", "num_texts"), [("server", 1), ("thinking", 3)])
def test_a_prompt_and_the_openings_behind_it_are_encoded_off_the_event_loop(
    name, num_texts, request, background, monkeypatch
):
    server = request.getfixturevalue(name)
    loops, encode = [], server.tokenizer.encode

    def watched(*given: Any, **named: Any) -> list[int]:
        loops.append(asyncio._get_running_loop())
        return encode(*given, **named)

    monkeypatch.setattr(server.tokenizer, "encode", watched)
    if name == "server":
        server.script.plan(*steps_of(server, ANSWER))
        whole(server, tool_choice=NAMED)
    else:
        answering = background.submit(whole, server, tool_choice=NAMED)
        play(server, THOUGHT, ANSWER)
        answering.result()
    assert loops == [None] * num_texts


@pytest.mark.parametrize(
    ("output", "fields", "content", "reasoning", "reason"),
    [
        ("<think>\nIt is about", {"max_tokens": 12}, "", "It i", "length"),
        ("<think>abc</think>", {"max_tokens": 18}, "", "abc", "length"),
        ("<think>abc about weather", {"stop": "about"}, "", "abc", "stop"),
        ([*"<think>abc", 2], {}, "", "abc", "stop"),
    ],
    ids=["the limit", "the limit at its end", "a stop string", "a stop token"],
)
def test_reasoning_that_ends_the_answer_leaves_no_call(
    thinking, background, output, fields, content, reasoning, reason
):
    ids = [token for part in output for token in ([part] if isinstance(part, int) else thinking.bytes(part))]
    answering = background.submit(whole, thinking, tool_choice=NAMED, **fields)
    play(thinking, ids)
    (only,) = answering.result()["choices"]
    assert (only["message"]["content"], only["message"]["reasoning_content"]) == (content, reasoning)
    assert (only["finish_reason"], only["message"]["tool_calls"]) == (reason, None)
    until(lambda: thinking.engine.admission.num_in_flight == 0)


@pytest.mark.parametrize("phase", [1, 2])
def test_a_client_that_leaves_aborts_the_request_that_runs(thinking, phase):
    ids: list[str] = []

    def engine() -> None:
        ids.append(thinking.script.see("Submit")["request_id"])
        thinking.script.emit(ids[0], thinking.bytes("<think>a"))

    working = threading.Thread(target=engine)
    working.start()
    with thinking.http.stream(
        "POST", "/v1/chat/completions", json=OFFER | {"tool_choice": NAMED, "stream": True}
    ) as response:
        working.join()
        if phase == 2:
            thinking.script.emit(ids[0], thinking.bytes("</think>"))
            ids.append(thinking.script.see("Submit")["request_id"])
            assert thinking.script.see("Abort")["request_id"] == ids[0]
        next(response.iter_lines())
    assert thinking.script.see("Abort")["request_id"] == ids[-1]
    until(lambda: thinking.engine.admission.num_in_flight == 0)


@pytest.mark.parametrize("ends", ["stop", "length"])
def test_an_engine_that_ended_the_reasoning_itself_keeps_the_place_and_may_drain(
    model_folder, tmp_path, background, ends
):
    """The delta with the end of the reasoning may also be the last one if its reader was slow."""
    with serving_template(model_folder, tmp_path / "own", reasoning=True, tool_family=qwen3.FAMILY) as server:
        server.script.by_hand()
        answering = background.submit(whole, server, tool_choice=NAMED, max_tokens=120)
        first = server.script.see("Submit")
        said = server.bytes(THOUGHT + "and so on")
        server.script.emit(first["request_id"], said, finish=ends)
        second = server.script.see("Submit")
        assert server.engine.admission.num_in_flight == 1
        server.call(drain_begun(server))
        server.script.emit(second["request_id"], server.bytes(ANSWER))
        (only,) = answering.result()["choices"]
        assert functions(only["message"]["tool_calls"]) == CALLED
        until(lambda: server.engine.admission.num_in_flight == 0)


def drain_begun(server: Server) -> Any:
    async def begin() -> None:
        server.engine.supervisor.drain()

    return begin


def test_cached_tokens_are_those_of_the_prompt(thinking, background):
    thinking.script.by_hand(cached_tokens=16)
    answering = background.submit(whole, thinking, tool_choice=NAMED)
    first = thinking.script.see("Submit")
    thinking.script.emit(first["request_id"], thinking.bytes(THOUGHT))
    second = thinking.script.see("Submit")
    thinking.script.by_hand(cached_tokens=4000)
    thinking.script.emit(second["request_id"], thinking.bytes(ANSWER))
    assert answering.result()["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


def test_a_deadline_counts_over_both_requests(thinking, background):
    body = OFFER | {"tool_choice": NAMED}

    def ask() -> Any:
        return thinking.http.post("/v1/chat/completions", json=body, headers={"X-Request-Timeout": "1.5"})

    asking = background.submit(ask)
    play(thinking, THOUGHT)
    thinking.script.see("Submit")
    response = asking.result()
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_steps_are_told_without_the_prefix(thinking, background):
    fields = {"tool_choice": NAMED, "stream": True, "stream_options": {"include_speculation": True}}

    def ask() -> list[dict[str, Any]]:
        lines = thinking.http.post("/v1/chat/completions", json=OFFER | fields).text.splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    asking = background.submit(ask)
    play(thinking, THOUGHT + "xyz", ANSWER)
    steps = [
        step
        for chunk in asking.result()
        for choice in chunk["choices"]
        for step in choice.get("speculation", {}).get("steps", [])
    ]
    assert "".join(text for step in steps for text in step["tokens"]) == THOUGHT + ANSWER


# --- one call only ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_first_call_ends_the_generation(server, background, stream):
    read = streamed if stream else whole
    answering = background.submit(read, server, parallel_tool_calls=False)
    request_id = server.script.see("Submit")["request_id"]
    first = 'Hm. <tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    server.script.emit(request_id, server.bytes(first + '\n<tool_call>\n{"name": "clock"}\n</tool_call> and'))
    assert server.script.see("Abort")["request_id"] == request_id
    answer = answering.result()
    calls = answer["calls"] if stream else answer["choices"][0]["message"]["tool_calls"]
    reasons = answer["reasons"] if stream else [answer["choices"][0]["finish_reason"]]
    content = answer["content"] if stream else answer["choices"][0]["message"]["content"]
    assert (functions(calls), reasons, content) == (CALLED, ["tool_calls"], "Hm.")
    assert answer["usage"]["completion_tokens"] == len(server.bytes(first))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("family", "call", "more"),
    [
        (qwen3, '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>', " and more "),
        (
            llama3_json,
            '{"name": "weather", "parameters": {"city": "Bern"}}',
            ' and more <|python_tag|>{"name": "clock"}',
        ),
        (llama3_json, '{"name": "weather", "parameters": {"city": "Bern"}}', ';{"name": "clock"}'),
    ],
    ids=["qwen", "llama", "llama with two calls"],
)
def test_text_that_a_stop_string_held_back_ends_with_the_only_call(start, family, call, more, stream, seed):
    server = start(PLAIN if family is qwen3 else CHATML + "{% if tools %}{% endif %}", tool_family=family.FAMILY)
    server.script.plan(*steps_of(server, f"{call}{more} {call}", seed))
    stop = f"{call[-3:]}{more} {call}X"
    answer = (streamed if stream else whole)(server, parallel_tool_calls=False, stop=[stop])
    calls = answer["calls"] if stream else answer["choices"][0]["message"]["tool_calls"]
    reasons = answer["reasons"] if stream else [answer["choices"][0]["finish_reason"]]
    content = answer["content"] if stream else answer["choices"][0]["message"]["content"]
    assert (functions(calls), reasons, content or "") == (CALLED, ["tool_calls"], "")


def test_the_last_token_of_the_limit_may_complete_the_only_call(server):
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    server.script.plan(server.bytes(text))
    (only,) = whole(server, parallel_tool_calls=False, max_tokens=len(server.bytes(text)))["choices"]
    assert (functions(only["message"]["tool_calls"]), only["finish_reason"]) == (CALLED, "tool_calls")


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [CLOCK]}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function"}, "tools": [CLOCK]}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {}}, "tools": [CLOCK]}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": "clock"}, "tools": [CLOCK]}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}, "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "clock"}}, "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": "any", "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [CLOCK], "add_generation_prompt": False}, "tool_choice"),
        ({"tool_choice": "required", "tools": [CLOCK], "continue_final_message": True,
          "messages": [HELLO, {"role": "assistant", "content": "I"}]}, "tool_choice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_call_that_cannot_be_forced_is_refused_by_name(server, fields, param):
    assert refusal(server, **fields)["param"] == param


def test_an_unknown_form_of_calls_cannot_be_forced(start):
    server = start(QWEN)
    error = refusal(server, tools=[CLOCK], tool_choice="required")
    assert (error["param"], error["code"]) == ("tool_choice", "unsupported_parameter")
    assert "--tool-call-parser" in error["message"]


def test_bare_completions_know_no_tools(server):
    response = server.http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "tool_choice": "required"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


def test_prompt_and_prefix_must_fit_together(thinking):
    """The prefix that follows the reasoning has its room from the beginning."""
    room = 4096 - len(thinking.ids(HEAD + TURN))
    body = {"tools": [CLOCK], "tool_choice": "required"}
    error = refusal(thinking, **body, max_tokens=room)
    assert error["code"] == "context_length_exceeded"
