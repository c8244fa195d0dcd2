"""Reasoning is separated from the answer, streamed or whole, if the model or the template opens it."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from app.api.services import Services
from app.config.settings import Config
from tests.fast.api.served import CHATML, Server
from tests.fast.api.templates import CALL, HEAD, HELLO, NO_THINKING, QWEN, TURN, WEATHER, prompt_of, serving_template

ASK = {"model": "tiny", "messages": [HELLO]}
OPENS = QWEN.replace(
    "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable",
    "{{- '<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable",
)
"""Opens the reasoning itself, as Qwen3's thinking models do."""
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def shared_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("reasoning") / "qwen"
    with serving_template(model_folder, folder, reasoning_parser="qwen3", tool_call_parser="qwen3") as server:
        yield server


@pytest.fixture(scope="module")
def opening_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose template opens the reasoning itself."""
    with serving_template(
        model_folder, tmp_path_factory.mktemp("opens") / "qwen", OPENS, reasoning_parser="qwen3"
    ) as server:
        yield server


def plan(server: Server, text: str, seed: int) -> None:
    """The engine answers with `text`, a token a byte, in steps of random sizes."""
    ids = [*server.bytes(text), 2]
    random = Random(seed)
    cuts = sorted(random.sample(range(1, len(ids)), k=random.randrange(len(ids))))
    server.script.plan(*[ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])])


def whole(server: Server, **fields: Any) -> tuple[str | None, str | None, str]:
    """Reasoning, content and the reason for the end."""
    response = server.http.post("/v1/chat/completions", json=ASK | fields)
    (choice,) = response.json()["choices"]
    message = choice["message"]
    return message.get("reasoning_content"), message["content"], choice["finish_reason"]


def streamed(server: Server, **fields: Any) -> tuple[str | None, str, str]:
    """The same, put together from the chunks."""
    reasoning, content, reasons = "", "", []
    with server.openai.chat.completions.create(**ASK, extra_body=fields, stream=True) as chunks:
        for chunk in chunks:
            (choice,) = chunk.choices
            thought = getattr(choice.delta, "reasoning_content", None) or ""
            assert not (thought and content), "the answer came before its reasoning"
            reasoning += thought
            content += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    (reason,) = reasons
    return reasoning or None, content, reason


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("output", "reasoning", "content"),
    [
        ("<think>\nhm, 漢字\n\nso\n</think>\n\nIt is 5 < 6.\n", "hm, 漢字\n\nso", "It is 5 < 6.\n"),
        ("<think>hm</think>5", "hm", "5"),
        ("\n<think>\n\n</think>\n\nShort.", None, "Short."),
        ("No thoughts, 漢字.", None, "No thoughts, 漢字."),
        ("Tags: <think>not thought</think>.", None, "Tags: <think>not thought</think>."),
        ("<think>a </thin b <think> c</think>d</think>e", "a </thin b <think> c", "d</think>e"),
        ("<think>never closed", "never closed", ""),
        ("<think>", None, ""),
        ("<thi", None, "<thi"),
    ],
    ids=["thoughts", "tight", "empty", "none", "later", "nested", "open", "tag", "half a tag"],
)
def test_reasoning_is_split_off_alike_streamed_or_whole(server, output, reasoning, content, seed):
    plan(server, output, 2 * seed)
    assert whole(server) == (reasoning, content, "stop")
    plan(server, output, 2 * seed + 1)
    assert streamed(server) == (reasoning, content, "stop")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("output", "reasoning", "content"),
    [
        ("hm\n</think>\n\nSo.", "hm", "So."),
        ("<think>\nhm\n</think>\n\nSo.", "hm", "So."),
        ("\n</think>\n\nSo.", None, "So."),
        ("never closed", "never closed", ""),
    ],
    ids=["opened", "opened twice", "empty", "never closed"],
)
def test_a_template_may_open_the_reasoning_itself(opening_server, output, reasoning, content, seed):
    plan(opening_server, output, 2 * seed)
    assert whole(opening_server) == (reasoning, content, "stop")
    plan(opening_server, output, 2 * seed + 1)
    assert streamed(opening_server) == (reasoning, content, "stop")
    assert prompt_of(opening_server) == f"{HEAD}{TURN}<think>\n"


def test_a_users_own_tag_opens_nothing(server):
    for messages in ([HELLO | {"content": "what is <think>"}], [HELLO | {"content": "<think>"}]):
        plan(server, "A tag.", 0)
        assert whole(server, messages=messages, add_generation_prompt=False) == (None, "A tag.", "stop")
        assert whole(server, messages=messages) == (None, "A tag.", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_without_thinking_the_prompt_closes_the_reasoning_and_all_is_content(server, stream):
    plan(server, "It is </think> 5.", 3)
    assert (streamed if stream else whole)(server, **NO_THOUGHTS) == (None, "It is </think> 5.", "stop")
    prompt = server.tokenizer.decode(server.script.see("Submit")["token_ids"], skip_special_tokens=False)
    assert prompt == HEAD + TURN + NO_THINKING


@pytest.mark.parametrize("stream", [False, True])
def test_separate_reasoning_false_leaves_all_in_the_content(server, stream):
    output = "<think>\nhm\n</think>\n\nSo."
    plan(server, output, 3)
    assert (streamed if stream else whole)(server, separate_reasoning=False) == (None, output, "stop")


@pytest.mark.parametrize("value", [True, None])
def test_separate_reasoning_true_is_what_happens_anyway(server, value):
    plan(server, "<think>hm</think>So.", 3)
    assert whole(server, separate_reasoning=value) == ("hm", "So.", "stop")


def test_separate_reasoning_is_true_or_false(server):
    response = server.http.post("/v1/chat/completions", json=ASK | {"separate_reasoning": "no"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "separate_reasoning")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", [QWEN, OPENS], ids=["qwen", "opens"])
def test_with_the_parser_off_all_is_content(start, template, stream):
    server = start(template)
    plan(server, "<think>\nhm\n</think>\n\nSo.", 3)
    assert (streamed if stream else whole)(server) == (None, "<think>\nhm\n</think>\n\nSo.", "stop")


@pytest.mark.parametrize(
    ("said", "template", "on"),
    [("auto", QWEN, True), ("auto", CHATML, False), ("none", QWEN, False), ("deepseek_r1", CHATML, True)],
)
def test_the_parser_is_chosen_by_its_setting_or_from_the_template(model_folder, tmp_path, said, template, on):
    with serving_template(model_folder, tmp_path / "own", template) as server:
        config = Config(reasoning_parser=said)
        services = Services(config, server.engine, server.tokenizer, server.metrics)
        assert (services.reasoning_parser is not None) is on


def test_reasoning_that_is_sent_back_is_accepted_and_left_to_the_template(server):
    said = {"role": "assistant", "content": "5.", "reasoning_content": "2 + 3"}
    prompt = prompt_of(server, messages=[HELLO, said, HELLO])
    assert prompt == f"{HEAD}{TURN}<think>\n2 + 3\n</think>\n\n5.<|im_end|>\n{HEAD}{TURN}"


@pytest.mark.parametrize("output", ["<think>hm</think>So.", "<think>never closed", "So."])
def test_the_sdks_own_message_can_be_sent_back_as_it_is(server, output):
    plan(server, output, 0)
    message = server.openai.chat.completions.create(**ASK).choices[0].message
    for sent in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        server.script.plan([2])
        assert server.openai.chat.completions.create(model="tiny", messages=[HELLO, sent, HELLO]).choices


@pytest.mark.parametrize(
    ("begun", "output", "reasoning", "content"),
    [
        ("<think>\n2 + 3", " is 5\n</think>\n\nFive.", "is 5", "Five."),
        ("<think>\n2 + 3\n</think>\n\nIt", " is </think> 5.", None, " is </think> 5."),
        ("It", " is 5.", None, " is 5."),
    ],
    ids=["in reasoning", "behind reasoning", "no reasoning"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_continued_message_goes_on_where_it_stopped(server, begun, output, reasoning, content, stream):
    plan(server, output, 3)
    messages = [HELLO, {"role": "assistant", "content": begun}]
    answer = (streamed if stream else whole)(server, messages=messages, continue_final_message=True)
    assert answer == (reasoning, content, "stop")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("stop", "reasoning", "content", "counted"),
    [
        ("so far", "one and", "", len("<think>one and so far")),
        (["nothing", "e</th"], "one and so far, fin", "", len("<think>one and so far, fine</th")),
        ("done", "one and so far, fine", "It is ", len("<think>one and so far, fine</think>It is done")),
    ],
)
def test_stop_strings_end_reasoning_as_they_end_content(server, stop, reasoning, content, counted, seed):
    output = "<think>one and so far, fine</think>It is done."
    plan(server, output, seed)
    response = server.http.post("/v1/chat/completions", json=ASK | {"stop": stop})
    assert response.json()["usage"]["completion_tokens"] == counted
    assert whole(server, stop=stop) == (reasoning, content, "stop")
    assert streamed(server, stop=stop) == (reasoning, content, "stop")


def test_usage_counts_every_token_reasoning_and_tags_too(server):
    output = "<think>\nhm\n</think>\n\nSo."
    plan(server, output, 0)
    answer = server.openai.chat.completions.create(**ASK)
    with server.openai.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}) as stream:
        *_, last = stream
    assert answer.usage.completion_tokens == last.usage.completion_tokens == len(output) + 1


def test_the_limit_may_fall_into_the_reasoning(server):
    plan(server, "<think>one and so far", 0)
    assert whole(server, max_tokens=len("<think>one")) == ("one", "", "length")
    assert streamed(server, max_tokens=len("<think>one")) == ("one", "", "length")


@pytest.mark.parametrize("seed", range(4))
def test_calls_are_taken_from_the_answer_and_never_from_the_reasoning(server, seed):
    plan(server, f"<think>\nmaybe {CALL}?\n</think>\n\n{CALL}", seed)
    fields = {"tools": [WEATHER]}
    assert whole(server, **fields) == (f"maybe {CALL}?", None, "tool_calls")
    assert streamed(server, **fields) == (f"maybe {CALL}?", "", "tool_calls")


def test_bare_completions_are_text_even_if_it_reads_like_reasoning(server):
    plan(server, "<think>hm</think>So.", 0)
    answer = server.openai.completions.create(model="tiny", prompt="x", max_tokens=400)
    assert answer.choices[0].text == "<think>hm</think>So."
