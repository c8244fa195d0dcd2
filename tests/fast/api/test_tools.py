"""Tools: offered in the prompt, called in the answer, remembered in the conversation."""

import json
from typing import Any

import pytest

from app.api.services import Services
from app.config.settings import Config
from tests.fast.api.served import CHATML, Server
from tests.fast.api.templates import HEAD, HELLO, QWEN, TURN, Said, prompt_of, refusal, said

LLAMA = """\
{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content }}{% endfor %}
{%- if tools %}{{ 'Respond in the format {"name": function name, "parameters": dictionary}.' }}{% endif %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
"""As Llama 3.1 has it, much shortened."""
LLAMA_CALLS = """\
{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if 'tool_calls' in m %}
{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}
{%- else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"""
"""As Llama 3.1 writes a call, beside which it leaves the content out."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is outside, in 漢字 & <b>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "day": {"enum": ["now", None], "default": None}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
OFFER = {"model": "tiny", "messages": [HELLO], "tools": [WEATHER, CLOCK]}
SERVED = {"template": QWEN, "tool_call_parser": "qwen3"}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


OUTPUTS = {
    "one": call("weather", city="Bern"),
    "two": call("weather", city="東京") + "\n" + call("clock"),
    "text before": "Let me see.\n\n" + call("weather", city='a < b </tool> "c"'),
    "text around": "One " + call("clock") + " two " + call("weather", city="x") + " three",
    "none": "It is fine, 漢字 and <b>bold</b>.",
    "nothing": "",
    "not JSON": '<tool_call>\n{"name": "weather", "arguments": {city}}\n</tool_call>',
    "no name": '<tool_call>\n{"arguments": {}}\n</tool_call> bye',
    "arguments that are a list": '<tool_call>{"name": "clock", "arguments": [1]}</tool_call>',
    "never closed": 'Hm <tool_call>\n{"name": "weather"',
    "one whole, one broken": call("clock") + '<tool_call>{"name": "weather", "arguments": {city}}</tool_call>',
    "one good, one bad": call("clock") + "<tool_call>nonsense</tool_call>",
}


BROKEN = ["not JSON", "one whole, one broken"]


def ask(server: Server, stream: bool = False, **fields: Any) -> Said:
    return said(server, stream, tools=OFFER["tools"], **fields)


def test_offered_tools_reach_the_prompt_as_they_were_sent(server):
    prompt = prompt_of(server, tools=[WEATHER, CLOCK])
    offered = prompt.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert [json.loads(line) for line in offered.split("\n")] == [WEATHER, CLOCK]
    assert prompt.endswith(HEAD + TURN)


@pytest.mark.parametrize("fields", [{"tool_choice": "auto"}, {"tool_choice": None}, {"parallel_tool_calls": False}])
def test_tools_are_offered_unless_tool_choice_is_none(server, fields):
    assert prompt_of(server, tools=[CLOCK], **fields) == prompt_of(server, tools=[CLOCK])


def test_cache_control_of_a_tool_and_its_function_is_not_in_the_prompt(server):
    hint = {"cache_control": {"type": "ephemeral"}}
    hinted = WEATHER | hint | {"function": WEATHER["function"] | hint}
    prompt = prompt_of(server, tools=[hinted])
    assert prompt == prompt_of(server, tools=[WEATHER]) and "weather" in prompt
    of_responses = {"type": "function", **WEATHER["function"], **hint}
    answer = server.http.post("/v1/responses", json={"input": "hello", "tools": [of_responses]})
    assert answer.status_code == 200, answer.text
    told = server.prompt()
    assert told == prompt


def test_strict_false_says_nothing_and_is_not_in_the_prompt(server):
    lax = {"type": "function", "function": CLOCK["function"] | {"strict": False, "description": None}}
    assert prompt_of(server, tools=[lax]) == prompt_of(server, tools=[CLOCK])


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}], ids=str)
def test_without_offered_tools_the_prompt_has_none_and_a_call_is_content(server, fields):
    text = OUTPUTS["text around"]
    server.plan_text(text, 0)
    for stream in (False, True):
        assert said(server, stream, **{"tools": OFFER["tools"]} | fields)[:4] == (None, text, "stop", [])
    assert server.text(server.script.see("Submit")["token_ids"]) == server.text(server.ids(HEAD + TURN))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("output", OUTPUTS)
def test_streamed_and_whole_answers_agree_wherever_the_steps_end(server, output, seed):
    server.plan_text(OUTPUTS[output], 2 * seed)
    answer = ask(server)
    server.plan_text(OUTPUTS[output], 2 * seed + 1)
    assert ask(server, stream=True)[:4] == answer[:4]
    assert answer.finish_reason == ("tool_calls" if answer.calls and output not in BROKEN else "stop")


@pytest.mark.parametrize(
    ("output", "content", "called"),
    [
        ("one", None, [("weather", {"city": "Bern"})]),
        ("two", None, [("weather", {"city": "東京"}), ("clock", {})]),
        ("text before", "Let me see.", [("weather", {"city": 'a < b </tool> "c"'})]),
        ("none", OUTPUTS["none"], []),
        ("nothing", "", []),
        ("not JSON", None, [("weather", "{city}}")]),
        ("no name", OUTPUTS["no name"], []),
        ("arguments that are a list", OUTPUTS["arguments that are a list"], []),
        ("never closed", OUTPUTS["never closed"], []),
        ("one good, one bad", "<tool_call>nonsense</tool_call>", [("clock", {})]),
    ],
)
def test_calls_are_taken_out_and_what_is_no_call_is_content_as_it_was_written(server, output, content, called):
    server.plan_text(OUTPUTS[output], 0)
    assert server.openai.chat.completions.create(**OFFER).choices[0].message.content == content
    assert ask(server).calls == called


def test_calls_have_ids_of_their_own_and_are_numbered_in_a_stream(server):
    ids = []
    for seed in range(3):
        server.plan_text(OUTPUTS["two"], seed)
        ids += ask(server).call_ids + ask(server, stream=True).call_ids
    assert len(set(ids)) == 12


def test_calls_of_one_step_are_one_chunk_and_those_of_two_steps_are_numbered_on(server, background):
    server.script.by_hand()

    playing = background.submit(server.answer, server.bytes(OUTPUTS["two"]))
    indexes = []
    with server.openai.chat.completions.create(**OFFER, stream=True) as chunks:
        request_id = playing.result()
        for chunk in chunks:
            if calls := chunk.choices[0].delta.tool_calls:
                indexes.append([call.index for call in calls])
                server.script.emit(request_id, [*server.bytes(call("clock")), 2])
    assert indexes == [[0, 1], [2]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("output", "content", "called"),
    [
        ("two", "", ("weather", {"city": "東京"})),
        ("text around", "One", ("clock", {})),
        ("one", "", ("weather", {"city": "Bern"})),
    ],
)
def test_without_parallel_calls_the_first_is_kept(server, output, content, called, seed):
    server.plan_text(OUTPUTS[output], seed)
    for stream in (False, True):
        answer = ask(server, stream, parallel_tool_calls=False)
        assert (answer.content.strip(), answer.finish_reason, answer.calls) == (content, "tool_calls", [called])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_call_cut_off_by_the_limit_has_what_was_written_and_the_reason_is_length(server, stream, parallel):
    text = OUTPUTS["one"]
    server.plan_text(text, 3)
    for left_out, calls in ((18, [("weather", '{"city": "Be')]), (40, [])):
        answer = ask(server, stream, max_tokens=len(server.bytes(text)) - left_out, parallel_tool_calls=parallel)
        assert answer[1:4] == ("" if calls else text[:-left_out], "length", calls)


@pytest.mark.parametrize("n", [1, 2])
def test_a_call_streams_as_it_is_written(server, background, n):
    server.script.by_hand()
    steps = ['<tool_call>{"name": "weather", "arguments": {', '"city"', ': "Be', 'rn"}}</tool_call>']
    playing = background.submit(lambda: [server.answer(server.bytes(steps[0])) for _ in range(n)])
    told = [[] for _ in range(n)]
    with server.openai.chat.completions.create(**OFFER, stream=True, n=n) as chunks:
        for chunk in chunks:
            for choice in chunk.choices:
                for called in choice.delta.tool_calls or []:
                    told[choice.index].append(
                        (called.index, called.id is None, called.function.name, called.function.arguments)
                    )
                    if (number := len(told[choice.index])) < len(steps):
                        tokens = [*server.bytes(steps[number]), *([2] if number == len(steps) - 1 else [])]
                        server.script.emit(playing.result()[choice.index], tokens)
    expected = [
        (0, False, "weather", "{"),
        (0, True, None, '"city"'),
        (0, True, None, ': "Be'),
        (0, True, None, 'rn"}'),
    ]
    assert told == [expected] * n


def test_an_answer_that_runs_out_behind_a_call_is_incomplete(server):
    text = OUTPUTS["text around"]
    server.plan_text(text, 0)
    answer = ask(server, max_tokens=len(server.bytes(text)) - 2)
    assert (len(answer.calls), answer.finish_reason) == (2, "length")


def test_a_stop_string_inside_a_call_ends_the_answer_before_the_call(server):
    server.plan_text(OUTPUTS["text before"], 0)
    shown = 'Let me see.\n\n<tool_call>\n{"name": "weather", '
    assert ask(server, stop='"arguments"')[1:4] == (shown, "stop", [])


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_a_broken_one_is_the_only_one(server, stream):
    server.plan_text(OUTPUTS["not JSON"] + call("clock"), 0)
    answer = ask(server, stream, parallel_tool_calls=False)
    assert answer[1:4] == ("", "stop", [("weather", "{city}}")])


def test_a_stop_string_in_the_arguments_ends_the_answer_and_its_call_is_not_whole(server):
    server.plan_text(OUTPUTS["one"], 0)
    assert ask(server, stop="Bern")[1:4] == ("", "stop", [("weather", '{"city": "')])


def conversation(arguments: object = '{"city": "Bern", "days": 2}') -> list[dict[str, Any]]:
    function = {"name": "weather"} | ({} if arguments is None else {"arguments": arguments})
    called = {"id": "call_1", "type": "function", "function": function}
    return [
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ('{"city":"Bern",   "days":2}', '{"city": "Bern", "days": 2}'),
        ('{"city": "\\u6771\\u4eac"}', '{"city": "東京"}'),
        ("{}", "{}"),
        ("", "{}"),
        ({"city": "Bern", "days": None}, '{"city": "Bern", "days": null}'),
    ],
)
def test_calls_in_a_conversation_are_rendered_with_arguments_as_an_object(server, sent, shown):
    prompt = prompt_of(server, messages=conversation(sent))
    assert prompt == (
        f'{HEAD}{TURN}<tool_call>\n{{"name": "weather", "arguments": {shown}}}\n</tool_call><|im_end|>\n'
        f"<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n{TURN}"
    )


def test_templates_may_ask_for_the_members_of_the_arguments(start):
    server = start("{{ messages[1].tool_calls[0].function.arguments.city }} by {{ messages[2].tool_call_id }}")
    assert prompt_of(server, messages=conversation()) == "Bern by call_1"


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdks_own_message_can_be_sent_back_as_it_is(server, stream):
    server.plan_text(OUTPUTS["text around"], 0)
    if stream:
        with server.openai.chat.completions.stream(**OFFER) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = server.openai.chat.completions.create(**OFFER).choices[0].message
    server.script.see("Submit")
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12"} for call in message.tool_calls]
    for sent in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        server.script.plan([2])
        server.openai.chat.completions.create(**OFFER | {"messages": [HELLO, sent, *results]})
        prompt = server.prompt()
        assert call("clock") in prompt and call("weather", city="x") in prompt
        assert prompt.count("<tool_response>\n12\n") == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": conversation("not JSON")}, "messages.1.tool_calls.0.function.arguments"),
        ({"messages": conversation('["a"]')}, "messages.1.tool_calls.0.function.arguments"),
        ({"messages": conversation('"a"')}, "messages.1.tool_calls.0.function.arguments"),
        ({"messages": conversation([{"city": "Bern"}])}, "messages.1.tool_calls.0.function.arguments"),
        ({"messages": conversation("[" * 100_000)}, "messages.1.tool_calls.0.function.arguments"),
        ({"messages": conversation('{"city": "\\ud800"}')}, "messages.1.tool_calls.0.function.arguments"),
        ({"messages": [HELLO | {"tool_call_id": "call_1"}]}, "messages.0.tool_call_id"),
        ({"messages": [HELLO | {"tool_calls": conversation()[1]["tool_calls"]}]}, "messages.0.tool_calls"),
        ({"messages": [HELLO | {"reasoning_content": "hm"}]}, "messages.0.reasoning_content"),
        ({"messages": [HELLO | {"content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "system", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": None, "tool_call_id": "a"}]}, "messages.0.content"),
        ({"messages": [HELLO, {"role": "assistant", "content": None}]}, "messages.1.content"),
        ({"messages": [HELLO, {"role": "assistant", "content": None, "tool_calls": []}]}, "messages.1.content"),
        ({"messages": [HELLO, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages.1.tool_calls.0"
         ".function.name"),
        ({"tools": [{"type": "function", "function": {"description": "x"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "{}"}}]},
         "tools.0.function.parameters"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": {"type": "function"}}, "tools"),
        ({"tools": ["clock"]}, "tools.0"),
        ({"tools": [CLOCK], "tool_choice": "clock"}, "tool_choice"),
        ({"tools": [CLOCK], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_dotted_name(server, fields, param):
    assert refusal(server, **fields)["param"] == param


@pytest.mark.parametrize("depth", [100, 900, 3000])
@pytest.mark.parametrize("template", [QWEN, "{{ tools | tojson(indent=4) }}"], ids=["plain", "indented"])
def test_parameters_are_offered_or_refused_however_deep_they_are(start, template, depth):
    schema = '{"a": ' * depth + "{}" + "}" * depth
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}'
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}]}}'
    response = start(template).http.post("/v1/chat/completions", content=body)
    assert response.status_code in (200, 400), response.text


def test_a_template_without_a_place_for_tools_refuses_them(start):
    server = start(CHATML, tool_call_parser="qwen3")
    error = refusal(server, tools=[CLOCK])
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    assert "template" in error["message"]
    assert prompt_of(server, tools=[CLOCK], tool_choice="none") == HEAD + TURN
    assert prompt_of(server, tools=[]) == HEAD + TURN


def test_a_template_without_a_place_for_calls_refuses_them_too(start):
    """It would leave out what the assistant did and show the result of nothing."""
    assert refusal(start(CHATML), messages=conversation())["param"] == "messages.1.tool_calls"


def test_with_the_parser_off_a_call_is_content(start):
    server = start(QWEN)
    server.plan_text(OUTPUTS["one"], 0)
    assert ask(server)[1:4] == (OUTPUTS["one"], "stop", [])


@pytest.mark.parametrize(
    ("said", "template", "name"),
    [
        ("auto", QWEN, "qwen3"),
        ("auto", LLAMA, "llama3_json"),
        ("auto", CHATML, None),
        ("auto", QWEN + "<function=f>", None),
        ("auto", QWEN + "<function=f><parameter=a>", "qwen3_coder"),
        ("qwen3_xml", CHATML, "qwen3_coder"),
        ("Qwen3_Coder", QWEN, "qwen3_coder"),
        ("none", QWEN, None),
        ("hermes", CHATML, "qwen3"),
        ("llama3_json", QWEN, "llama3_json"),
    ],
)
def test_the_parser_is_chosen_by_its_setting_or_from_the_template(start, said, template, name):
    server = start(template)
    form = Services(Config(tool_call_parser=said), server.engine, server.tokenizer, server.metrics).call_format
    assert (form and form.name) == name
    assert server.tokenizer.chat_template.call_format is form or said == "none"


@pytest.mark.parametrize("content", ["I look.", "", None])
def test_what_was_said_beside_a_call_is_in_llamas_prompt(start, content):
    """Its template would leave it out."""
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    turn = {"role": "assistant", "content": content, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "noon"}
    prompt = prompt_of(start(LLAMA_CALLS), messages=[HELLO, turn, result])
    spoken = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    said = f"{spoken}{content}<|eot_id|>" if content else ""
    assert f'hello<|eot_id|>{said}{spoken}{{"name": "clock", "parameters": {{}}}}<|eot_id|><|start_header' in prompt
