"""Bare prompts, as text or token ids, to their continuations."""

import asyncio
from typing import Any

import pytest

from tests.fast.api.errors import error_of

ASK = {"model": "tiny"}


def answers(server, stream, **fields):
    """The texts of all answers in order, their reasons, and the usage."""
    if not stream:
        answer = server.openai.completions.create(**ASK, **fields)
        return [c.text for c in answer.choices], [c.finish_reason for c in answer.choices], answer.usage
    texts, reasons = {}, {}
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    with server.openai.completions.create(**ASK, **fields) as chunks:
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
    return [texts[i] for i in sorted(texts)], [reasons[i] for i in sorted(reasons)], chunk.usage


@pytest.mark.parametrize("as_ids", [False, True])
def test_prompt_may_be_text_or_token_ids(server, as_ids):
    ids = server.ids("hello world")
    server.script.plan(server.ids(" again"), [2])
    answer = server.openai.completions.create(**ASK, prompt=ids if as_ids else "hello world")
    submit = server.script.see("Submit")
    assert submit["token_ids"] == ids
    assert submit["max_tokens"] == 16
    assert answer.choices[0].text == " again"
    assert answer.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_list_of_prompts_gets_an_answer_each_in_its_own_order(server, background, as_ids, stream):
    prompts = ["hello", "world", "fox"]
    sent = [server.ids(p) for p in prompts] if as_ids else prompts

    def answer_in_reverse():
        submits = [server.script.see("Submit") for _ in prompts]
        for submit in reversed(submits):
            server.script.emit(submit["request_id"], submit["token_ids"])
            server.script.emit(submit["request_id"], [2])

    done = background.submit(answer_in_reverse)
    texts, _, usage = answers(server, stream, prompt=sent)
    tokens = sum(len(server.ids(p)) for p in prompts)
    assert (usage.prompt_tokens, usage.completion_tokens) == (tokens, tokens + 3)
    done.result()
    assert texts == prompts


def test_stream_equals_non_stream_and_counts_the_same(server):
    ids = server.bytes("漢字 and more")
    server.script.plan(ids[:2], ids[2:5], ids[5:])
    whole = answers(server, False, prompt="x", max_tokens=len(ids))
    assert whole == answers(server, True, prompt="x", max_tokens=len(ids))
    assert whole[:2] == (["漢字 and more"], ["length"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "expected", "counted"),
    [("o wo", "hell", 8), (["zzz", "rld"], "hello wo", 11), ("h", "", 1), ("d!", "hello worl", 12), ("xyz", None, 15)],
)
@pytest.mark.parametrize("width", [1, 3, 15])
def test_stop_strings_are_cut_exactly_across_tokens_and_steps(server, stream, stop, expected, counted, width):
    words = "hello world! x"
    ids = [*server.bytes(words), 2]
    server.script.plan(*[ids[i : i + width] for i in range(0, len(ids), width)])
    texts, reasons, usage = answers(server, stream, prompt="p", stop=stop, max_tokens=40)
    assert (texts, reasons) == ([words if expected is None else expected], ["stop"])
    assert usage.completion_tokens == counted


@pytest.mark.parametrize("stream", [False, True])
def test_a_matched_stop_string_aborts_its_choice_at_once_while_others_go_on(server, background, stream):
    before = server.metric("request_success_total", finished_reason="stop")
    asked = {"prompt": ["p", "q"], "stop": "lo w", "stream": stream}
    running = background.submit(lambda: server.http.post("/v1/completions", json=asked))
    first, second = (server.script.see("Submit")["request_id"] for _ in range(2))
    server.script.emit(first, server.bytes("hello world"))
    assert server.script.see("Abort")["request_id"] == first
    server.until_metric("request_success_total", before + 1, finished_reason="stop")
    server.script.emit(second, [*server.bytes("fine"), 2])
    assert "fine" in running.result().text


def test_a_stop_string_is_never_leaked_in_a_stream(server, background):
    def play():
        request_id = server.script.see("Submit")["request_id"]
        for letter in "abENabEND more":
            server.script.emit(request_id, server.bytes(letter))

    playing = background.submit(play)
    with server.openai.completions.create(**ASK, prompt="p", stop="END", stream=True) as chunks:
        pieces = [chunk.choices[0].text for chunk in chunks]
    playing.result()
    assert "".join(pieces) == "abENab"
    assert not any(piece.endswith("E") for piece in pieces)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("prompts", [["hello world"], ["naïve 漢字 ", "<|im_start|>x", "fox"]])
def test_echo_says_the_prompt_before_the_answer(server, prompts, as_ids, stream):
    server.script.plan(server.ids(" and"), [*server.ids(" on"), 2])
    sent = [server.ids(prompt) for prompt in prompts] if as_ids else prompts
    texts, reasons, usage = answers(server, stream, prompt=sent if len(sent) > 1 else sent[0], echo=True)
    assert texts == [f"{prompt} and on" for prompt in prompts]
    assert reasons == ["stop"] * len(prompts)
    assert usage.prompt_tokens == sum(len(server.ids(prompt)) for prompt in prompts)
    assert usage.completion_tokens == len(prompts) * (len(server.ids(" and") + server.ids(" on")) + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_looked_for_in_the_answer_alone_and_not_in_the_echo(server, stream):
    server.script.plan(server.bytes("END of it"), [2])
    assert answers(server, stream, prompt="the E", stop=["ND", "the"], echo=True)[0] == ["the EE"]


def test_an_echo_is_decoded_off_the_event_loop_and_before_anything_is_submitted(server, monkeypatch):
    """A prompt of ids that cannot be decoded leaves no request of the engine, and a long one blocks no other."""
    loops = []

    def fails(*ids: Any, **named: Any) -> str:
        loops.append(asyncio._get_running_loop())
        raise RuntimeError("no such text")

    monkeypatch.setattr(server.tokenizer, "decode", fails)
    response = server.http.post("/v1/completions", json=ASK | {"prompt": [5, 6], "echo": True})
    assert (response.status_code, loops) == (500, [None])
    assert server.engine.num_running == server.engine.admission.num_in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("width", [1, 3, 15])
@pytest.mark.parametrize(
    ("stop", "expected"), [("o wo", "hello wo"), (["zzz", "rld", "d"], "hello world"), ("h", "h"), ("d! x", None)]
)
def test_the_stop_string_is_kept_whole_and_nothing_behind_it_if_that_is_asked_for(
    server, stop, expected, width, stream
):
    words = "hello world! and"
    ids = [*server.bytes(words), 2]
    server.script.plan(*[ids[i : i + width] for i in range(0, len(ids), width)])
    fields = {"prompt": "p", "max_tokens": 40, "stop": stop, "extra_body": {"include_stop_str_in_output": True}}
    texts, reasons, usage = answers(server, stream, **fields)
    assert (texts, reasons) == ([expected or words], ["stop"])
    assert usage.completion_tokens == (len(ids) if expected is None else len(expected))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "on "),
        ({"include_stop_str_in_output": True}, "on x"),
        ({"include_stop_str_in_output": False}, "on "),
        ({"skip_special_tokens": False}, "on "),
    ],
)
def test_a_stop_token_is_counted_and_part_of_the_text_only_if_that_is_asked_for(server, fields, expected, stream):
    (x,) = server.bytes("x")
    server.script.plan([*server.ids("on "), x, *server.ids("more")])
    texts, reasons, usage = answers(server, stream, prompt="p", extra_body={"stop_token_ids": [x]} | fields)
    assert (texts, reasons, usage.completion_tokens) == ([expected], ["stop"], len(server.ids("on ")) + 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "onon"),
        ({"skip_special_tokens": True}, "onon"),
        ({"skip_special_tokens": False}, "<|im_start|>on<|im_start|>on"),
        ({"include_stop_str_in_output": True}, "onon"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "<|im_start|>on<|im_start|>on<|im_end|>"),
    ],
)
def test_special_tokens_are_text_only_if_they_are_not_to_be_skipped(server, fields, expected, stream):
    on = server.ids("on")
    server.script.plan([1, *on], [1], on, [2])
    texts, _, usage = answers(server, stream, prompt="p", extra_body=fields)
    assert texts == [expected]
    assert usage.completion_tokens == 2 * len(on) + 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_special_token_can_complete_a_stop_string_once_it_is_text(server, stream):
    server.script.plan([*server.ids("on"), 1, *server.ids("user")])
    fields = {"prompt": "p", "stop": "n<|im_start|>", "max_tokens": 40}
    assert answers(server, stream, **fields, extra_body={"skip_special_tokens": False})[0] == ["o"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("skip", "expected"), [(True, "onon"), (False, "on<|im_end|>on<|endoftext|>")])
def test_ignore_eos_goes_on_behind_it_and_leaves_stop_token_ids_in_force(server, skip, expected, stream):
    on = server.ids("on")
    server.script.plan([*on, 2, *on], [0, 9, *on])
    texts, reasons, usage = answers(
        server, stream, prompt="p", extra_body={"ignore_eos": True, "stop_token_ids": [9], "skip_special_tokens": skip}
    )
    assert server.script.see("Submit")["stop_token_ids"] == [9]
    assert (texts, reasons, usage.completion_tokens) == ([expected], ["stop"], 2 * len(on) + 3)


def test_ignore_eos_stops_at_an_eos_that_is_asked_for_by_its_id(server):
    server.script.plan([*server.ids("on"), 0, 2, *server.ids("on")])
    answer = server.openai.completions.create(**ASK, prompt="p", extra_body={"ignore_eos": True, "stop_token_ids": [2]})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("on", "stop")
    assert answer.usage.completion_tokens == len(server.ids("on")) + 2


@pytest.mark.parametrize(("fields", "expected"), [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 40}, 40)])
def test_sixteen_tokens_are_made_unless_more_are_asked_for(server, fields, expected):
    server.script.plan([5] * 100)
    answer = server.openai.completions.create(**ASK, prompt="p", **fields)
    assert answer.usage.completion_tokens == expected
    assert answer.choices[0].finish_reason == "length"


def test_the_sixteen_are_fewer_where_the_context_ends_and_what_is_asked_for_must_fit(server):
    server.script.plan([5] * 100)
    assert server.openai.completions.create(**ASK, prompt=[5] * 250).usage.completion_tokens == 6
    for prompt, fields in (([5] * 250, {"max_tokens": 7}), ([5] * 256, {})):
        error = server.http.post("/v1/completions", json=ASK | {"prompt": prompt} | fields).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt.0"),
        (["a", ""], "prompt.1"),
        ([[5], []], "prompt.1"),
        (["a", 5], "prompt.1"),
        (["a", [5]], "prompt.1"),
        ([[5, -1]], "prompt.0.1"),
        ([5, -1], "prompt.1"),
        ([[5, 512]], "prompt.0.1"),
        ([5, 2.5], "prompt.1"),
        ([True, 5], "prompt.0"),
        ({"text": "a"}, "prompt"),
        (5, "prompt"),
        ([512], "prompt.0"),
        ([2**64], "prompt.0"),
        ([1, "a"], "prompt.1"),
        (["a"] * 21, "prompt"),
        (["a"] * 5000, "prompt.0"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_prompt_is_refused_by_where_it_is_wrong(server, prompt, param):
    error = error_of(server.http.post("/v1/completions", json=ASK | {"prompt": prompt}), 400)
    assert (error["param"], error["code"]) == (param, "invalid_value")
