"""At its deadline a request ends in the engine and with its client, and never looks like a whole answer."""

import asyncio
import json
import time
from queue import Queue

import pytest
from fastapi import Request

from tests.fast.api.errors import CHAT, TEXT, error_of
from tests.fast.api.served import PATIENCE, until

TIMEOUT = 0.3
SERVED = {"request_timeout": TIMEOUT}


class Gate:
    """Deadlines that have come wait behind it until it is opened."""

    def __init__(self, server, monkeypatch):
        self._server = server
        self._expire = server.engine.expire
        self._waiting = []
        monkeypatch.setattr(server.engine, "expire", self._waiting.append)

    def open(self):
        """For one deadline."""
        until(lambda: self._waiting)
        self._server.call(lambda: self._expire(self._waiting.pop()))


@pytest.fixture
def gate(server, monkeypatch):
    return Gate(server, monkeypatch)


@pytest.mark.parametrize(("path", "asked"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
def test_a_request_of_which_nothing_has_come_is_a_504_and_is_aborted(server, path, asked):
    began = time.monotonic()
    error = error_of(server.http.post(path, json=asked), 504)
    assert (error["type"], error["code"]) == ("server_error", "deadline_exceeded")
    assert time.monotonic() - began >= TIMEOUT
    assert server.script.see("Abort")["request_id"] == server.script.see("Submit")["request_id"]


def test_a_stream_ends_with_an_error_event_and_is_not_finished(server, background, gate):
    events = Queue()
    asked = background.submit(server.read_stream, TEXT, events)
    request_id = server.script.see("Submit")["request_id"]
    server.script.emit(request_id, server.ids("hello"))
    first = events.get(timeout=PATIENCE)
    assert json.loads(first)["choices"][0]["text"] == "hello"
    gate.open()
    asked.result()
    (last,) = events.queue
    assert json.loads(last)["error"]["code"] == "deadline_exceeded"
    assert '"finish_reason":"' not in first + last
    assert server.script.see("Abort")["request_id"] == request_id


def test_a_plain_answer_is_not_cut_short_but_refused(server, background, gate):
    asked = background.submit(lambda: server.http.post("/v1/completions", json=TEXT))
    tokens = server.metric("generation_tokens_total")
    ids = server.ids("hello")
    server.script.emit(server.script.see("Submit")["request_id"], ids)
    server.until_metric("generation_tokens_total", tokens + len(ids))
    gate.open()
    assert "hello" not in str(error_of(asked.result(), 504))


def test_it_comes_no_later_than_was_said(server, background, gate):
    asked, request_id = server.begin(background)

    async def left():
        return server.engine._running[request_id].timer.when() - asyncio.get_running_loop().time()

    assert server.call(left) <= TIMEOUT
    gate.open()
    error_of(asked.result(), 504)


def test_all_choices_end_together(server):
    error_of(server.http.post("/v1/completions", json=TEXT | {"n": 3, "prompt": ["a", "b"]}), 504)
    assert len({server.script.see("Abort")["request_id"] for _ in range(6)}) == 6


@pytest.mark.parametrize(("said", "seconds"), [(None, TIMEOUT), ("0.1", 0.1), ("1e-3", 1e-3), ("60", TIMEOUT)])
def test_the_header_shortens_it_and_cannot_prolong_it(server, said, seconds):
    headers = [] if said is None else [(b"x-request-timeout", said.encode())]
    request = Request({"type": "http", "headers": headers})
    assert server.services.deadline(request, arrived=1000.0) == 1000.0 + seconds


@pytest.mark.parametrize("said", ["", "0", "-1", "nan", "inf", "1e400", "5s", "1,5"])
def test_a_header_that_is_no_number_of_seconds_is_refused_by_name(server, said):
    error = error_of(server.http.post("/v1/completions", json=TEXT, headers={"X-Request-Timeout": said}), 400)
    assert error["param"] == "X-Request-Timeout" and "seconds" in error["message"]


def test_the_header_works_where_the_server_has_no_deadline(own_server):
    own_server.ready()
    error_of(own_server.http.post("/v1/completions", json=TEXT, headers={"X-Request-Timeout": "0.1"}), 504)
    assert own_server.script.see("Abort")


def test_an_answer_in_time_is_whole_and_nothing_is_left_to_end_it(server, gate):
    server.script.plan([*server.ids("fine"), 2])
    answer = server.http.post("/v1/completions", json=TEXT).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == ("fine", "stop")
    assert (server.engine.num_running, server.engine.admission.num_in_flight) == (0, 0)


def test_deadlines_are_counted(server):
    before = server.metric("request_success_total", finished_reason="deadline")
    error_of(server.http.post("/v1/completions", json=TEXT), 504)
    assert server.metric("request_success_total", finished_reason="deadline") == before + 1
