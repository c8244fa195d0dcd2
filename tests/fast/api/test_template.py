"""Requests and settings pass only permitted arguments to the chat template."""

import threading
from itertools import product

import pytest

from app.api.shares import NUM_THREADS
from app.text import sandbox
from tests.fast.api.served import until
from tests.fast.api.templates import ASK, HEAD, HELLO, NO_THINKING, QWEN, TURN, prompt_of, refusal

SERVED = {"template": QWEN}
ANOTHER_CLIENT = {"X-Forwarded-For": "192.0.2.7"}


@pytest.mark.parametrize(
    ("kwargs", "end"),
    [(None, TURN), ({}, TURN), ({"enable_thinking": True}, TURN), ({"enable_thinking": False}, TURN + NO_THINKING)],
)
def test_chat_template_kwargs_reach_the_template(server, kwargs, end):
    assert prompt_of(server, chat_template_kwargs=kwargs) == HEAD + end


@pytest.mark.parametrize("name", ["thinking", "enable_thinkin", "messages", "tools", "add_generation_prompt", "ns"])
def test_a_name_that_the_template_does_not_know_is_warned_of_with_those_it_knows(server, name):
    server.script.plan([2])
    answer = server.http.post("/v1/chat/completions", json=ASK | {"chat_template_kwargs": {name: "on"}}).json()
    assert server.prompt() == HEAD + TURN
    (warning,) = answer["warnings"]
    assert (warning["param"], warning["code"]) == (f"chat_template_kwargs.{name}", "unknown_template_kwarg")
    assert "`enable_thinking`" in warning["message"] and f"`{name}`" in warning["message"]


def test_an_answer_has_few_warnings_of_names_that_the_template_does_not_know(server):
    server.script.plan([2])
    answer = server.http.post(
        "/v1/chat/completions", json=ASK | {"chat_template_kwargs": {f"{'x' * 9000}{i}": 1 for i in range(99)}}
    )
    assert len(answer.json()["warnings"]) == 16 and len(answer.text) < 16 * 500


@pytest.mark.parametrize("value", [None, False])
@pytest.mark.parametrize("name", ["thinking", "messages", "add_generation_prompt", "namespace", "bos_token"])
def test_an_unknown_name_that_says_nothing_changes_nothing(server, name, value):
    assert prompt_of(server, chat_template_kwargs={name: value}) == HEAD + TURN


def test_what_the_server_says_to_the_template_holds_until_a_request_says_otherwise(start):
    server = start(default_chat_template_kwargs={"enable_thinking": False})
    assert prompt_of(server) == HEAD + TURN + NO_THINKING
    assert prompt_of(server, chat_template_kwargs={}) == HEAD + TURN + NO_THINKING
    assert prompt_of(server, chat_template_kwargs={"enable_thinking": None}) == HEAD + TURN + NO_THINKING
    assert prompt_of(server, chat_template_kwargs={"enable_thinking": False}) == HEAD + TURN + NO_THINKING
    assert prompt_of(server, chat_template_kwargs={"enable_thinking": True}) == HEAD + TURN


def test_a_servers_own_name_that_the_template_does_not_know_refuses_no_request(start):
    assert prompt_of(start(default_chat_template_kwargs={"thinking": True})) == HEAD + TURN


@pytest.mark.parametrize(("value", "end"), [(True, TURN), (None, TURN), (False, "")])
def test_the_assistants_turn_is_opened_unless_add_generation_prompt_is_false(server, value, end):
    assert prompt_of(server, add_generation_prompt=value) == HEAD + end


SAME = {"role": "assistant", "content": "same"}
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        *(
            ({"content": text}, text)
            for text in ("Once upon a", "Once upon a ", "a\n", " ", "<|im_end|>", "é漢", "</think>")
        ),
        ({"content": PARTS}, "one\ntwo "),
        ({"content": "So ", "reasoning_content": "hm"}, "<think>\nhm\n</think>\n\nSo "),
        (SAME, "same"),
    ],
    ids=str,
)
@pytest.mark.parametrize("add_generation_prompt", [None, False])
def test_a_continued_message_ends_the_prompt_exactly(server, fields, end, add_generation_prompt):
    """Only the final one is continued, although an earlier one may read the same."""
    options = {"continue_final_message": True, "add_generation_prompt": add_generation_prompt}
    prompt = prompt_of(server, messages=[SAME, HELLO, {"role": "assistant"} | fields], **options)
    assert prompt == f"{TURN}same<|im_end|>\n{HEAD}{TURN}{end}"


def test_the_answer_to_a_continued_message_is_what_is_new(server):
    server.script.plan([*server.bytes(" time"), 2])
    answer = server.openai.chat.completions.create(
        model="tiny",
        messages=[HELLO, {"role": "assistant", "content": "Once upon a"}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert answer.choices[0].message.content == " time"


@pytest.mark.parametrize(
    "last",
    [
        HELLO,
        {"role": "system", "content": "x"},
        {"role": "tool", "content": "x", "tool_call_id": "a"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ],
    ids=["user", "system", "tool", "empty", "called"],
)
def test_only_an_assistants_text_can_be_continued(server, last):
    error = refusal(server, messages=[HELLO, last], continue_final_message=True)
    assert error["param"] == "continue_final_message"
    assert "assistant" in error["message"]


def test_a_message_cannot_be_continued_and_a_new_one_opened(server):
    messages = [HELLO, {"role": "assistant", "content": "x"}]
    error = refusal(server, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"
    assert "add_generation_prompt" in error["message"]


def test_a_template_that_leaves_the_final_message_out_cannot_continue_it(start):
    server = start("{{ messages[0].content }}")
    messages = [HELLO, {"role": "assistant", "content": "x"}]
    assert "cannot be continued" in refusal(server, messages=messages, continue_final_message=True)["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *product(("add_generation_prompt", "continue_final_message"), ("yes", 1)),
        *product(("chat_template_kwargs",), ("no", 5, [True])),
    ],
)
def test_switches_are_true_or_false_and_arguments_are_an_object(server, field, value):
    assert refusal(server, **{field: value})["param"] == field


def test_a_template_that_never_ends_delays_no_other_request(start, background, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(sandbox, "time", clock)
    server = start("{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}")
    clock.readers.clear()  # this thread has compiled the template
    asked = [background.submit(refusal, server) for _ in range(NUM_THREADS // 2)]  # the share of one client
    until(lambda: len(clock.readers) == len(asked))
    elsewhere = background.submit(server.http.post, "/tokenize", json={"prompt": "hi"}, headers=ANOTHER_CLIENT)
    assert elsewhere.result().status_code == 200
    for _ in range(5):
        assert server.http.get("/live").status_code == 200
    assert not any(one.done() for one in asked)
    clock.now = sandbox.MAX_SECONDS + 0.1
    assert all("longer than 5 s" in one.result()["message"] for one in asked)


class Clock:
    """Stands still until the test moves it on, and knows which threads have looked at it."""

    def __init__(self):
        self.now = 0.0
        self.readers = set()

    def monotonic(self):
        self.readers.add(threading.get_ident())
        return self.now
