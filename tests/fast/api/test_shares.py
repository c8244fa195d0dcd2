"""A client's share: of the bytes of bodies, of threads, and of requests, also of those that only ask for tokens."""

import asyncio
import json
import socket
import threading

import pytest

from app.api import body, shares
from app.api.shares import Held, HeldBytes, Threads
from app.engine_client.admission import Admission, ClientBusy
from tests.fast.api.connections import connection_address
from tests.fast.api.errors import CHAT, TEXT, error_of
from tests.fast.api.served import PATIENCE, serving, until

KEYS = ["first-key", "second-key"]
TOKENS = [
    ("/tokenize", {"prompt": "hi"}),
    ("/tokenize", {"messages": CHAT["messages"]}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/v1/completions/render", TEXT),
    ("/v1/chat/completions/render", CHAT),
]
ANSWERED = [
    ("/v1/completions", TEXT | {"echo": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"input": "hi"}),
]


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


@pytest.fixture
def keyed(model_folder):
    """Yield a server that admits one request of a key at a time."""
    with serving(model_folder, api_key=KEYS, admission={"max_per_client": 1}) as server:
        server.ready()
        yield server


def half_sent(server, name: str, length: int) -> socket.socket:
    """Return a connection on which so many bytes of a longer body were sent, and have arrived."""
    before = server.services.held_bytes.total
    connection = socket.create_connection(connection_address(server))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {name}\r\nContent-Length: 99999\r\n\r\n"
    connection.sendall(head.encode() + b"x" * length)
    until(lambda: server.services.held_bytes.total == before + length)
    return connection


@pytest.mark.parametrize(("path", "asked"), TOKENS)
def test_who_only_asks_for_tokens_has_no_more_requests_in_flight_either(keyed, background, path, asked):
    running = background.submit(lambda: keyed.http.post("/v1/completions", json=TEXT, headers=key("first-key")))
    request_id = keyed.script.see("Submit")["request_id"]
    refused = keyed.http.post(path, content=b"no JSON at all", headers=key("first-key"))
    assert error_of(refused, 429)["code"] == "client_busy" and int(refused.headers["retry-after"]) > 0
    assert keyed.http.post(path, json=asked, headers=key("second-key")).status_code == 200
    keyed.script.emit(request_id, [2])
    assert running.result().status_code == 200
    for _ in range(2):
        assert keyed.http.post(path, json=asked, headers=key("first-key")).status_code == 200


def test_a_body_on_its_way_counts_as_a_request_of_its_client_and_of_nobody_else(keyed):
    with half_sent(keyed, "first-key", 10):
        assert error_of(keyed.http.post("/tokenize", json={"prompt": "x"}, headers=key("first-key")), 429)
        assert keyed.services.engine.admission.num_in_flight == 0, "a slow body takes no place of the engine's"
        keyed.script.plan([2])
        assert keyed.http.post("/v1/completions", json=TEXT, headers=key("second-key")).status_code == 200
    until(lambda: not keyed.services.engine.admission.num_by_client)


def test_a_clients_bodies_leave_room_for_those_of_others(model_folder, monkeypatch):
    monkeypatch.setattr(shares, "MAX_HELD_BYTES", 2000)
    with serving(model_folder, api_key=KEYS) as server:
        server.ready()
        server.script.plan([2])
        with half_sent(server, "first-key", 900):
            text = TEXT | {"prompt": "a" * 100}
            refused = server.http.post("/v1/completions", json=text, headers=key("first-key"))
            assert error_of(refused, 429)["code"] == "client_busy" and int(refused.headers["retry-after"]) > 0
            assert server.http.post("/v1/completions", json=text, headers=key("second-key")).status_code == 200
        until(lambda: not server.services.held_bytes.total)
        assert server.http.post("/v1/completions", json=text, headers=key("first-key")).status_code == 200


def test_no_number_of_clients_exceeds_the_bound_and_a_newcomer_finds_room():
    held_bytes, admission = HeldBytes(), Admission()
    for number in range(20):
        count = 0
        while True:
            held = Held(str(number), admission.acquire_of_client(str(number)), held_bytes)
            try:
                held.add(2**16)
            except ClientBusy:
                held.close()
                break
            assert held_bytes.total <= shares.MAX_HELD_BYTES
            count += 1
        assert count or number > 8, "each newcomer gets half of what was free"


@pytest.mark.parametrize(("path", "asked"), [*TOKENS, *ANSWERED])
@pytest.mark.parametrize("status", [200, 400])
def test_a_large_body_is_given_back_whole(server, path, asked, status):
    """Whatever came of it: an answer, or a refusal."""
    server.script.plan([2])
    asked = asked | ({"user": "x" * 2**20} if status == 200 else {"model": "x" * 2**20, "n": "x"})
    response = server.http.post(path, json=asked)
    assert response.status_code in (status, 404)
    assert (server.services.held_bytes.total, len(server.services.held_bytes.by_client)) == (0, 0)


def test_a_body_counts_until_its_prompt_is_made(own_server, monkeypatch):
    own_server.ready()
    own_server.script.plan([2])
    encode, seen = own_server.tokenizer.encode, []

    def encode_and_look(*args, **settings):
        seen.append(own_server.services.held_bytes.total)
        return encode(*args, **settings)

    monkeypatch.setattr(own_server.tokenizer, "encode", encode_and_look)
    sent = json.dumps(TEXT).encode()
    assert own_server.http.post("/v1/completions", content=sent).status_code == 200
    assert seen == [len(sent)]


@pytest.mark.parametrize(("path", "asked"), [*TOKENS, *ANSWERED])
def test_prompts_and_large_bodies_are_work_for_the_clients_threads(server, monkeypatch, path, asked):
    monkeypatch.setattr(body, "MAX_BYTES_IN_PLACE", 10)
    server.script.plan([2])
    names = []

    def note(original):
        def noted(*args, **settings):
            names.append(threading.current_thread().name)
            return original(*args, **settings)

        return noted

    monkeypatch.setattr(body, "_parse_json", note(body._parse_json))
    monkeypatch.setattr(server.tokenizer, "encode", note(server.tokenizer.encode))
    monkeypatch.setattr(server.tokenizer, "decode", note(server.tokenizer.decode))
    assert server.http.post(path, json=asked).status_code == 200
    assert len(names) >= 2 and {name.partition("_")[0] for name in names} == {"prompts"}


class Work:
    """Jobs that run until the test lets them end."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.begun: list[str] = []
        self.may_end: dict[str, threading.Event] = {}

    def give(self, client_id: str, name: str) -> "asyncio.Task[str]":
        self.may_end[name] = threading.Event()
        return asyncio.create_task(self.threads.run(client_id, self.do, name))

    def do(self, name: str) -> str:
        self.begun.append(name)
        self.may_end[name].wait()
        return name

    async def end(self, name: str, task: "asyncio.Task[str]") -> None:
        self.may_end[name].set()
        assert await task == name

    async def has_begun(self, *names: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while set(self.begun) < set(names):
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert set(self.begun) == set(names)

    def close(self) -> None:
        for event in self.may_end.values():
            event.set()


def test_clients_take_turns_at_the_threads_and_one_leaves_some_to_the_others():
    async def check() -> None:
        work = Work(Threads(4))
        try:
            tasks = {name: work.give("a", name) for name in ("a1", "a2", "a3", "a4")}
            await work.has_begun("a1", "a2")
            tasks |= {name: work.give("b", name) for name in ("b1", "b2")}
            await work.has_begun("a1", "a2", "b1")
            tasks |= {"c1": work.give("c", "c1"), "d1": work.give("d", "d1")}
            await work.has_begun("a1", "a2", "b1", "c1")
            await work.end("a1", tasks["a1"])
            await work.has_begun("a1", "a2", "b1", "c1", "d1")
            for name in ("a2", "b1", "c1", "d1"):
                await work.end(name, tasks[name])
            for name in ("a3", "b2", "a4"):
                await work.end(name, tasks[name])
        finally:
            work.close()

    asyncio.run(check())


def test_work_of_a_client_that_left_is_dropped_and_its_thread_comes_back():
    async def check() -> None:
        work = Work(Threads(2))
        try:
            first, second, third = (work.give("a", name) for name in ("first", "second", "third"))
            await work.has_begun("first")
            second.cancel()
            first.cancel()  # It runs on, and nobody waits for it.
            await asyncio.wait([first, second])
            await work.has_begun("first")
            work.may_end["first"].set()
            await work.has_begun("first", "third")
            await work.end("third", third)
        finally:
            work.close()

    asyncio.run(check())


def test_an_error_in_a_thread_is_raised_where_it_is_awaited():
    async def check() -> None:
        with pytest.raises(ZeroDivisionError):
            await Threads(1).run("a", lambda: 1 // 0)

    asyncio.run(check())


def test_a_client_without_an_address_gets_a_thread_too():
    """A server behind a socket of the file system, or of another host's process, knows none."""
    assert asyncio.run(Threads().run("", len, "four")) == 4
