"""Answers that are not streamed are read many tokens at a time, unless they may end before the engine does."""

import logging

import pytest

from app.api.stream import Choice
from tests.fast.api.connections import connect
from tests.fast.api.errors import TEXT
from tests.fast.api.served import until
from tests.fast.api.templates import ASK, QWEN, WEATHER

CHAT = ("/v1/chat/completions", ASK)
COMPLETION = ("/v1/completions", TEXT | {"max_tokens": 100})
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SERVED = {"template": QWEN, "reasoning_parser": "qwen3", "tool_call_parser": "qwen3"}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the numbers of tokens that choices have taken."""
    taken: list[int] = []
    read = Choice._read

    def counted(choice, delta):
        taken.append(len(delta.token_ids))
        return read(choice, delta)

    monkeypatch.setattr(Choice, "_read", counted)
    return taken


def play(server, background, path, asked):
    """Answer a request with LETTERS, a token a step, none of which the server gets before it has booked the last."""
    running = background.submit(lambda: server.http.post(path, json=asked))
    request_id = server.script.see("Submit")["request_id"]
    for token in [*server.bytes(LETTERS), 2]:
        booked = server.metric("generation_tokens_total")
        server.script.emit(request_id, [token])
        server.until_metric("generation_tokens_total", booked + 1)
    return running.result()


@pytest.mark.parametrize(
    ("path", "asked"), [COMPLETION, CHAT, (CHAT[0], ASK | {"tools": [WEATHER]})], ids=["completion", "chat", "tools"]
)
def test_many_steps_are_read_at_once(server, background, reads, path, asked):
    answer = play(server, background, path, asked).json()
    assert LETTERS in str(answer["choices"][0])
    assert answer["usage"]["completion_tokens"] == sum(reads) == len(LETTERS) + 1
    assert reads == [8, 8, 8, 3]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (COMPLETION[0], COMPLETION[1] | {"stream": True}),
        (COMPLETION[0], COMPLETION[1] | {"stop": "~"}),
        (CHAT[0], ASK | {"tools": [WEATHER], "parallel_tool_calls": False}),
    ],
    ids=["stream", "stop", "one call"],
)
def test_each_step_is_read_if_a_client_waits_for_it_or_the_answer_may_end_with_it(
    server, background, reads, path, asked
):
    assert play(server, background, path, asked).status_code == 200
    assert reads == [1] * (len(LETTERS) + 1)


def test_the_tokens_of_an_answer_that_nobody_waits_for_are_counted(server, caplog):
    ids = server.bytes("hello")
    with caplog.at_level(logging.INFO, "app.access"):
        booked = server.metric("generation_tokens_total")
        with connect(server):
            server.script.emit(server.script.see("Submit")["request_id"], ids)
            server.until_metric("generation_tokens_total", booked + len(ids))
        until(lambda: any(" 499 " in record.getMessage() for record in caplog.records))
    (line,) = [record.getMessage() for record in caplog.records if " 499 " in record.getMessage()]
    assert f"completion_tokens={len(ids)} finish_reason=abort" in line


@pytest.mark.parametrize("stream", [False, True])
def test_the_histogram_of_tokens_has_those_of_the_answer(server, stream):
    before = server.metric("request_generation_tokens_sum")
    server.script.plan(server.bytes(LETTERS))
    server.http.post(COMPLETION[0], json=COMPLETION[1] | {"stop": "cd", "stream": stream})
    assert server.metric("request_generation_tokens_sum") == before + len("abcd")
