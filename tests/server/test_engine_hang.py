"""An engine that has work and stands still for --step-timeout is killed and started again. No other engine is."""

import asyncio
import json
import os
import signal
import sys
from contextlib import contextmanager
from queue import Queue

import pytest

from app.engine_client import admission, supervisor
from app.messages import Request
from app.wire import HEARTBEAT
from tests.fast.api.connections import connect
from tests.fast.api.errors import TEXT as ASK
from tests.fast.api.errors import error_of
from tests.fast.api.served import PATIENCE, Clock, serving, until

TIMEOUT = 90.0
WHY = f"no layer and no step result within {TIMEOUT:g} s"
WINDOW = supervisor.DEATHS_WINDOW_SECONDS
NAPS = supervisor.NUM_NAPS


class Naps:
    """Naps of the watchdog. Each lasts until the test ends it, or no time at all while they are `short`."""

    def __init__(self):
        self.short = False
        self.seconds = 0.0
        self._over = None

    async def __call__(self, seconds):
        self.seconds = seconds
        over = self._over = asyncio.Event()
        try:
            await (asyncio.sleep(0) if self.short else over.wait())
        finally:
            self._over = None

    async def end(self, count=1):
        """End `count` naps, each once it has begun, and wait until the watchdog has counted them."""
        for _ in range(count):
            while (over := self._over) is None:
                await asyncio.sleep(0.001)
            over.set()
            while self._over is over:
                await asyncio.sleep(0)

    async def pass_quickly(self):
        """End the current nap, and let later ones take no time."""
        self.short = True
        if self._over is not None:
            self._over.set()


class Hangable:
    """Ready server whose engine process a test can stop, and the naps of its watchdog."""

    def __init__(self, server, naps):
        self.server = server
        self.naps = naps
        self.pid = self.next_engine()

    def next_engine(self):
        """Make the next engine ready, and return its pid. Its watchdog's naps last until they are ended."""
        pid = self.server.script.see("started")["pid"]
        self.naps.short = False
        self.server.script.order("ready", info=self.server.script.info)
        self.server.reach("ready")
        return pid

    @contextmanager
    def stopped(self):
        """Stop the engine, which then handles nothing, like in a device call that never returns."""
        os.kill(self.pid, signal.SIGSTOP)
        yield
        os.kill(self.pid, signal.SIGCONT)

    def hang(self):
        """Stop the engine for good, and let the time pass in which the watchdog finds out."""
        os.kill(self.pid, signal.SIGSTOP)
        self.server.call(self.naps.pass_quickly)

    def take_naps(self, count):
        self.server.call(lambda: self.naps.end(count))

    def beat(self):
        """Let the engine's heartbeat go on, as the layers of a step do."""
        file = self.server.engine.supervisor._link.folder / HEARTBEAT
        file.write_bytes((int.from_bytes(file.read_bytes(), sys.byteorder) + 1).to_bytes(8, sys.byteorder))

    def let_time_pass(self):
        """Let more short naps pass than the watchdog counts."""

        async def turns():
            for _ in range(10 * NAPS):
                await asyncio.sleep(0)

        self.server.call(self.naps.pass_quickly)
        self.server.call(turns)


@contextmanager
def hanging(model_folder, **admission):
    naps = Naps()
    with serving(model_folder, step_timeout=TIMEOUT, supervisor={"nap": naps}, admission=admission) as server:
        yield server, naps


@pytest.fixture
def hangable(model_folder):
    with hanging(model_folder) as (server, naps):
        yield Hangable(server, naps)


@pytest.fixture
def clock(monkeypatch):
    """Return the supervisor's clock, which the test moves on."""
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    return clock


def test_an_engine_that_hangs_in_a_step_is_killed_and_the_next_one_serves(hangable, background):
    server = hangable.server
    events = Queue()
    streamed = background.submit(server.read_stream, ASK, events)
    request_id = server.script.see("Submit")["request_id"]
    waiting, _ = server.begin(background)
    server.script.emit(request_id, server.ids("hello"))
    assert json.loads(events.get(timeout=PATIENCE))["choices"][0]["text"] == "hello"
    hangable.hang()
    streamed.result()
    assert WHY in json.loads(list(events.queue)[-1])["error"]["message"]
    assert waiting.result().status_code == 503 and WHY in waiting.result().json()["error"]["message"]
    ready = server.http.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "loading") and WHY in ready.json()["reason"]
    refused = server.http.post("/v1/completions", json=ASK)
    assert refused.status_code == 503 and WHY in refused.json()["error"]["message"]
    hung, hangable.pid = hangable.pid, hangable.next_engine()
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)
    server.check_serving()
    assert server.metric("engine_restarts_total") == 1


def test_a_stall_shorter_than_the_timeout_is_survived_and_a_longer_one_is_not(hangable, background):
    server = hangable.server
    running, request_id = server.begin(background)
    with hangable.stopped():
        hangable.take_naps(NAPS - 1)
        assert NAPS * hangable.naps.seconds == pytest.approx(TIMEOUT)
    server.script.emit(request_id, [*server.ids("fine"), 2])
    assert running.result().json()["choices"][0]["text"] == "fine"
    running, _ = server.begin(background)
    os.kill(hangable.pid, signal.SIGSTOP)
    hangable.take_naps(1 + NAPS)  # The answer came in the first one.
    assert WHY in running.result().json()["error"]["message"]
    assert server.script.see("started")


def test_a_step_that_takes_longer_than_the_timeout_is_no_hang_while_layers_are_computed(hangable, background):
    server = hangable.server
    running, request_id = server.begin(background)
    for _ in range(4):
        hangable.take_naps(NAPS - 1)
        hangable.beat()
    server.script.emit(request_id, [*server.ids("fine"), 2])
    assert running.result().json()["choices"][0]["text"] == "fine"
    assert server.metric("engine_restarts_total") == 0
    running, _ = server.begin(background)
    hangable.take_naps(1)
    hangable.beat()
    hangable.take_naps(1 + NAPS)
    assert WHY in running.result().json()["error"]["message"], "its last layer never ends"
    assert server.script.see("started")


def test_a_pause_of_the_whole_server_is_one_nap_and_no_hang(clock, hangable, background):
    running, request_id = hangable.server.begin(background)
    clock.now += 10 * TIMEOUT
    hangable.take_naps(1)
    hangable.server.script.emit(request_id, [2])
    assert running.result().status_code == 200
    assert hangable.server.metric("engine_restarts_total") == 0


def test_a_request_may_take_longer_than_the_timeout_while_steps_come(hangable, background):
    server = hangable.server
    running, request_id = server.begin(background)
    for steps in range(1, 9):
        hangable.take_naps(NAPS - 1)
        server.script.emit(request_id, [300])
        server.until_metric("generation_tokens_total", steps)
    server.script.emit(request_id, [2])
    assert running.result().json()["usage"]["completion_tokens"] == 9


def test_an_idle_engine_is_never_killed(hangable, background):
    server = hangable.server
    running, request_id = server.begin(background)
    server.script.emit(request_id, [2])
    assert running.result().status_code == 200
    with hangable.stopped():
        hangable.let_time_pass()
        assert server.http.get("/ready").status_code == 200
    hangable.naps.short = False
    server.check_serving()
    assert server.metric("engine_restarts_total") == 0


def test_loading_is_never_timed_also_after_a_hang(hangable, background):
    server = hangable.server
    running, _ = server.begin(background)
    hangable.hang()
    assert running.result().status_code == 503
    server.script.see("started")
    hangable.let_time_pass()
    hangable.naps.short = False
    server.script.order("ready", info=server.script.info)
    server.reach("ready")
    server.check_serving()
    assert server.metric("engine_restarts_total") == 1


def test_a_hang_is_found_out_though_every_client_gives_up_sooner(hangable):
    server = hangable.server
    os.kill(hangable.pid, signal.SIGSTOP)
    for _ in range(NAPS // 2):
        assert server.http.get("/ready").status_code == 200
        with connect(server):
            until(lambda: server.engine.num_running)
        until(lambda: not server.engine.num_running)
        hangable.take_naps(2)
    response = server.http.post("/v1/completions", json=ASK)
    assert response.status_code == 503 and WHY in response.json()["error"]["message"]
    assert server.script.see("started")


@pytest.mark.parametrize("answers", [False, True])
def test_hanging_again_and_again_is_given_up_however_long_a_hang_takes(clock, hangable, background, answers):
    """That holds even if every engine answers a request first, and if a hang takes longer than the window of deaths."""
    server = hangable.server
    for last in (False, False, True):
        if answers:
            running, request_id = server.begin(background)
            server.script.emit(request_id, [2])
            assert running.result().status_code == 200
            clock.now += 0.9 * WINDOW
        running, _ = server.begin(background)
        clock.now += TIMEOUT
        hangable.hang()
        assert running.result().status_code == 503
        if not last:
            hangable.pid = hangable.next_engine()
    server.reach("dead")
    assert WHY in server.http.get("/ready").json()["reason"]


def test_hangs_far_between_are_not_given_up(clock, hangable, background):
    server = hangable.server
    for _ in range(4):
        running, _ = server.begin(background)
        clock.now += WINDOW + TIMEOUT + 1
        hangable.hang()
        assert running.result().status_code == 503
        hangable.pid = hangable.next_engine()
    server.check_serving()


def test_an_engine_that_never_answers_a_flush_counts_as_hanging(hangable):
    hangable.hang()
    assert hangable.server.http.post("/reset_prefix_cache").status_code == 200
    assert hangable.server.script.see("started")


def test_who_comes_and_leaves_while_an_engine_hangs_leaves_no_more_than_a_bound(model_folder, monkeypatch):
    """A permit is returned at once, but its messages stay in memory until the engine reads them."""
    monkeypatch.setattr(admission, "MIN_UNACKNOWLEDGED", 5)
    with hanging(model_folder, max_queue=1) as (server, naps):
        server.script.info = server.script.info | {"max_num_seqs": 1}
        hangable = Hangable(server, naps)
        with hangable.stopped():
            for _ in range(6):
                with connect(server):
                    until(lambda: server.engine.num_running)
                until(lambda: not server.engine.num_running)
            for path in ("/v1/completions", "/reset_prefix_cache"):
                response = server.http.post(path, json=ASK)
                error = error_of(response, 429)
                assert error["code"] == "server_busy" and "has not answered since 6 requests" in error["message"]
                assert int(response.headers["retry-after"]) > 0
        for _ in range(6):
            assert server.script.see("Abort")["request_id"] == server.script.see("Submit")["request_id"]
        until(lambda: not server.engine.admission.num_unacknowledged)
        server.check_serving()
        server.script.forget()
        server.http.post("/reset_prefix_cache")
        assert server.script.see("FlushCache")


def test_flushes_that_a_hanging_engine_never_takes_have_a_bound_too(hangable, monkeypatch):
    monkeypatch.setattr(admission, "MAX_QUEUED_PER_RUNNING", 0)
    monkeypatch.setattr(admission, "MIN_UNACKNOWLEDGED", 5)
    os.kill(hangable.pid, signal.SIGSTOP)
    statuses = [hangable.server.http.post("/reset_prefix_cache").status_code for _ in range(8)]
    assert statuses == [200] * 6 + [429] * 2
    hangable.hang()
    hangable.next_engine()
    assert hangable.server.http.post("/reset_prefix_cache").status_code == 200, "the next engine owes nothing"


def test_nothing_that_is_sent_to_an_engine_which_does_not_listen_is_lost(model_folder):
    """The messages are more than the kernel's buffers hold, so that the socket keeps the rest."""
    with hanging(model_folder) as (server, naps):
        hangable = Hangable(server, naps)

        async def send_all():
            requests = [Request(f"{i}", [300] * 50_000, 5, stop_token_ids=[2]) for i in range(20)]
            for stream in [server.engine.submit(request) for request in requests]:
                stream.close()

        with hangable.stopped():
            server.call(send_all)
        for what in ("Submit", "Abort"):
            assert [server.script.see(what)["request_id"] for _ in range(20)] == [f"{i}" for i in range(20)]


def test_a_full_house_that_leaves_at_once_may_come_again_at_once(model_folder):
    """That holds even while the engine is in a long step and reads nothing."""
    with hanging(model_folder, max_queue=66) as (server, naps):
        server.script.info = server.script.info | {"max_num_seqs": 4}
        hangable = Hangable(server, naps)
        with hangable.stopped():
            with connect(server, prompt=["hi"] * 70):
                until(lambda: server.engine.num_running == 70)
            until(lambda: not server.engine.num_running)
            with connect(server, prompt=["hi"] * 70):
                until(lambda: server.engine.num_running == 70)
