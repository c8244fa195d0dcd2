"""Fields that turn thinking on and off, and the one that leaves reasoning out of an answer."""

import pytest

from tests.fast.api.served import CHATML
from tests.fast.api.templates import ASK, HEAD, HELLO, NO_THINKING, QWEN, TURN, prompt_of, refusal

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
OFF = [{"reasoning_effort": "none"}, {"enable_thinking": False}]
ON = [{"reasoning_effort": "low"}, {"enable_thinking": True}]
KWARGS = "chat_template_kwargs"
SERVED = {"template": QWEN, "reasoning_parser": "qwen3"}


@pytest.mark.parametrize("fields", OFF, ids=str)
def test_thinking_is_turned_off(server, fields):
    assert prompt_of(server, **fields) == HEAD + TURN + NO_THINKING
    assert prompt_of(server, **fields, **{KWARGS: {"enable_thinking": False}}) == HEAD + TURN + NO_THINKING
    sent = server.http.post("/tokenize", json={"messages": [HELLO]} | fields).json()
    assert server.tokenizer.decode(sent["tokens"], skip_special_tokens=False) == HEAD + TURN + NO_THINKING


@pytest.mark.parametrize("fields", [*ON, *({"reasoning_effort": effort} for effort in EFFORTS)], ids=str)
def test_thinking_is_turned_on_although_the_server_turns_it_off(start, fields):
    server = start(default_chat_template_kwargs={"enable_thinking": False})
    assert prompt_of(server, **fields) == HEAD + TURN
    assert prompt_of(server, reasoning_effort=None, enable_thinking=None) == HEAD + TURN + NO_THINKING


@pytest.mark.parametrize("effort", ["none", "high"])
def test_responses_have_the_effort_too(server, effort):
    server.script.plan([2])
    answer = server.http.post("/v1/responses", json={"input": "hello", "reasoning": {"effort": effort}})
    assert answer.status_code == 200, answer.text
    prompt = server.prompt()
    assert prompt == HEAD + TURN + (NO_THINKING if effort == "none" else "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "none", KWARGS: {"enable_thinking": True}}, "reasoning_effort"),
        ({"enable_thinking": False, KWARGS: {"enable_thinking": True}}, "enable_thinking"),
        ({"enable_thinking": True, KWARGS: {"enable_thinking": False}}, f"{KWARGS}.enable_thinking"),
        ({"reasoning_effort": "high", KWARGS: {"enable_thinking": False}}, f"{KWARGS}.enable_thinking"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "reasoning_effort"),
        ({"reasoning_effort": "high", "enable_thinking": False}, "enable_thinking"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"include_reasoning": "no"}, "include_reasoning"),
        ({"separate_reasoning": "no"}, "separate_reasoning"),
        ({"include_reasoning": False, "separate_reasoning": False}, "include_reasoning"),
    ],
    ids=str,
)
def test_fields_that_differ_or_mean_nothing_are_refused(server, fields, param):
    assert refusal(server, **fields)["param"] == param


ALWAYS_THINKS = CHATML + "<think>\n"
"""A template that opens reasoning, and has no switch."""
SAID = {KWARGS: {"enable_thinking": False}}, {KWARGS: {"enable_thinking": True}}


def warned(server, path="/v1/chat/completions", **fields):
    """Return the codes and fields of an answer's warnings."""
    server.script.plan([2])
    answer = server.http.post(path, json=(ASK if "chat" in path else {"input": "hello"}) | fields)
    assert answer.status_code == 200, answer.text
    return [(warning["code"], warning["param"]) for warning in answer.json().get("warnings", [])]


@pytest.mark.parametrize(
    "fields", [*OFF, SAID[0], *({"enable_thinking": None}, {KWARGS: {"thinking": False}})], ids=str
)
def test_on_a_model_that_never_thinks_what_asks_for_nothing_passes_in_each_form(start, fields):
    server = start(CHATML)
    assert warned(server, **fields) == []
    if "reasoning_effort" in fields:
        assert warned(server, "/v1/responses", reasoning={"effort": fields["reasoning_effort"]}) == []


@pytest.mark.parametrize("template", [CHATML, ALWAYS_THINKS], ids=["never", "always"])
@pytest.mark.parametrize("fields", [*ON, SAID[1], {"reasoning_effort": "max"}], ids=str)
def test_thinking_that_a_template_cannot_switch_is_answered_with_a_warning(start, template, fields):
    server = start(template)
    (param,) = fields
    param += ".enable_thinking" if param == KWARGS else ""
    assert warned(server, **fields) == [("thinking_not_switched", param)]
    if "reasoning_effort" in fields:
        given = {"reasoning": {"effort": fields["reasoning_effort"]}}
        assert warned(server, "/v1/responses", **given) == [("thinking_not_switched", "reasoning.effort")]


@pytest.mark.parametrize("fields", [*OFF, SAID[0]], ids=str)
def test_a_model_that_always_thinks_is_not_asked_to_stop(start, fields):
    server = start(ALWAYS_THINKS)
    (param,) = fields
    error = refusal(server, **fields)
    param += ".enable_thinking" if param == KWARGS else ""
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")


@pytest.mark.parametrize("fields", [*ON, SAID[1], {"include_reasoning": False}], ids=str)
def test_a_bare_prompt_has_no_fields_of_thinking(start, fields):
    (param,) = fields
    bare = start(CHATML).http.post("/v1/completions", json={"prompt": "a"} | fields)
    assert (bare.status_code, bare.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("fields", [*OFF, SAID[0]], ids=str)
def test_nothing_thinks_after_a_bare_prompt_so_what_turns_thinking_off_passes(start, fields):
    server = start(CHATML)
    server.script.plan([2])
    bare = server.http.post("/v1/completions", json={"prompt": "a"} | fields)
    assert bare.status_code == 200 and "warnings" not in bare.json(), bare.text


def test_reasoning_can_be_left_out_where_there_is_none_and_not_where_nobody_parses_it(start):
    assert warned(start(CHATML), include_reasoning=False) == []
    server = start(ALWAYS_THINKS, reasoning_parser="none")
    assert refusal(server, include_reasoning=False)["param"] == "include_reasoning"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_reasoning_is_left_out_and_counted(server, include, stream):
    server.script.plan(server.bytes("<think>hm"), [*server.bytes("</think>So."), 2])
    body = ASK | {"include_reasoning": include, "stream": stream}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert ("hm" in answer.text) is include
    assert "So" in answer.text
    if not stream:
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"] == "So."
        assert answer.json()["usage"]["completion_tokens"] == len("<think>hm</think>So.") + 1


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("opening", ["<think>", " <think>", ""])
def test_steps_show_no_tokens_of_hidden_reasoning(server, include, opening):
    reasoning = f"{opening}hm, 2 < 3</think>" if opening else ""
    ids = [*server.bytes(f"{reasoning}They are."), 2]
    server.script.plan(ids[:3], ids[3:5], ids[5:])
    body = ASK | {"include_reasoning": include, "stream_options": {"include_speculation": True}}
    choices = [choice for chunk in server.chunks("/v1/chat/completions", body) for choice in chunk["choices"]]
    steps = [step for choice in choices for step in choice.get("speculation", {}).get("steps", [])]
    assert [len(step["tokens"]) for step in steps] == [3, 2, len(ids) - 5]
    shown = "".join(token for step in steps for token in step["tokens"])
    assert shown == (f"{reasoning}They are." if include else "They are.")
