"""The real server over an engine without a model: every token that the engine says reaches every stream, in its order,
and steps that a slow reader finds waiting become one event."""

import asyncio
import json
import tempfile
from collections.abc import Sequence

import pytest
import zmq

from app import demo
from app.engine.checkpoint.files import DEMO
from app.text.detokenizer import Detokenizer
from app.text.tokenizer import Tokenizer
from tests.server.scripted import steps_of
from tools.bench.own_server import OwnServer

STOP = ("\n\n", "<end>")
"""Stop strings of all clients, which never come."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO / "target")


@pytest.fixture(scope="module")
def said(tokenizer: Tokenizer) -> list[int]:
    """Tokens of words, each of which has text at once because no stop string begins in it."""
    return tokenizer.encode(" ".join(demo.words()[:80]), add_special_tokens=False)


@pytest.mark.parametrize(("tokens", "a_step", "sizes"), [(5, 1, [1] * 5), (9, 4, [1, 4, 4]), (8, 4, [1, 4, 3])])
def test_a_scripted_answer_has_its_tokens_in_steps_of_which_the_first_is_the_prefills(tokens, a_step, sizes):
    outputs = steps_of(["a", "b"], [10, 11, 12], tokens, a_step)
    assert len(outputs) == len(sizes)
    for name in ("a", "b"):
        deltas = [delta for output in outputs for delta in output.deltas if delta.request_id == name]
        assert [len(delta.token_ids) for delta in deltas] == [delta.steps[0].n_tokens for delta in deltas] == sizes
        assert [token for delta in deltas for token in delta.token_ids] == [10 + i % 3 for i in range(tokens)]
        assert [delta.finish_reason for delta in deltas] == [None] * (len(sizes) - 1) + ["length"]


def test_every_token_that_is_said_shows_at_once_whatever_clients_stop_at(tokenizer, said):
    detokenizer = Detokenizer(tokenizer.backend, STOP)
    assert all(detokenizer.push([token_id]) for token_id in said)


class Clients:
    """Streams on connections of their own. Each has a list of its events' texts.

    The engine takes its next step after a message on `turn`. If it `waits`, that is each step, else the second alone.
    """

    def __init__(self, port: int, turn: "zmq.Socket[bytes]", count: int, tokens: int, *, waits: bool) -> None:
        self._port, self._turn = port, turn
        self._count, self._tokens, self._waits = count, tokens, waits
        self._arrived = 0

    async def run(self) -> list[list[str]]:
        body = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": self._tokens, "ignore_eos": True}
        text = json.dumps(body | {"stop": STOP, "stream": True, "stream_options": {"include_usage": True}})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n"
        request = f"{head}Content-Type: application/json\r\n\r\n{text}".encode()
        return await asyncio.gather(*(self._stream(request) for _ in range(self._count)))

    async def _stream(self, request: bytes) -> list[str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        texts = list[str]()
        usage: dict[str, int] = {}
        try:
            writer.write(request)
            while b"[DONE]" not in (data := await reader.readuntil(b"\n\n")):
                event = json.loads(data[data.index(b"{") :]) if b"data: {" in data else {}
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    if text := choice["delta"].get("content"):
                        texts.append(text)
                        self._go_on()
        finally:
            writer.close()
        assert usage["completion_tokens"] == self._tokens
        return texts

    def _go_on(self) -> None:
        self._arrived += 1
        if self._arrived == self._count or (self._waits and self._arrived % self._count == 0):
            self._turn.send(b"", zmq.NOBLOCK)


def stream(said: Sequence[int], count: int, tokens: int, tokens_a_step: int, *, waits: bool) -> list[list[str]]:
    """Return the texts of each stream's events."""
    with tempfile.TemporaryDirectory(prefix="dflash-") as folder, zmq.Context() as context:
        turn = context.socket(zmq.PUSH)
        turn.linger = 0
        turn.bind(address := f"ipc://{folder}/turn")
        engine = [address, str(count), str(tokens_a_step), json.dumps(waits), json.dumps(list(said))]
        with turn, OwnServer("plain", [], ("tests.server.scripted", "server", json.dumps(engine))) as server:
            server.wait_until_ready(lambda _: None)
            return asyncio.run(Clients(server.port, turn, count, tokens, waits=waits).run())


@pytest.mark.parametrize("tokens_a_step", [1, 4])
@pytest.mark.parametrize("waits", [True, False])
def test_clients_get_every_token_from_the_real_server(tokenizer, said, tokens_a_step, waits):
    """Each step of an engine that waits is an event of its own. Of one that runs ahead, waiting steps are joined."""
    count, steps = 3, 40
    tokens = 1 + steps * tokens_a_step
    found = stream(said, count, tokens, tokens_a_step, waits=waits)
    spoken = [said[index % len(said)] for index in range(tokens)]
    detokenizer = Detokenizer(tokenizer.backend, STOP)
    whole = "".join(detokenizer.push([token], "length" if i == tokens - 1 else None) for i, token in enumerate(spoken))
    assert ["".join(texts) for texts in found] == [whole] * count
    events = sum(map(len, found)) - count
    assert events == count * steps if waits else count <= events < count * steps
