"""Fields of messages: those that change no text pass, reasoning is read, and names are written or told."""

import pytest

from app.text.chat_template import ChatTemplate
from tests.fast.api.served import Server
from tests.fast.api.templates import ASK, HEAD, HELLO, QWEN, TURN, prompt_of, refusal

CACHED = {"cache_control": {"type": "ephemeral"}}
THOUGHT = f"{HEAD}{TURN}<think>\n2 + 3\n</think>\n\n5.<|im_end|>\n{HEAD}{TURN}"
SAID = {"role": "assistant", "content": "5."}
NAMED = """\
{%- for message in messages %}
    {{- message.role + ('(' + message.name + ')' if message.name and message.role != 'tool' else '') }}
    {{- ': ' + message.content + '\\n' }}
{%- endfor %}"""
"""Writes names, but not those of tools' messages."""
CALL = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
SERVED = {"template": QWEN}


@pytest.mark.parametrize(
    "fields",
    [
        CACHED,
        {"provider_specific_fields": {"refusal": None, "citations": [1]}},
        {"id": "msg_1"},
        {"content": [{"type": "text", "text": "hello", **CACHED}]},
        {"name": None},
        {"name": ""},
    ],
    ids=str,
)
def test_fields_that_change_no_text_pass(server, fields):
    assert prompt_of(server, messages=[HELLO | fields]) == HEAD + TURN


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": "2 + 3"},
        {"reasoning_content": "2 + 3"},
        {"reasoning": "2 + 3", "reasoning_content": "2 + 3"},
        {"reasoning": "", "reasoning_content": "2 + 3"},
        {"content": [{"type": "thinking", "thinking": "2 + 3", "signature": "x"}, {"type": "text", "text": "5."}]},
        {
            "content": [{"type": "thinking", "thinking": "2 + 3", **CACHED}, {"type": "text", "text": "5."}],
            "reasoning_content": "2 + 3",
        },
    ],
    ids=["reasoning", "reasoning_content", "twice", "one is empty", "part", "part and field"],
)
def test_reasoning_has_several_names(server, fields):
    assert prompt_of(server, messages=[HELLO, SAID | fields, HELLO]) == THOUGHT


def test_parts_of_reasoning_are_joined_and_no_text(server):
    parts = [{"type": "thinking", "thinking": text} for text in ("2", "+ 3")] + [{"type": "text", "text": "5."}]
    prompt = prompt_of(server, messages=[HELLO, SAID | {"content": parts}, HELLO])
    assert prompt == THOUGHT.replace("2 + 3", "2\n+ 3")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (SAID | {"reasoning": "a", "reasoning_content": "b"}, "reasoning"),
        (SAID | {"reasoning": "a", "content": [{"type": "thinking", "thinking": "b"}]}, "reasoning"),
        (HELLO | {"reasoning": "a"}, "reasoning"),
        (HELLO | {"content": [{"type": "thinking", "thinking": "b"}]}, "content"),
        (SAID | {"reasoning": 5}, "reasoning"),
        (SAID | {"content": [{"type": "thinking", "text": "b"}]}, "content.0.thinking"),
        (SAID | {"content": [{"type": "image_url", "image_url": {}}]}, "content.0.type"),
        (SAID | {"content": [{"type": "text", "text": 5}]}, "content.0.text"),
    ],
    ids=["differs", "part differs", "user", "part of user", "number", "no thinking", "image", "text"],
)
def test_reasoning_that_cannot_be_read_is_refused_by_its_field(server, message, param):
    assert refusal(server, messages=[message])["param"] == f"messages.0.{param}"


def warned(server: Server, messages: list[dict[str, object]], **fields: object) -> list[str]:
    """Return the fields that the answer's warnings name, which are the same whole, streamed and in /tokenize."""
    server.script.plan([2])
    ask = {"messages": messages} | fields
    whole = server.http.post("/v1/chat/completions", json=ask).json()
    chunks = server.chunks("/v1/chat/completions", ask)
    warnings = whole.get("warnings", [])
    assert [warning for chunk in chunks for warning in chunk.get("warnings", [])] == warnings
    assert server.http.post("/tokenize", json=ask).json().get("warnings", []) == warnings
    assert {warning["code"] for warning in warnings} <= {"name_left_out", "reasoning_left_out"}
    return [warning["param"] for warning in warnings]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_name_that_the_template_leaves_out_is_told_in_the_answer(server, role):
    messages = [HELLO, {"role": role, "content": "x", "name": "Ann"}]
    assert warned(server, messages) == ["messages.1.name"]
    assert prompt_of(server, messages=messages) == prompt_of(server, messages=[HELLO, {"role": role, "content": "x"}])


@pytest.mark.parametrize(
    ("field", "value"),
    [("reasoning_content", "2"), ("reasoning", "2"), ("content", [{"type": "thinking", "thinking": "2"}])],
)
def test_reasoning_that_the_template_has_no_place_for_is_told_in_the_answer(server, start, field, value):
    messages = [HELLO, SAID | {field: value}, HELLO, SAID | {field: value}, HELLO]
    assert warned(server, messages) == []
    without = start(NAMED)
    assert warned(without, messages) == [f"messages.1.{field}"]
    assert warned(without, [HELLO | {"name": "Ann"}, SAID | {"reasoning": ""}]) == []


def test_an_item_of_reasoning_that_the_template_has_no_place_for_is_told_by_its_own_name(start):
    without = start(NAMED)
    items = [HELLO, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "2"}]}, SAID, HELLO]
    answer = without.http.post("/v1/responses", json={"instructions": "Be brief.", "input": items}).json()
    assert [(warning["code"], warning["param"]) for warning in answer["warnings"]] == [
        ("reasoning_left_out", "input.2")
    ]


def test_names_that_are_left_out_are_told_once_however_many_choices_and_messages(server):
    ann = HELLO | {"name": "Ann"}
    assert warned(server, [HELLO, ann, ann], n=3) == ["messages.1.name"]
    answer = server.http.post("/v1/chat/completions", json={"messages": [ann, ann]}).json()
    assert "2 messages" in answer["warnings"][0]["message"]


def test_a_tools_message_may_repeat_the_function_that_was_called(server):
    told = {"role": "tool", "tool_call_id": "a", "content": "noon"}
    prompt = prompt_of(server, messages=[HELLO, CALLING, told])
    assert prompt_of(server, messages=[HELLO, CALLING, told | {"name": "clock"}]) == prompt
    assert warned(server, [HELLO, CALLING, told | {"name": "clock"}]) == []
    assert warned(server, [HELLO, CALLING, told | {"name": "o'clock"}]) == ["messages.2.name"]
    assert warned(server, [HELLO, told | {"name": "clock"}]) == ["messages.1.name"]


def test_a_name_is_written_where_the_template_writes_it(start):
    server = start(NAMED)
    ann = HELLO | {"name": "Ann"}
    assert prompt_of(server, messages=[ann, HELLO]) == "user(Ann): hello\nuser: hello\n"
    assert warned(server, [ann, HELLO]) == []


@pytest.mark.parametrize(
    ("source", "switches"),
    [
        (
            "{% for m in messages %}{% if m.content is string %}{% set content = m.content %}{% else %}"
            "{% set content = '' %}{% endif %}{{ content }}{% endfor %}",
            [],
        ),
        (
            "{% for m in messages %}{% if m.a %}{% set content = m.a %}{% set content = content + 'x' %}{% endif %}"
            "{{ content }}{% endfor %}{{ enable_thinking }}",
            ["enable_thinking"],
        ),
        ("{% if style is not defined %}{% set style = 'short' %}{% endif %}{{ style }}", ["style"]),
        ("{% set style = style | default('short') %}{{ style }}", ["style"]),
        ("{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}{{ tools }}", ["custom_tools"]),
        ("{% for tag in tags %}{{ tag }}{% endfor %}{{ tag }}", ["tags"]),
        (QWEN, ["enable_thinking"]),
    ],
    ids=["set in branches", "extended", "default", "default of itself", "tools", "loop", "qwen"],
)
def test_variables_that_a_template_sets_before_it_reads_them_are_no_switches(source, switches):
    template = ChatTemplate(source, {})
    assert template.switches == switches
    assert ("tools" in source) <= ("tools" in template.variables)


def test_a_templates_own_variable_is_neither_offered_nor_taken(start):
    own = "{% if messages[0].role == 'tool' %}{% set content = '' %}{% endif %}{{ content }}"
    server = start(QWEN + own)
    server.script.plan([2])
    answer = server.http.post("/v1/chat/completions", json=ASK | {"chat_template_kwargs": {"content": "x"}}).json()
    (warning,) = answer["warnings"]
    assert warning["param"] == "chat_template_kwargs.content" and server.prompt() == HEAD + TURN
    assert warning["message"].endswith("What it knows: `enable_thinking`.")
