"""Tools of Qwen3-Coder and Qwen3.5 over HTTP, with a template that writes calls as theirs do."""

import json
from typing import Any

import pytest

from tests.fast.api.served import Server
from tests.fast.api.templates import HEAD, HELLO, TURN, Said, prompt_of, said

CODER = """\
{%- if tools %}
    {{- '<|im_start|>system\\nYou have access to the following functions:\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n\\nIf you choose to call a function ONLY reply in the following format with NO suffix:\\n\\n' }}
    {{- '<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n' }}
    {{- '</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set tool_call = tool_call.function %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
            {%- for args_name, args_value in tool_call.arguments | items %}
                {{- '<parameter=' + args_name + '>\\n' }}
                {{- args_value if args_value is string else args_value | tojson | safe }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""As Qwen3.5 has it, shortened."""
WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "mode": {"type": "integer"},
                "options": {"type": "object"},
                "backup": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            },
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WRITE, CLOCK]
NAMED = {"type": "function", "function": {"name": "write"}}
ARGUMENTS = {
    "path": "a.py",
    "text": 'if a < b:\n    print("</parameter>")\n\n<tool_call>\n<function=clock>\n</function>\n</tool_call>\n',
    "mode": 420,
    "options": {"tags": ["é", None]},
    "backup": None,
}
REST = "<parameter=mode>\n420\n</parameter>\n</function>\n</tool_call>"
CALL = f"<tool_call>\n<function=write>\n{REST}"
CALLED = [("write", {"mode": 420})]
CLOCKED = "<tool_call>\n<function=clock>\n</function>\n</tool_call>"
OUTPUTS = {
    "one": CALL,
    "two": f"{CALL}\n{CLOCKED}",
    "without the opening tag": CALL.removeprefix("<tool_call>\n"),
    "text around": f"I write.\n\n{CALL} and {CLOCKED} it is",
    "JSON": '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "never closed": "Hm <tool_call>\n<function=write>\n<parameter=text>\na\n</param",
}


@pytest.fixture
def server(start) -> Server:
    return start(CODER, tool_call_parser="auto")


def ask(server: Server, stream: bool = False, **fields: Any) -> Said:
    return said(server, stream, tools=TOOLS, **fields)


def turn(*calls: tuple[str, dict[str, Any]], content: str = "") -> dict[str, Any]:
    """The assistant's message with these calls, as clients send it back."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": str(index), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for index, (name, arguments) in enumerate(calls)
        ],
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("content", ["", "I write it."])
def test_what_the_template_writes_of_calls_is_read_as_the_same_calls(server, content, stream):
    calls = [("write", ARGUMENTS), ("clock", {}), ("write", {"path": ""})]
    results = [{"role": "tool", "tool_call_id": str(index), "content": f"done {index}"} for index in range(3)]
    prompt = prompt_of(server, tools=TOOLS, messages=[HELLO, turn(*calls, content=content), *results])
    shown, _, answered = prompt.partition(HEAD + TURN)[2].partition("<|im_end|>")
    assert shown.startswith(f"{content}\n<tool_call>" if content else "<tool_call>\n<function=write>\n<parameter=path>")
    responses = "".join(f"\n<tool_response>\ndone {index}\n</tool_response>" for index in range(3))
    assert answered == f"\n<|im_start|>user{responses}<|im_end|>\n{TURN}"
    server.plan_text(shown, 3)
    answer = ask(server, stream)
    assert answer[1:4] == (content, "tool_calls", calls)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("output", OUTPUTS)
def test_streamed_and_whole_answers_agree_wherever_the_steps_end(server, output, seed):
    server.plan_text(OUTPUTS[output], 2 * seed)
    answer = ask(server)
    server.plan_text(OUTPUTS[output], 2 * seed + 1)
    assert ask(server, stream=True)[:4] == answer[:4]
    assert answer.finish_reason == ("tool_calls" if answer.calls and output != "never closed" else "stop")


@pytest.mark.parametrize(
    ("output", "content", "calls"),
    [
        ("one", "", CALLED),
        ("two", "", [*CALLED, ("clock", {})]),
        ("without the opening tag", "", CALLED),
        ("text around", "I write. and it is", [*CALLED, ("clock", {})]),
        ("JSON", OUTPUTS["JSON"], []),
        ("never closed", "Hm", [("write", '{"text": "a\\n</param')]),
    ],
)
def test_calls_are_taken_out_and_what_is_no_call_is_content(server, output, content, calls):
    server.plan_text(OUTPUTS[output])
    answer = ask(server)
    assert (answer.content, answer.calls) == (content, calls)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_the_limit_cuts_behind_a_parameter_may_lack_others_and_is_not_whole(server, stream):
    text = CALL.partition("\n</function>")[0]
    server.plan_text(text, 1)
    cut = ask(server, stream, max_tokens=len(server.bytes(text)))
    assert cut[1:4] == ("", "length", [("write", '{"mode": 420')])
    assert ask(server, stream)[1:4] == ("", "tool_calls", CALLED), "a model that ends by itself left out an end tag"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "prefix", "rest"),
    [
        ("required", "<tool_call>\n<function", f"=write>\n{REST}"),
        (NAMED, "<tool_call>\n<function=write>\n", REST),
    ],
    ids=["required", "named"],
)
def test_a_forced_call_begins_in_the_prompt(server, choice, prefix, rest, stream):
    server.plan_text(rest, 1)
    answer = ask(server, stream, tool_choice=choice)
    assert server.prompt().endswith(TURN + prefix)
    assert answer[1:4] == ("", "tool_calls", CALLED)


def test_required_leaves_the_number_of_calls_to_the_model_and_a_named_function_is_called_once(server):
    server.plan_text(f"=write>\n{REST}\n{CLOCKED}")
    assert ask(server, tool_choice="required").calls == [*CALLED, ("clock", {})]
    server.plan_text(f"{REST}\n{CLOCKED}")
    assert ask(server, tool_choice=NAMED).calls == CALLED


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_first_is_the_only_one(server, stream):
    server.plan_text(OUTPUTS["two"])
    assert ask(server, stream, parallel_tool_calls=False)[1:4] == ("", "tool_calls", CALLED)


def test_responses_have_the_types_of_the_schema_too(server):
    server.plan_text(OUTPUTS["two"])
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    response = server.openai.responses.create(model="tiny", input="hello", tools=tools)
    assert [(item.name, json.loads(item.arguments)) for item in response.output] == [*CALLED, ("clock", {})]
