"""The cost of a streamed token in the API process, with an engine that costs nothing."""

import argparse
import asyncio
import ctypes
import itertools
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import msgspec
import zmq

from app.api.answers import ChatAnswers
from app.api.schemas import StreamOptions
from app.api.stream import Choices, Piece
from app.engine.checkpoint.files import DEMO
from app.engine_client.request_stream import RequestStream
from app.messages import StepOutput
from app.metrics import Metrics
from app.text.detokenizer import Detokenizer
from app.text.parsers import OutputParser, Parsed
from app.text.tokenizer import Tokenizer
from app.wire import Reply, Stepped
from tools.bench.client import ServerError
from tools.bench.markdown import Row, Table
from tools.bench.own_server import OwnServer
from tools.demo_pair.corpus import samples
from tools.lab.publish import Verdict
from tools.lab.scripted import steps_of

MIN_SPEED = 20_000
"""Tokens per second of the API process's CPU time."""
STOP = ("\n\n", "<end>")
"""Stop strings of all clients, which never come."""
MEANING = (
    "An engine without a model says the same prose to all connections. Where it waits it goes on when all clients have "
    "the step, so each step is an event of its own; where it runs ahead it waits for the first step only, the API "
    "process has all that it can do, and steps that wait become one event. `load` is its CPU time by the clock. Of the "
    "CPU time a token, each part is timed apart over the steps of an engine that waits: `messages` is reading the "
    "engine's msgpack, `book` metrics and mailboxes, `stop` looking for stop strings, `parse` for reasoning and tools, "
    "`SSE` making an event and its JSON; what is left is sockets, HTTP and asyncio. `µs a request` is all but its "
    "streaming."
)
_HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
)
_TOKENS = re.compile(rb'"completion_tokens":(\d+)')


class Moment(NamedTuple):
    """Seconds of the clock and of the server's CPU time."""

    clock: float
    cpu: float

    def since(self, before: "Moment") -> "Moment":
        return Moment(self.clock - before.clock, self.cpu - before.cpu)


class Round(NamedTuple):
    """One answer for each client: its start, the arrival of the first and of the last step at all clients, its end.

    `events` are those after the first step.
    """

    start: Moment
    first: Moment
    last: Moment
    end: Moment
    events: int

    @property
    def streaming(self) -> Moment:
        return self.last.since(self.first)

    @property
    def whole(self) -> Moment:
        return self.end.since(self.start)


class Clients:
    """Clients on connections of their own, that only count. Each answer has `tokens` tokens.

    The engine takes its next step after a message on `turn`. If it `waits`, that is each step, else the second alone.
    `cpu` returns the server's CPU seconds.
    """

    def __init__(
        self, port: int, turn: "zmq.Socket[bytes]", cpu: Callable[[], float], count: int, tokens: int, *, waits: bool
    ) -> None:
        self._port, self._turn, self._cpu = port, turn, cpu
        self._count, self._tokens, self._waits = count, tokens, waits

    async def run(self) -> Round:
        """Raises ServerError if an answer has other tokens than the engine's."""
        self._arrived = self._ended = 0
        start = self._now()
        body = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": self._tokens, "ignore_eos": True}
        text = json.dumps(body | {"stop": STOP, "stream": True, "stream_options": {"include_usage": True}})
        request = (_HEAD.format(len(text)) + text).encode()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._count):
                    group.create_task(self._stream(request))
        except* ServerError as errors:
            raise errors.exceptions[0] from None
        return Round(start, self._first, self._last, self._now(), self._arrived - self._count)

    async def _stream(self, request: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(request)
            before = data = b""
            while b"[DONE]" not in data:
                before, data = data, await reader.readuntil(b"\n\n")
                if b'"delta":{"content"' in data:
                    self._count_on()
                elif b'"finish_reason":"' in data:
                    self._ended += 1
                    if self._ended == self._count:
                        self._last = self._now()
            found = _TOKENS.search(before)
            if found is None or int(found[1]) != self._tokens:
                raise ServerError(f"an answer of {self._tokens} tokens ended with {before.decode()}")
        except asyncio.IncompleteReadError as error:
            raise ServerError(f"an answer broke off: {error.partial.decode()}") from None
        finally:
            writer.close()

    def _count_on(self) -> None:
        self._arrived += 1
        if self._arrived == self._count:
            self._first = self._now()
        if self._arrived == self._count or (self._waits and self._arrived % self._count == 0):
            self._turn.send(b"", zmq.NOBLOCK)

    def _now(self) -> Moment:
        return Moment(time.perf_counter(), self._cpu())


def measure(options: argparse.Namespace, tell: Callable[[str], None]) -> tuple[Table, list[Verdict]]:
    """Return two rows for each number of tokens a step: an engine that waits, and one that runs ahead."""
    tokenizer = Tokenizer(DEMO / "target")
    token_ids = prose(tokenizer)
    rows = []
    verdicts = []
    for tokens_a_step in options.tokens_a_step:
        tokens = 1 + (options.steps - 1) * tokens_a_step
        streamed = options.connections * (tokens - 1)
        parts = split(tokenizer, token_ids, options.connections, tokens, tokens_a_step)
        for waits in (True, False):
            does = "waits" if waits else "runs ahead"
            tell(f"{tokens_a_step} tokens a step, the engine {does}")
            rounds = stream(token_ids, options.connections, tokens, tokens_a_step, options.rounds, waits=waits)
            head = {"tokens a step": tokens_a_step, "engine": does}
            rows.append(head | row(rounds, streamed, options.connections, parts if waits else None))
            if waits:
                speed = streamed / median(found.streaming.cpu for found in rounds)
                claim = f"at least {MIN_SPEED:,} tokens a CPU second over {options.connections} connections"
                verdicts.append(Verdict(f"{claim}, {tokens_a_step} a step", speed >= MIN_SPEED, f"{speed:,.0f}"))
    return Table("streaming", "Streaming", MEANING, rows), verdicts


def row(rounds: Sequence[Round], streamed: int, connections: int, parts: "Split | None") -> Row:
    """Return the figures of rounds with `streamed` tokens in all, and the parts of a token's way."""
    cpu = median(found.streaming.cpu for found in rounds)
    clock = median(found.streaming.clock for found in rounds)
    request = median(found.whole.cpu - found.streaming.cpu for found in rounds) / connections
    rest = cpu / streamed - sum(parts) if parts else 0.0
    names = [*Split._fields, "sockets, HTTP, asyncio"]
    shares = [f"{1e6 * seconds:.2f}" for seconds in (*parts, rest)] if parts else ["-"] * len(names)
    return {
        "tokens an event": f"{median(streamed / found.events for found in rounds):.1f}",
        "tokens per second": f"{streamed / clock:,.0f}",
        "load": f"{100 * cpu / clock:.0f} %",
        "tokens per CPU second": f"{streamed / cpu:,.0f}",
        "µs a token": f"{1e6 * cpu / streamed:.1f}",
        **dict(zip(names, shares, strict=True)),
        "µs a request": f"{1e6 * request:.0f}",
    }


def stream(
    token_ids: Sequence[int], connections: int, tokens: int, tokens_a_step: int, rounds: int, *, waits: bool
) -> list[Round]:
    """Return rounds of one server, after one that warms it up. The server has its own core if there are two."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="dflash-") as folder, zmq.Context() as context:
        turn = context.socket(zmq.PUSH)
        turn.linger = 0
        turn.bind(address := f"ipc://{folder}/turn")
        sizes = [str(connections), str(tokens_a_step)]
        engine = [json.dumps(cores[:-1]), address, *sizes, json.dumps(waits), json.dumps(list(token_ids))]
        program = ("tools.lab.scripted", "server", json.dumps(cores[-1:]), json.dumps(engine))
        with turn, OwnServer("plain", [], program) as server:
            server.wait_until_ready(lambda _: None)
            cpu = partial(cpu_seconds, server.process.pid)
            clients = Clients(server.port, turn, cpu, connections, tokens, waits=waits)
            return [asyncio.run(clients.run()) for _ in range(rounds + 1)][1:]


def prose(tokenizer: Tokenizer) -> list[int]:
    """Return tokens of prose in one line, each of which has text at once because no stop string begins in it."""
    answers = " ".join(sample.answer for sample in itertools.islice(samples("prose", "heldout", 0), 12))
    return tokenizer.encode(" ".join(answers.split()), add_special_tokens=False)


class Split(NamedTuple):
    messages: float
    book: float
    detokenise: float
    stop: float
    parse: float
    SSE: float


"""CPU seconds a token of the parts of its way through the API process."""


def split(tokenizer: Tokenizer, token_ids: Sequence[int], batch: int, tokens: int, tokens_a_step: int) -> Split:
    """Time each part alone, in this process, over the steps of the scripted engine. Each is the best of five rounds."""
    outputs = steps_of([f"{index:032x}-0" for index in range(batch)], token_ids, tokens, tokens_a_step)
    messages = [msgspec.msgpack.encode(Stepped(output)) for output in outputs]
    texts = _texts(tokenizer, outputs, STOP)
    pieces = [[Piece(0, [Parsed(text)]) for text in row] for row in texts]
    bare = _seconds(lambda: _texts(tokenizer, outputs, ()))
    seconds = (
        _seconds(lambda: _decode(messages)),
        _seconds(lambda: _book(outputs)),
        bare,
        max(0.0, _seconds(lambda: _texts(tokenizer, outputs, STOP)) - bare),
        _seconds(lambda: _parse(texts)),
        _seconds(lambda: _events(pieces)),
    )
    return Split(*(part / (batch * tokens) for part in seconds))


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


def _decode(messages: Sequence[bytes]) -> None:
    decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
    for message in messages:
        decoder.decode(message)


def _book(outputs: Sequence[StepOutput]) -> None:
    metrics = Metrics()
    names = [delta.request_id for delta in outputs[0].deltas]
    streams = {name: RequestStream(name, lambda _: None, metrics, 0.0) for name in names}
    for output in outputs:
        metrics.step(output)
        for delta in output.deltas:
            streams[delta.request_id].put(delta)
        for request_stream in streams.values():
            request_stream.take()


def _texts(tokenizer: Tokenizer, outputs: Sequence[StepOutput], stop: Sequence[str]) -> list[list[str]]:
    """Return the clients' texts, step by step."""
    detokenizers = {delta.request_id: Detokenizer(tokenizer.backend, stop) for delta in outputs[0].deltas}
    return [
        [detokenizers[delta.request_id].push(delta.token_ids, delta.finish_reason) for delta in output.deltas]
        for output in outputs
    ]


def _parse(texts: Sequence[Sequence[str]]) -> None:
    parsers = [OutputParser() for _ in texts[0]]
    for row in texts:
        for parser, text in zip(parsers, row, strict=True):
            parser.push(text)


def _events(pieces: Sequence[Sequence[Piece]]) -> None:
    answers = ChatAnswers("demo", Choices(0, 1), StreamOptions(include_usage=True))
    for piece in itertools.chain.from_iterable(pieces):
        answers.events(piece)


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process with all its threads, without children. Raises OSError."""
    clock = ctypes.c_int()
    if error := ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise OSError(error, os.strerror(error))
    return time.clock_gettime(clock.value)
