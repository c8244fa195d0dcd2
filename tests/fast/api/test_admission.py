"""Admission: a bounded queue, a bound for each client, and a refusal before any work is done."""

import socket

import pytest

from app.api import body
from tests.fast.api.connections import connection_address
from tests.fast.api.errors import CHAT, TEXT, error_of
from tests.fast.api.served import serving, until

KEYS = ["first-key", "second-key"]


def send(server, background, key):
    """Return a request of this key that is in flight in the engine, and its id there."""
    headers = {"Authorization": f"Bearer {key}"}
    asked = background.submit(lambda: server.http.post("/v1/completions", json=TEXT, headers=headers))
    return asked, server.script.see("Submit")["request_id"]


@pytest.mark.parametrize(("max_queue", "allowed"), [(None, 10), (1, 3), (0, 2)])
def test_as_many_wait_as_max_queue_says(model_folder, background, max_queue, allowed):
    with serving(model_folder, admission={"max_queue": max_queue}) as server:
        server.ready(max_num_seqs=2)
        running = [server.begin(background) for _ in range(allowed)]
        response = server.http.post("/v1/completions", json=TEXT)
        error = error_of(response, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "server_busy")
        assert str(allowed) in error["message"] and int(response.headers["retry-after"]) > 0
        server.script.emit(running[0][1], [2])
        assert running[0][0].result().status_code == 200
        running.append(server.begin(background))
        for _, request_id in running[1:]:
            server.script.emit(request_id, [2])
        assert all(asked.result().status_code == 200 for asked, _ in running)
        assert server.metric("requests_turned_away_total", code="server_busy") == 1


@pytest.fixture
def keyed(model_folder):
    """Yield a server that admits two requests of one key at a time."""
    with serving(model_folder, api_key=KEYS, admission={"max_per_client": 2}) as server:
        server.ready()
        yield server


@pytest.mark.parametrize("header", ["Bearer first-key", "bearer   first-key", "BEARER first-key"])
def test_a_key_has_no_more_requests_in_flight_than_it_may_however_it_is_written(keyed, background, header):
    running = [send(keyed, background, "first-key") for _ in range(2)]
    response = keyed.http.post("/v1/completions", json=TEXT, headers={"Authorization": header})
    error = error_of(response, 429)
    assert error["code"] == "client_busy" and "limit of 2 per client" in error["message"]
    assert int(response.headers["retry-after"]) > 0
    other, other_id = send(keyed, background, "second-key")
    for _, request_id in [*running, (other, other_id)]:
        keyed.script.emit(request_id, [2])
    assert [asked.result().status_code for asked, _ in [*running, (other, other_id)]] == [200] * 3
    again, request_id = send(keyed, background, "first-key")
    keyed.script.emit(request_id, [2])
    assert again.result().status_code == 200


def test_what_a_client_sends_beyond_its_share_is_not_read(keyed, background):
    running = [send(keyed, background, "first-key") for _ in range(2)]
    headers = {"Authorization": "Bearer first-key"}
    error = error_of(keyed.http.post("/v1/completions", content=b"no JSON at all", headers=headers), 429)
    assert error["code"] == "client_busy"
    for asked, request_id in running:
        keyed.script.emit(request_id, [2])
        assert asked.result().status_code == 200


def test_choices_count_each_as_a_request_of_the_client(keyed, background):
    key = {"Authorization": "Bearer first-key"}
    # A request that can never be admitted is no 429, because that says to try again.
    assert error_of(keyed.http.post("/v1/completions", json=TEXT | {"n": 3}, headers=key), 400)["param"] == "n"
    running, request_id = send(keyed, background, "first-key")
    assert error_of(keyed.http.post("/v1/chat/completions", json=CHAT | {"n": 3}, headers=key), 400)["param"] == "n"
    error = error_of(keyed.http.post("/v1/completions", json=TEXT | {"n": 2}, headers=key), 429)
    assert error["code"] == "client_busy"
    keyed.script.emit(request_id, [2])
    assert running.result().status_code == 200


def test_without_keys_a_client_is_its_address(model_folder, background):
    with serving(model_folder, admission={"max_per_client": 1}) as server:
        server.ready()
        running, request_id = send(server, background, "a-key-that-nobody-asked-for")
        assert error_of(server.http.post("/v1/completions", json=TEXT), 429)["code"] == "client_busy"
        # A proxy on this host names another client.
        server.script.plan([2])
        elsewhere = server.http.post("/v1/completions", json=TEXT, headers={"X-Forwarded-For": "192.0.2.7"})
        assert elsewhere.status_code == 200
        server.script.emit(request_id, [2])
        assert running.result().status_code == 200


@pytest.mark.parametrize(("path", "asked"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
def test_a_full_server_neither_reads_nor_tokenises_what_it_refuses(model_folder, background, monkeypatch, path, asked):
    with serving(model_folder, admission={"max_queue": 0}) as server:
        server.ready(max_num_seqs=1)
        running, request_id = server.begin(background)
        monkeypatch.setattr(body, "_parse_json", None)
        monkeypatch.setattr(server.tokenizer, "encode", None)
        assert error_of(server.http.post(path, json=asked), 429)["code"] == "server_busy"
        server.script.emit(request_id, [2])
        assert running.result().status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_while_it_loads_nothing_is_read(own_server, path):
    own_server.script.see("started")
    response = own_server.http.post(path, content=b"no JSON at all")
    assert error_of(response, 503)["code"] == "engine_loading"
    assert int(response.headers["retry-after"]) > 0
    assert own_server.metric("requests_turned_away_total", code="engine_loading") == 1


def test_prompts_that_are_still_made_take_places_too(own_server, background, monkeypatch):
    """The work of making prompts is therefore bounded, and no prompt is made in vain."""
    own_server.ready(max_num_seqs=1)
    own_server.script.plan([2])
    encode = own_server.tokenizer.encode
    refused = []

    def and_meanwhile(text, most=None, **settings):
        monkeypatch.setattr(own_server.tokenizer, "encode", encode)
        # The prompt that is being made has one of five permits.
        refused.append(own_server.http.post("/v1/completions", json=TEXT | {"n": 5}).status_code)
        refused.append(own_server.http.post("/v1/completions", json=TEXT | {"n": 4}).status_code)
        return encode(text, most, **settings)

    monkeypatch.setattr(own_server.tokenizer, "encode", and_meanwhile)
    assert own_server.http.post("/v1/completions", json=TEXT).status_code == 200
    assert refused == [429, 200]


@pytest.mark.parametrize("prompt", ["", [600], "x" * 400])
def test_a_refused_prompt_gives_its_places_back(own_server, prompt):
    own_server.ready(max_num_seqs=1)
    for _ in range(10):
        assert own_server.http.post("/v1/completions", json=TEXT | {"prompt": prompt}).status_code == 400
    own_server.script.plan([2])
    assert own_server.http.post("/v1/completions", json=TEXT | {"n": 5}).status_code == 200


def test_a_body_that_broke_off_is_counted_no_more(server):
    with socket.create_connection(connection_address(server)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\nhalf of it")
        until(lambda: server.services.held_bytes.total == 10)
    until(lambda: server.services.held_bytes.total == 0)
