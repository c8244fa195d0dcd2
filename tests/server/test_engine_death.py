"""After the death of the engine process no client hangs, and the next one serves again."""

import errno
import gc
import json
import os
import re
import signal
from pathlib import Path

import pytest
import zmq

from app.engine_client import link, supervisor
from app.messages import Request
from tests.fast.api.errors import TEXT as ASK
from tests.fast.api.served import PATIENCE, Clock, next_delta, serving


@pytest.fixture
def ready_server(own_server):
    own_server.pid = own_server.script.see("started")["pid"]
    own_server.script.order("ready", info=own_server.script.info)
    own_server.reach("ready")
    return own_server


@pytest.fixture
def last_words(monkeypatch):
    """Wait for the last words of an engine, because a slow machine tells of its end first."""
    monkeypatch.setattr(link, "_LAST_WORDS_SECONDS", PATIENCE)


def test_death_in_mid_stream_is_an_error_event_and_no_finished_answer(ready_server, background):
    running, request_id = ready_server.begin(background, stream=True)
    ready_server.script.emit(request_id, ready_server.ids("hello"))
    ready_server.script.order("die", code=9)
    events = running.result().text.strip().split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["text"] == "hello"
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and "exit code 9" in error["message"]
    assert "[DONE]" not in running.result().text
    assert not any('"finish_reason":"' in event for event in events)


@pytest.mark.parametrize("stream", [False, True])
def test_death_before_the_first_token_is_a_503_or_an_error_event_with_the_reason_and_no_prompts_error_is_left(
    ready_server, background, caplog, stream
):
    running, _ = ready_server.begin(background, prompt=["a", "b", "c"], stream=stream)
    for _ in range(2):
        ready_server.script.see("Submit")
    ready_server.script.order("die", code=9)
    response = running.result()
    if stream:
        assert response.status_code == 200
        (answer,) = (json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: "))
    else:
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
        answer = response.json()
    assert "exit code 9" in answer["error"]["message"]
    gc.collect()
    ready_server.http.get("/live")
    assert "never retrieved" not in caplog.text


def test_after_a_death_ready_says_why_and_then_the_next_engine_serves(ready_server, background):
    running, _ = ready_server.begin(background)
    ready_server.script.order("die", code=3)
    assert running.result().status_code == 503
    assert ready_server.script.see("started")
    ready = ready_server.http.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "loading")
    assert "exit code 3" in ready.json()["reason"]
    assert ready_server.http.get("/live").status_code == 200
    assert ready_server.http.get("/health").status_code == 503
    refused = ready_server.http.post("/v1/completions", json=ASK)
    assert refused.status_code == 503 and "exit code 3" in refused.json()["error"]["message"]
    ready_server.script.order("ready", info=ready_server.script.info)
    ready_server.reach("ready")
    ready_server.check_serving()


def test_an_error_of_one_request_leaves_the_others_alone(ready_server, background):
    failing, failing_id = ready_server.begin(background)
    working, working_id = ready_server.begin(background)
    ready_server.script.emit(failing_id, [], finish="error", error="the page is torn")
    ready_server.script.emit(working_id, [*ready_server.ids("fine"), 2])
    assert failing.result().status_code == 500
    assert "the page is torn" in failing.result().json()["error"]["message"]
    assert working.result().json()["choices"][0]["text"] == "fine"


def test_a_message_that_cannot_be_read_counts_as_death(ready_server, background):
    running, _ = ready_server.begin(background)
    ready_server.script.order("garbage")
    assert running.result().status_code == 503
    assert ready_server.script.see("started")


@pytest.mark.parametrize("user_error", [True, False])
def test_what_an_engine_says_against_its_first_start_is_final(own_server, last_words, user_error):
    own_server.script.see("started")
    own_server.script.order("fatal", reason="OutOfMemoryError: 5 GiB", user_error=user_error)
    own_server.reach("dead")
    ready = own_server.http.get("/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "dead", "reason": "OutOfMemoryError: 5 GiB"})
    refused = own_server.http.post("/v1/completions", json=ASK)
    assert refused.status_code == 503 and "5 GiB" in refused.json()["error"]["message"]


def test_what_an_engine_says_after_it_was_ready_is_worth_a_restart(ready_server, background, last_words):
    running, _ = ready_server.begin(background)
    ready_server.script.order("fatal", reason="RuntimeError: a bad step", user_error=False)
    assert running.result().status_code == 503
    assert ready_server.script.see("started")
    ready_server.until_metric("num_requests_running", 0)


def refuse_to_open(monkeypatch, *errors):
    """Let the next starts of a process fail with these errors."""
    opened, left = supervisor.EngineLink.open, iter(errors)

    async def open_link(*args):
        for error in left:
            raise error
        return await opened(*args)

    monkeypatch.setattr(supervisor.EngineLink, "open", open_link)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), zmq.ZMQError(errno.EMFILE)])
def test_a_process_that_cannot_be_started_is_final_at_first_and_tried_again_later(
    model_folder, ready_server, monkeypatch, error
):
    refuse_to_open(monkeypatch, error, error)
    with serving(model_folder) as server:
        server.reach("dead")
        assert "cannot be started" in server.http.get("/ready").json()["reason"]
    ready_server.script.order("die", code=9)
    assert ready_server.script.see("started")


def test_three_deaths_without_ready_are_enough(own_server):
    for _ in range(3):
        assert own_server.script.see("started")
        own_server.script.order("die", code=1)
    own_server.reach("dead")


def test_the_pause_before_a_start_doubles_while_starts_fail(model_folder, caplog):
    with serving(model_folder, supervisor={"backoff": 0.1}) as server:
        for _ in range(3):
            server.script.see("started")
            server.script.order("die", code=1)
        server.reach("dead")
    assert re.findall(r"starting it again in (\S+) s", caplog.text) == ["0.2", "0.4"]


@pytest.mark.parametrize(("pause", "phase"), [(29.5, "dead"), (30.5, "ready")])
def test_three_deaths_within_a_minute_are_enough_even_if_ready_between(own_server, monkeypatch, pause, phase):
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    for _ in range(3):
        own_server.ready()
        clock.now += pause
        own_server.script.order("die", code=1)
        own_server.until(lambda state: state.phase != "ready")
    if phase == "ready":
        own_server.script.ready()
    own_server.reach(phase)


def test_an_engine_killed_by_a_signal_is_named_so(ready_server, background):
    running, _ = ready_server.begin(background)
    os.kill(ready_server.pid, signal.SIGKILL)
    assert "killed by SIGKILL" in running.result().json()["error"]["message"]


def test_after_a_death_no_request_has_a_place_before_its_end_is_read(ready_server):
    stream = ready_server.call(lambda: ready_server.engine.submit(Request("unread", [1], 5, stop_token_ids=[2])))
    ready_server.script.order("die", code=3)
    assert ready_server.script.see("started")
    assert (ready_server.engine.num_running, ready_server.engine.admission.num_in_flight) == (0, 0)

    assert "exit code 3" in ready_server.call(lambda: next_delta(stream)).error


def test_an_engine_is_a_session_of_its_own_and_takes_its_folder_with_it(own_server):
    """Ctrl-C in a terminal reaches the server alone, which drains. Nothing is left in the temporary folder."""
    started = own_server.script.see("started")
    pid, folder = started["pid"], Path(started["folder"])
    assert os.getsid(pid) == pid and folder.is_dir()
    own_server.script.order("die", code=1)
    next_folder = Path(own_server.script.see("started")["folder"])
    assert not folder.exists() and next_folder.is_dir()
