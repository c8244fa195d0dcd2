"""System and developer messages may stand anywhere, and several of them, whatever the chat template takes."""

from typing import Any

import pytest

from app.text import sandbox
from tests.fast.api.errors import error_of
from tests.fast.api.served import CHATML, Clock
from tests.fast.api.templates import HELLO, Start, refusal

FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + CHATML
)
"""Refuses as Qwen3.5's does."""
NONE_AT_ALL = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system, at ' ~ loop.index) }}"
    "{% endif %}{% endfor %}" + CHATML
)
LAST_ONLY = (
    "{% set ns = namespace(said='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.said = m.content | trim %}{% endif %}{% endfor %}{{ ns.said ~ '\n' }}"
    "{% for m in messages if m.role != 'system' %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
)
"""Leaves the others out, as that of DeepSeek-R1's distilled models does."""
KIND, BRIEF = {"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Be brief."}
EMPTY = {"role": "system", "content": ""}
HI = {"role": "assistant", "content": "hi"}
JOINED = "<|im_start|>system\nBe kind.\n\nBe brief.<|im_end|>\n"
SERVED = {"template": FIRST_ONLY}


def written(*messages: dict[str, str]) -> str:
    roles = {"developer": "system"}
    texts = (f"<|im_start|>{roles.get(m['role'], m['role'])}\n{m['content']}<|im_end|>\n" for m in messages)
    return "".join(texts)


@pytest.mark.parametrize(
    ("messages", "others", "moved"),
    [
        ([KIND, BRIEF, HELLO], [HELLO], "messages.1"),
        ([KIND, HELLO, BRIEF], [HELLO], "messages.2"),
        ([KIND, HELLO, HI, BRIEF, HELLO], [HELLO, HI, HELLO], "messages.3"),
        ([HELLO, KIND, HI, BRIEF], [HELLO, HI], "messages.1"),
        ([EMPTY, KIND, HELLO, EMPTY, BRIEF], [HELLO], "messages.1"),
        ([KIND, BRIEF], [], "messages.1"),
    ],
    ids=["two", "late", "middle", "none first", "empty", "alone"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_those_that_the_template_refuses_are_joined_as_the_first_and_the_answer_says_so(
    server, messages, others, moved, stream
):
    server.script.plan([2])
    if stream:
        *_, last = server.chunks("/v1/chat/completions", {"messages": messages})
    else:
        last = server.http.post("/v1/chat/completions", json={"messages": messages}).json()
    (warning,) = last["warnings"]
    assert (warning["code"], warning["param"]) == ("system_messages_joined", moved)
    prompt = server.prompt()
    assert prompt == JOINED + written(*others) + "<|im_start|>assistant\n"
    for path in ("/tokenize", "/v1/chat/completions/render"):
        found = server.http.post(path, json={"messages": messages}).json()
        ids = found.get("tokens") or found["token_ids"]
        assert server.tokenizer.decode(ids, skip_special_tokens=False) == prompt
        assert found["warnings"] == last["warnings"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "moved"),
    [
        ({"instructions": "Be kind.", "input": [BRIEF, HELLO]}, "input.0"),
        ({"instructions": "Be kind.", "input": [HELLO, BRIEF]}, "input.1"),
        ({"input": [KIND, HELLO, BRIEF]}, "input.2"),
        ({"input": [HELLO, KIND, BRIEF]}, "input.1"),
    ],
    ids=["instructions", "late", "items", "none first"],
)
def test_instructions_of_a_response_are_joined_with_the_items_after_them(server, fields, moved, stream):
    server.script.plan([2])
    if stream:
        answer = server.chunks("/v1/responses", fields)[-1]["response"]
    else:
        answer = server.http.post("/v1/responses", json=fields).json()
    assert [(warning["code"], warning["param"]) for warning in answer["warnings"]] == [
        ("system_messages_joined", moved)
    ]
    prompt = server.prompt()
    assert prompt == JOINED + written(HELLO) + "<|im_start|>assistant\n"


def test_a_continued_answer_still_ends_the_prompt(server):
    server.script.plan([2])
    fields = {"messages": [KIND, HELLO, BRIEF, HI], "continue_final_message": True}
    assert server.http.post("/v1/chat/completions", json=fields).status_code == 200
    prompt = server.prompt()
    assert prompt == JOINED + written(HELLO) + "<|im_start|>assistant\nhi"


def test_where_the_template_takes_them_nothing_is_moved(start: Start) -> None:
    server = start(CHATML)
    messages = [KIND, HELLO, BRIEF]
    answer = server.http.post("/v1/chat/completions", json={"messages": messages}).json()
    assert "warnings" not in answer
    prompt = server.prompt()
    assert prompt == written(*messages) + "<|im_start|>assistant\n"


@pytest.mark.parametrize("messages", [[KIND, BRIEF, HELLO], [KIND, HELLO, BRIEF]], ids=["two", "late"])
def test_those_that_the_template_would_leave_out_are_joined_too(start: Start, messages: list[dict[str, str]]) -> None:
    server = start(LAST_ONLY)
    answer = server.http.post("/v1/chat/completions", json={"messages": messages}).json()
    assert [warning["code"] for warning in answer["warnings"]] == ["system_messages_joined"]
    prompt = server.prompt()
    assert prompt == "Be kind.\n\nBe brief.\nuser: hello\n"
    server.http.post("/v1/chat/completions", json={"messages": [KIND, HELLO, KIND]})
    assert server.prompt() == "Be kind.\n\nBe kind.\nuser: hello\n", "one that is said twice too"


@pytest.mark.parametrize(
    ("changed", "prompt"),
    [("m.content | upper", "BE KIND. .HELLO.BE BRIEF.."), ("m.content | trim", "Be kind..hello.Be brief..")],
)
def test_those_that_the_template_changes_stay_where_they_are(start: Start, changed: str, prompt: str) -> None:
    server = start(f"{{% for m in messages %}}{{{{ {changed} }}}}.{{% endfor %}}")
    messages = [KIND | {"content": "Be kind. "}, HELLO, BRIEF]
    answer = server.http.post("/v1/chat/completions", json={"messages": messages}).json()
    assert "warnings" not in answer and server.prompt() == prompt


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize", "/v1/chat/completions/render"])
def test_the_error_is_the_first_if_the_template_refuses_them_joined_too(start: Start, path: str) -> None:
    server = start(NONE_AT_ALL)
    field = "input" if path == "/v1/responses" else "messages"
    error = error_of(server.http.post(path, json={field: [HELLO, KIND]}), 400)
    assert error["param"] == field and "no system, at 2" in error["message"]
    assert "no system, at 1" in error_of(server.http.post(path, json={field: [KIND, HELLO]}), 400)["message"]


def test_both_renderings_have_the_time_of_one(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first takes all of it, so the second, which would pass, has none left."""
    clock = Clock()
    monkeypatch.setattr(sandbox, "time", clock)
    server = start(FIRST_ONLY)
    template = server.tokenizer.chat_template
    render = template._render

    def slow(messages: Any, **options: Any) -> str:
        try:
            return render(messages, **options)
        finally:
            clock.now += sandbox.MAX_SECONDS + 0.1

    monkeypatch.setattr(template, "_render", slow)
    assert "must be at the beginning" in refusal(server, messages=[KIND, HELLO, BRIEF])["message"]
    monkeypatch.setattr(template, "_render", render)
    server.script.plan([2])
    assert server.http.post("/v1/chat/completions", json={"messages": [KIND, HELLO, BRIEF]}).status_code == 200
