"""An engine that has work and says nothing for --step-timeout is killed and started again; no other engine is."""

import json
import os
import signal
import time
from contextlib import contextmanager

import httpx
import pytest

from app import async_engine
from app.types import Sampling
from tests.api.conftest import PATIENCE, serving, until
from tests.api.test_disconnect import connect
from tests.api.test_engine_death import ASK, started
from tests.api.test_errors import error_of

TIMEOUT = 1.0
WHY = f"no step result within {TIMEOUT:g} s"


class Hangable:
    """A ready server whose engine process a test can stop."""

    def __init__(self, server):
        self.server = server
        self.pid = self.next_engine()

    def next_engine(self):
        """The process of the next epoch, which is ready now."""
        pid = self.server.script.see("started")["pid"]
        self.server.script.order("ready", info=self.server.script.info)
        self.server.reach("ready")
        return pid

    @contextmanager
    def stopped(self):
        """The engine hears nothing, not even SIGTERM, as in a device call that never returns."""
        os.kill(self.pid, signal.SIGSTOP)
        yield
        os.kill(self.pid, signal.SIGCONT)

    def hang(self):
        os.kill(self.pid, signal.SIGSTOP)


@pytest.fixture
def hangable(model_folder):
    with serving(model_folder, step_timeout=TIMEOUT) as server:
        yield Hangable(server)


def test_an_engine_that_hangs_in_a_step_is_killed_and_the_next_one_serves(hangable, background):
    server = hangable.server
    streamed, request_id = started(server, background, stream=True)
    waiting, _ = started(server, background)
    server.script.emit(request_id, server.ids("hello"))
    hangable.hang()
    events = streamed.result().text.strip().split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["text"] == "hello"
    assert WHY in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
    assert waiting.result().status_code == 503 and WHY in waiting.result().json()["error"]["message"]
    ready = server.http.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "loading") and WHY in ready.json()["reason"]
    refused = server.http.post("/v1/completions", json=ASK)
    assert refused.status_code == 503 and WHY in refused.json()["error"]["message"]
    hung, hangable.pid = hangable.pid, hangable.next_engine()
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)
    server.script.plan([*server.ids("back"), 2])
    assert server.openai.completions.create(**ASK).choices[0].text == "back"
    assert server.metric("engine_restarts_total") == 1


def test_a_stall_shorter_than_the_timeout_is_survived_and_a_longer_one_is_not(hangable, background):
    server = hangable.server
    running, request_id = started(server, background)
    with hangable.stopped():
        time.sleep(TIMEOUT / 3)
    server.script.emit(request_id, [*server.ids("fine"), 2])
    assert running.result().json()["choices"][0]["text"] == "fine"
    running, _ = started(server, background)
    hangable.hang()
    assert WHY in running.result().json()["error"]["message"]
    assert server.script.see("started")["epoch"] == 2


def test_a_request_may_take_longer_than_the_timeout_while_steps_come(hangable, background):
    running, request_id = started(hangable.server, background)
    for _ in range(8):
        time.sleep(TIMEOUT / 5)
        hangable.server.script.emit(request_id, [300])
    hangable.server.script.emit(request_id, [2])
    assert running.result().json()["usage"]["completion_tokens"] == 9


def test_an_idle_engine_is_never_killed(hangable, background):
    server = hangable.server
    running, request_id = started(server, background)
    server.script.emit(request_id, [2])
    assert running.result().status_code == 200
    with hangable.stopped():
        time.sleep(2 * TIMEOUT)
        assert server.http.get("/ready").status_code == 200
    server.script.plan([*server.ids("here"), 2])
    assert server.openai.completions.create(**ASK).choices[0].text == "here"
    assert server.metric("engine_restarts_total") == 0


def test_loading_is_never_timed_also_after_a_hang(hangable, background):
    server = hangable.server
    running, _ = started(server, background)
    hangable.hang()
    assert running.result().status_code == 503
    server.script.see("started")
    time.sleep(2 * TIMEOUT)
    server.script.order("ready", info=server.script.info)
    server.reach("ready")
    server.script.plan([*server.ids("loaded"), 2])
    assert server.openai.completions.create(**ASK).choices[0].text == "loaded"
    assert server.metric("engine_restarts_total") == 1


def test_a_hang_is_found_out_though_every_client_gives_up_sooner(hangable):
    hangable.hang()
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            response = hangable.server.http.post("/v1/completions", json=ASK, timeout=TIMEOUT / 4)
            break
        except httpx.ReadTimeout:
            assert time.monotonic() < deadline, "nobody has noticed"
    assert response.status_code == 503 and WHY in response.json()["error"]["message"]
    assert hangable.server.script.see("started")["epoch"] == 2


def test_three_hangs_within_a_minute_are_enough(hangable, background):
    for last in (False, False, True):
        running, _ = started(hangable.server, background)
        hangable.hang()
        assert running.result().status_code == 503
        if not last:
            hangable.pid = hangable.next_engine()
    hangable.server.reach("dead")
    assert WHY in hangable.server.http.get("/ready").json()["reason"]


@pytest.mark.parametrize("answers", [False, True])
def test_hanging_again_and_again_is_given_up_however_long_a_hang_takes(hangable, background, monkeypatch, answers):
    """Also where every engine answers a request before; and a hang that takes more than the window of deaths."""
    server = hangable.server
    monkeypatch.setattr(async_engine, "_DEATHS_WINDOW_SECONDS", 1.8 * TIMEOUT)
    for last in (False, False, True):
        if answers:
            running, request_id = started(server, background)
            server.script.emit(request_id, [2])
            assert running.result().status_code == 200
        running, _ = started(server, background)
        hangable.hang()
        assert running.result().status_code == 503
        if not last:
            hangable.pid = hangable.next_engine()
    server.reach("dead")


def test_hangs_far_between_are_not_given_up(hangable, background, monkeypatch):
    server = hangable.server
    monkeypatch.setattr(async_engine, "_DEATHS_WINDOW_SECONDS", -TIMEOUT)
    for _ in range(4):
        running, _ = started(server, background)
        hangable.hang()
        assert running.result().status_code == 503
        hangable.pid = hangable.next_engine()
    server.script.plan([*server.ids("here"), 2])
    assert server.openai.completions.create(**ASK).choices[0].text == "here"


def test_an_engine_that_never_answers_a_flush_counts_as_hanging(hangable):
    hangable.hang()
    assert hangable.server.http.post("/reset_prefix_cache").status_code == 200
    assert hangable.server.script.see("started")["epoch"] == 2


def test_who_comes_and_leaves_while_an_engine_hangs_leaves_no_more_than_a_bound(model_folder, monkeypatch):
    """A place is given back at once, but what was sent waits in memory until the engine takes it."""
    monkeypatch.setattr(async_engine, "_LEAST_UNHEARD", 5)
    with serving(model_folder, engine={"max_queue": 1}) as server:
        server.script.info = server.script.info | {"max_num_seqs": 1}
        hangable = Hangable(server)
        with hangable.stopped():
            for _ in range(6):
                with connect(server):
                    until(lambda: server.engine._running)
                until(lambda: not server.engine._running)
            for path in ("/v1/completions", "/reset_prefix_cache"):
                response = server.http.post(path, json=ASK)
                error = error_of(response, 429)
                assert error["code"] == "server_busy" and "said nothing since 6 requests" in error["message"]
                assert int(response.headers["retry-after"]) > 0
        for _ in range(6):
            assert server.script.see("Abort")["request_id"] == server.script.see("Submit")["request_id"]
        until(lambda: not server.engine._num_unheard)
        server.script.plan([*server.ids("here"), 2])
        assert server.openai.completions.create(**ASK).choices[0].text == "here"
        server.script.forget()
        server.http.post("/reset_prefix_cache")
        assert server.script.see("FlushCache")


def test_flushes_that_a_hanging_engine_never_takes_have_a_bound_too(hangable, monkeypatch):
    monkeypatch.setattr(async_engine, "_WAITING_PER_SEAT", 0)
    monkeypatch.setattr(async_engine, "_LEAST_UNHEARD", 5)
    hangable.hang()
    statuses = [hangable.server.http.post("/reset_prefix_cache").status_code for _ in range(8)]
    assert statuses == [200] * 6 + [429] * 2
    hangable.next_engine()
    assert hangable.server.http.post("/reset_prefix_cache").status_code == 200, "the next engine owes nothing"


def test_nothing_that_is_sent_to_an_engine_which_does_not_listen_is_lost(model_folder):
    """More than the kernel's buffers hold: the socket keeps the rest."""
    with serving(model_folder) as server:
        hangable = Hangable(server)

        async def send_all():
            every = [server.engine.generate(f"{i}", [300] * 50_000, Sampling(), [2], 5) for i in range(20)]
            for generation in every:
                generation.close()

        with hangable.stopped():
            server.call(send_all)
        for what in ("Submit", "Abort"):
            assert [server.script.see(what)["request_id"] for _ in range(20)] == [f"{i}" for i in range(20)]


def test_a_full_house_that_leaves_at_once_may_come_again_at_once(model_folder):
    """Also while the engine is in the midst of a long step and hears nothing."""
    with serving(model_folder, engine={"max_queue": 66}) as server:
        server.script.info = server.script.info | {"max_num_seqs": 4}
        hangable = Hangable(server)
        with hangable.stopped():
            with connect(server, prompt=["hi"] * 70):
                until(lambda: len(server.engine._running) == 70)
            until(lambda: not server.engine._running)
            with connect(server, prompt=["hi"] * 70):
                until(lambda: len(server.engine._running) == 70)
