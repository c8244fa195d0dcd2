"""POST /v1/responses: items and typed events of OpenAI's Responses API, with the text that chat gives."""

import json
from queue import Queue
from typing import Any

import openai
import pytest

from app.text.parsers import FORMATS, OutputParser
from app.text.parsers.base import joined
from tests.fast.api.errors import error_of
from tests.fast.api.served import PATIENCE, Server
from tests.fast.api.templates import HEAD, HELLO, QWEN, TURN

PATH = "/v1/responses"
ASK = {"model": "tiny", "input": "hello"}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "How it is outside",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS: dict[str, Any] = {"tools": [WEATHER, {"type": "function", "name": "clock"}]}
SERVED = {"template": QWEN, "reasoning_parser": "qwen3", "tool_call_parser": "qwen3"}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


TEXT = "It is fine, 漢字 and <b>bold</b>."
ONE_CALL = call("weather", city="Bern")
OUTPUTS = {
    "text": TEXT,
    "nothing": "",
    "reasoning": f"<think>\nHm, a < b.\n</think>\n\n{TEXT}",
    "reasoning alone": "<think>\nHm.\n</think>",
    "a call": ONE_CALL,
    "two calls": ONE_CALL + "\n" + call("clock"),
    "text and a call": f"Let me see.\n\n{ONE_CALL}",
    "reasoning, text and calls": f"<think>\nHm.\n</think>\n\nLook:\n{ONE_CALL}\n{call('clock')}",
    "what is no call": "<tool_call>nonsense</tool_call>",
    "a call and text": f"{ONE_CALL} <b>tail</b>",
    "text between calls": f"<think>\nHm.\n</think>\n\nOne {ONE_CALL} {{two}} {call('clock')} three",
}
KINDS = {
    "text": ["message"],
    "nothing": ["message"],
    "reasoning": ["reasoning", "message"],
    "reasoning alone": ["reasoning", "message"],
    "a call": ["function_call"],
    "two calls": ["function_call", "function_call"],
    "text and a call": ["message", "function_call"],
    "reasoning, text and calls": ["reasoning", "message", "function_call", "function_call"],
    "what is no call": ["message"],
    "a call and text": ["function_call", "message"],
    "text between calls": ["reasoning", "message", "function_call", "message", "function_call", "message"],
}


def whole(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.http.post(PATH, json=ASK | fields)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """The events, whose names and numbers are right."""
    response = server.http.post(PATH, json=ASK | fields | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        events.append(event)
    return events


def content(item: dict[str, Any]) -> dict[str, Any]:
    """The item without its ids, which are new in every answer."""
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def chat(server: Server, **fields: Any) -> dict[str, Any]:
    fields = {"model": "tiny", "messages": [HELLO]} | fields
    response = server.http.post("/v1/chat/completions", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def as_chat(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in tools]


@pytest.mark.parametrize("output", OUTPUTS)
def test_the_items_have_the_text_reasoning_and_calls_that_chat_has(server, output):
    server.plan_text(OUTPUTS[output])
    answer = whole(server, **TOOLS)
    items = answer["output"]
    assert [item["type"] for item in items] == KINDS[output]
    assert answer["status"] == "completed" and {item["status"] for item in items} == {"completed"}
    expected = chat(server, tools=as_chat(TOOLS["tools"]))
    message = expected["choices"][0]["message"]
    texts: dict[str, str] = {}
    for item in items:
        if item["type"] != "function_call":
            texts[item["type"]] = texts.get(item["type"], "") + item["content"][0]["text"]
    assert texts.get("message", "") == (message["content"] or "")
    assert texts.get("reasoning") == message.get("reasoning_content")
    calls = [{"name": item["name"], "arguments": item["arguments"]} for item in items if "call_id" in item]
    assert calls == [call["function"] for call in message.get("tool_calls", [])]
    counts = {name.replace("input", "prompt").replace("output", "completion"): n for name, n in answer["usage"].items()}
    assert counts["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert counts["completion_tokens"] == expected["usage"]["completion_tokens"]
    assert counts["total_tokens"] == expected["usage"]["total_tokens"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("output", OUTPUTS)
def test_streamed_and_whole_answers_agree_wherever_the_steps_end(server, output, seed):
    server.plan_text(OUTPUTS[output], 2 * seed)
    expected = whole(server, **TOOLS)
    server.plan_text(OUTPUTS[output], 2 * seed + 1)
    events = streamed(server, **TOOLS)
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    assert list(map(content, last["output"])) == list(map(content, expected["output"]))
    assert last["usage"] == expected["usage"]
    same = {"id", "created_at", "completed_at", "output"}
    assert {k: v for k, v in last.items() if k not in same} == {k: v for k, v in expected.items() if k not in same}


def written(item: dict[str, Any], index: int, deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events that write this item, in OpenAI's order, without their numbers."""
    place = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        kind, empty = "response.function_call_arguments", {"arguments": ""}
        done = {"name": item["name"], "arguments": item["arguments"]}
        inner = [
            *({"type": f"{kind}.delta", **place, "delta": event["delta"]} for event in deltas),
            {"type": f"{kind}.done", **place, **done},
        ]
    else:
        (part,), empty = item["content"], {"content": []}
        place["content_index"] = 0
        kind = f"response.{part['type']}"
        more = {"logprobs": []} if part["type"] == "output_text" else {}
        inner = [
            {"type": "response.content_part.added", **place, "part": part | {"text": ""}},
            *({"type": f"{kind}.delta", **place, "delta": event["delta"], **more} for event in deltas),
            {"type": f"{kind}.done", **place, "text": part["text"], **more},
            {"type": "response.content_part.done", **place, "part": part},
        ]
    added = item | {"status": "in_progress"} | empty
    return [
        {"type": "response.output_item.added", "output_index": index, "item": added},
        *inner,
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


@pytest.mark.parametrize("output", OUTPUTS)
def test_the_events_come_in_openais_order_and_carry_each_item_whole(server, output):
    server.plan_text(OUTPUTS[output], 3)
    created, in_progress, *inner, completed = streamed(server, **TOOLS)
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    for event in (created, in_progress):
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
        assert event["response"]["id"] == completed["response"]["id"]
    expected = []
    for index, item in enumerate(completed["response"]["output"]):
        deltas = [e for e in inner if e["type"].endswith(".delta") and e["output_index"] == index]
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event["delta"] for event in deltas) == text
        assert all(event["delta"] for event in deltas) or not text
        expected += written(item, index, deltas)
    assert [{k: v for k, v in event.items() if k != "sequence_number"} for event in inner] == expected


@pytest.mark.parametrize("output", OUTPUTS)
def test_the_sdk_reads_whole_and_streamed_answers(server, output):
    server.plan_text(OUTPUTS[output], 1)
    answer = server.openai.responses.create(**ASK, **TOOLS)
    with server.openai.responses.stream(**ASK, **TOOLS) as events:
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert final.output_text == answer.output_text == "".join(texts)
    assert [item.type for item in final.output] == [item.type for item in answer.output] == KINDS[output]
    assert final.usage == answer.usage


SHORT = '<tool_call>{"name": "clock"}</tool_call>'
MIXED = f"a {SHORT} <b>}} {SHORT}c"


@pytest.mark.parametrize("stream", [False, True])
def test_items_do_not_depend_on_where_a_step_ends(server, stream):
    ids = [*server.bytes(MIXED), 2]
    for cut in range(len(ids)):
        server.script.plan(*filter(None, (ids[:cut], ids[cut:])))
        answer = streamed(server, **TOOLS)[-1]["response"] if stream else whole(server, **TOOLS)
        told = [item.get("name") or item["content"][0]["text"] for item in answer["output"]]
        assert told == ["a", "clock", " <b>}", "clock", "c"]


@pytest.mark.parametrize("form", FORMATS, ids=lambda each: each.name)
def test_texts_and_calls_keep_their_order_in_every_format(form):
    json = f'{{"name": "f", "{form.key}": {{"a": {{"b": "}}"}}}}}}'
    opening, inner, end = {
        "qwen3": ("<tool_call>", json, "</tool_call>"),
        "llama3_json": ("<|python_tag|>", json, ""),
        "harmony": ("<|channel|>commentary to=functions.", 'f<|message|>{"a": {"b": "}"}}', "<|call|>"),
        "qwen3_coder": ("<tool_call>", "<function=f><parameter=a>\n}\n</parameter>", "</function></tool_call>"),
    }[form.name]
    call = f"{opening}{inner}{end}"
    text = f"One {call}two {{}} <b>{call}{opening}{{"
    tools = [{"function": {"name": "f"}}]
    one_step, many_steps = OutputParser(calls=form.parser(tools)), OutputParser(calls=form.parser(tools))
    whole = joined([*one_step.push(text), *one_step.finish()])
    pieces = [part for character in text for part in many_steps.push(character)]
    assert whole == joined([*pieces, *many_steps.finish()])
    called = [("call", "f"), ("arguments", whole[2].text), ("whole", "")]
    told = [(kind, part.strip()) for kind, part in whole]
    assert told == [("content", "One"), *called, ("content", "two {} <b>"), *called, ("content", f"{opening}{{")]
    assert whole[2].text == ('{"a": {"b": "}"}}' if form.key else '{"a": "}"}')


def test_arguments_stream_as_they_are_written(server, background):
    server.script.by_hand()
    queue: Queue[dict[str, Any]] = Queue()
    asked = background.submit(read_events, server, queue, TOOLS)
    request_id = server.script.see("Submit")["request_id"]
    steps = ['<tool_call>{"name": "weather", "arguments": {', '"city": "Be', 'rn"}']
    deltas = []
    for step in steps:
        server.script.emit(request_id, server.bytes(step))
        while (event := queue.get(timeout=PATIENCE))["type"] != "response.function_call_arguments.delta":
            pass
        deltas.append(event["delta"])
    server.script.emit(request_id, [*server.bytes("}</tool_call>"), 2])
    asked.result()
    assert deltas == ["{", '"city": "Be', 'rn"}']
    assert [event["type"] for event in queue.queue] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("written", "arguments"),
    [('{"city": Bern}}</tool_call>', '{"city": Bern}}'), ('{"city": "Be', '{"city": "Be')],
)
def test_a_call_whose_arguments_are_no_json_is_incomplete(server, written, arguments, stream):
    server.plan_text(f'<tool_call>{{"name": "weather", "arguments": {written}', 1)
    answer = streamed(server, **TOOLS)[-1]["response"] if stream else whole(server, **TOOLS)
    (item,) = answer["output"]
    assert (item["status"], item["arguments"], answer["status"]) == ("incomplete", arguments, "completed")


def test_text_behind_a_call_is_an_item_of_its_own_in_a_stream(server, background):
    server.script.by_hand()
    queue: Queue[dict[str, Any]] = Queue()
    asked = background.submit(read_events, server, queue, TOOLS)
    request_id = server.script.see("Submit")["request_id"]
    for text, last in (("One ", "response.output_text.delta"), (ONE_CALL, "response.output_item.done")):
        server.script.emit(request_id, server.bytes(text))
        while queue.get(timeout=PATIENCE)["type"] != last:
            pass
    server.script.emit(request_id, [*server.bytes(" two"), 2])
    asked.result()
    items = queue.queue[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["message", "function_call", "message"]
    assert [item["content"][0]["text"] for item in items[::2]] == ["One", " two"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_required_call_is_the_answer(server, choice, stream):
    begun = '<tool_call>\n{"name": "' + ("" if choice == "required" else 'weather", "arguments": ')
    server.plan_text(ONE_CALL.removeprefix(begun))
    fields = TOOLS | {"tool_choice": choice, "chat_template_kwargs": {"enable_thinking": False}}
    answer = streamed(server, **fields)[-1]["response"] if stream else whole(server, **fields)
    (item,) = answer["output"]
    assert (item["type"], item["name"], json.loads(item["arguments"])) == ("function_call", "weather", {"city": "Bern"})
    assert (answer["tool_choice"], answer["status"]) == (choice, "completed")


def test_a_step_is_one_delta(server, background):
    playing = background.submit(server.answer, server.ids("the quick"))
    deltas = []
    with server.openai.responses.create(**ASK, stream=True) as events:
        for event in events:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
                server.script.emit(playing.result(), [*server.ids(" brown fox"), 2])
    assert deltas == ["the quick", " brown fox"]


@pytest.mark.parametrize("as_objects", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_sends_the_answers_items_back_as_they_are(server, stream, as_objects):
    server.plan_text(OUTPUTS["reasoning, text and calls"])
    if stream:
        with server.openai.responses.stream(**ASK, **TOOLS) as events:
            answer = events.get_final_response()
    else:
        answer = server.openai.responses.create(**ASK, **TOOLS)
    server.script.see("Submit")
    calls = [item for item in answer.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "12"} for call in calls]
    items = answer.output if as_objects else [item.model_dump() for item in answer.output]
    server.script.plan([2])
    server.openai.responses.create(**ASK | {"input": [HELLO, *items, *results]}, **TOOLS)
    prompt = server.prompt()
    result = "<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n"
    told = f"<think>\nHm.\n</think>\n\nLook:\n{ONE_CALL}\n{call('clock')}"
    assert prompt.endswith(f"{HEAD}{TURN}{told}<|im_end|>\n{result}{result}{TURN}")


@pytest.mark.parametrize(
    ("output", "left_out", "kinds"),
    [
        ("text", 3, ["message"]),
        ("reasoning", 40, ["reasoning"]),
        ("text and a call", 30, ["message"]),
        ("text and a call", 20, ["message", "function_call"]),
        ("a call and text", 3, ["function_call", "message"]),
    ],
)
def test_an_answer_that_reaches_its_limit_is_incomplete_and_so_is_its_last_item(server, output, left_out, kinds):
    text = OUTPUTS[output]
    fields = TOOLS | {"max_output_tokens": len(server.bytes(text)) - left_out}
    server.plan_text(text)
    answer = whole(server, **fields)
    last = streamed(server, **fields)[-1]
    assert last["type"] == "response.incomplete"
    for response in (answer, last["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item["type"] for item in response["output"]] == kinds
        assert response["output"][-1]["status"] == "incomplete"
        assert response["max_output_tokens"] == fields["max_output_tokens"]


def test_cached_tokens_of_the_prompt_are_in_the_usage(server):
    server.script.plan([2], cached_tokens=16)
    assert whole(server)["usage"]["input_tokens_details"] == {"cached_tokens": 16}


def test_the_response_repeats_the_request_and_says_that_it_is_stored(server):
    server.script.plan([2])
    asked = {"instructions": "Be brief.", "metadata": {"run": "7"}, "user": "me", "top_p": 0.5, "tool_choice": "none"}
    answer = whole(server, **asked, **TOOLS, parallel_tool_calls=False)
    assert {name: answer[name] for name in asked} == asked
    assert [tool["name"] for tool in answer["tools"]] == ["weather", "clock"]
    assert (answer["parallel_tool_calls"], answer["temperature"], answer["truncation"]) == (False, 0.6, "disabled")
    assert (answer["store"], answer["previous_response_id"], answer["error"]) == (True, None, None)
    assert (answer["object"], answer["model"], answer["text"]) == ("response", "tiny", {"format": {"type": "text"}})
    plain = whole(server)
    assert (plain["metadata"], plain["tools"], plain["tool_choice"]) == ({}, [], "auto")
    assert plain["parallel_tool_calls"] is True and plain["id"] != answer["id"]


def read_events(server: Server, events: "Queue[dict[str, Any]]", fields: dict[str, Any], **headers: str) -> None:
    """Put the events of a streamed response on `events` as they come."""
    with server.http.stream("POST", PATH, json=ASK | fields | {"stream": True}, headers=headers) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.put(json.loads(line.removeprefix("data: ")))


def events_until_failure(server: Server, background: Any, fail: Any, **headers: str) -> list[dict[str, Any]]:
    """The events of a stream that ends by `fail(request_id)` after its first text."""
    server.script.by_hand()
    queue: Queue[dict[str, Any]] = Queue()
    asked = background.submit(read_events, server, queue, {}, **headers)
    request_id = server.script.see("Submit")["request_id"]
    server.script.emit(request_id, server.ids("hello"))
    events = [queue.get(timeout=PATIENCE) for _ in range(5)]
    assert events[-1]["type"] == "response.output_text.delta"
    fail(request_id)
    asked.result()
    return [*events, *queue.queue]


def check_failed(events: list[dict[str, Any]], code: str) -> None:
    """The stream ends with the error and a failed response, and never looks complete."""
    error, failed = events[5:]
    assert (error["type"], error["code"], error["param"]) == ("error", code, None)
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
    assert [event["sequence_number"] for event in events] == list(range(7))


def test_an_error_of_the_engine_in_mid_stream_fails_the_response(server, background):
    def fail(request_id: str) -> None:
        server.script.emit(request_id, [], finish="error", error="the logits are not finite")

    events = events_until_failure(server, background, fail)
    check_failed(events, "engine_error")
    assert "not finite" in events[-2]["message"]


def test_a_deadline_in_mid_stream_fails_the_response_and_aborts_it(server, background):
    def fail(request_id: str) -> None:
        server.call(lambda: server.engine.expire(request_id))

    events = events_until_failure(server, background, fail, **{"X-Request-Timeout": "60"})
    check_failed(events, "deadline_exceeded")
    assert server.script.see("Abort")


def test_an_error_of_a_whole_response_has_its_status(server, background):
    server.script.by_hand()
    asked = background.submit(lambda: server.http.post(PATH, json=ASK))
    server.script.emit(server.script.see("Submit")["request_id"], [], finish="error", error="broken")
    assert error_of(asked.result(), 500)["code"] == "engine_error"
    late = server.http.post(PATH, json=ASK, headers={"X-Request-Timeout": "0.1"})
    assert error_of(late, 504)["code"] == "deadline_exceeded"


def test_a_loading_engine_is_a_503_and_the_sdk_knows_it(own_server):
    with pytest.raises(openai.InternalServerError) as caught:
        own_server.openai.responses.create(**ASK)
    assert (caught.value.status_code, caught.value.code) == (503, "engine_loading")
