"""A thousand clients that leave at random leave nothing behind: no request, permit, task or descriptor."""

import asyncio
import json
import os
import random
import time

from tests.fast.api.connections import connection_address
from tests.fast.api.served import PATIENCE

CLIENTS = 1000
AT_ONCE = 50


def test_a_thousand_random_aborts_leave_nothing_behind(own_server):
    own_server.script.ready(max_num_seqs=8)  # 40 at once are admitted, so that some of the 50 are refused.
    own_server.reach("ready")
    # The first tokens of every answer come at once. No answer ends, so that every end is an abort.
    own_server.script.plan([*own_server.ids("hello")], [*own_server.ids("world")])
    before = left_behind(own_server)
    told = asyncio.run(all_clients(connection_address(own_server)))
    assert {200, 429, None} <= set(told), "streams that began, refusals, and clients that did not wait for either"
    deadline = time.monotonic() + PATIENCE
    while (after := left_behind(own_server)) != before:
        assert time.monotonic() < deadline, f"{after} is not {before}"
        time.sleep(0.05)
    own_server.script.plan([*own_server.ids("fine"), 2])
    answer = own_server.http.post("/v1/completions", json={"prompt": ["hi"] * 40})
    assert {choice["text"] for choice in answer.json()["choices"]} == {"fine"}, "every place is free again"


def left_behind(server):
    """Count the requests, tasks and descriptors that the server holds without a connection."""
    server.http.get("/live")  # Connections are accepted in order, so that none is pending now.
    server.http.close()
    engine = server.engine

    async def count():
        return (
            engine.num_running,
            engine.admission.num_in_flight,
            engine.admission.num_unacknowledged,
            server.services.held_bytes.total,
            dict(engine.admission.num_by_client),
            len(server.uvicorn.server_state.connections),
            len(asyncio.all_tasks()),
        )

    counts = (*server.call(count), len(os.listdir("/proc/self/fd")))  # noqa: PTH208 (a Path would open another)
    server.http = type(server.http)(base_url=server.url, timeout=PATIENCE)
    return counts


async def all_clients(address) -> list[int | None]:
    chance = random.Random(7)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one() -> int | None:
        async with gate:
            return await client(address, chance)

    return await asyncio.gather(*(one() for _ in range(CLIENTS)))


async def client(address, chance: random.Random) -> int | None:
    """Send a request and leave at a random moment. Return the status if it came before."""
    path, fields = chance.choice(
        [
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi " * chance.choice([1, 60])}]}),
        ]
    )
    streams = chance.random() < 0.6
    body = json.dumps(fields | {"stream": streams}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    if chance.random() < 0.3:
        head += "X-Request-Timeout: 0.05\r\n"
    sent = f"{head}\r\n".encode() + body
    whole = chance.random() < 0.9
    patience = PATIENCE if whole and streams and chance.random() < 0.1 else chance.choice([0.0, 0.01, 0.1, 0.3])
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(sent if whole else sent[: chance.randrange(len(sent))])
        async with asyncio.timeout(patience):
            return int((await reader.readline()).split()[1])
    except (TimeoutError, ConnectionError):
        return None
    finally:
        if chance.random() < 0.5:
            writer.transport.abort()
        writer.close()
