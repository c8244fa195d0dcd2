"""What a streamed token costs the API process, with an engine that costs nothing."""

import argparse
import asyncio
import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import zmq

from app.bench.own_server import OwnServer
from app.bench.report import Table
from app.config.checkpoint import DEMO
from app.text.tokenizer import Tokenizer
from tools.demo_pair.corpus import samples
from tools.lab import api_cpu
from tools.lab.api_client import Clients, Round
from tools.lab.api_split import Split, split
from tools.lab.verdict import Verdict

LEAST_SPEED = 20_000
"""Tokens of a second of the API process's CPU time."""
_SAMPLES = 12
_MICRO = 1e6


MEANING = (
    "An engine without a model says the same prose to all connections. Where it waits it goes on when all clients have "
    "the step, so each step is an event of its own; where it runs ahead it waits for the first step only, the API "
    "process has all that it can do, and steps that wait become one event. `load` is its CPU time by the clock. Of the "
    "CPU time a token, each part is timed apart over the steps of an engine that waits: `messages` is reading the "
    "engine's msgpack, `book` metrics and mailboxes, `stop` looking for stop strings, `parse` for reasoning and tools, "
    "`SSE` making an event and its JSON; what is left is sockets, HTTP and asyncio. `µs a request` is all but its "
    "streaming."
)


def measure(options: argparse.Namespace, tell: Callable[[str], None]) -> tuple[Table, list[Verdict]]:
    """Two rows for each number of tokens a step: of an engine that waits, and of one that runs ahead."""
    tokenizer = Tokenizer(DEMO / "target")
    token_ids = says(tokenizer)
    rows = []
    verdicts = []
    for tokens_a_step in options.tokens_a_step:
        tokens = 1 + (options.steps - 1) * tokens_a_step
        streamed = options.connections * (tokens - 1)
        parts = split(tokenizer, token_ids, options.connections, tokens, tokens_a_step)
        for waits in (True, False):
            tell(f"{tokens_a_step} tokens a step, the engine {_does(waits)}")
            rounds = stream(token_ids, options.connections, tokens, tokens_a_step, options.rounds, waits=waits)
            head = {"tokens a step": tokens_a_step, "engine": _does(waits)}
            rows.append(head | row(rounds, streamed, options.connections, parts if waits else None))
            if waits:
                speed = streamed / median(round.streaming.cpu for round in rounds)
                claim = f"at least {LEAST_SPEED:,} tokens a CPU second over {options.connections} connections"
                claim += f", {tokens_a_step} a step"
                verdicts.append(Verdict(claim, speed >= LEAST_SPEED, f"{speed:,.0f}"))
    return Table("streaming", "Streaming", MEANING, rows), verdicts


def row(rounds: Sequence[Round], streamed: int, connections: int, parts: Split | None) -> dict[str, Any]:
    """Of rounds in which so many tokens were `streamed` to all; `parts` of a token's way, where steps are events."""
    cpu = median(round.streaming.cpu for round in rounds)
    clock = median(round.streaming.clock for round in rounds)
    request = median(round.whole.cpu - round.streaming.cpu for round in rounds) / connections
    told = {
        "messages": parts and parts.messages,
        "book": parts and parts.book,
        "detokenise": parts and parts.detokenise,
        "stop": parts and parts.stop,
        "parse": parts and parts.parse,
        "SSE": parts and parts.sse,
        "sockets, HTTP, asyncio": parts and cpu / streamed - parts.whole,
    }
    return {
        "tokens an event": f"{median(streamed / round.events for round in rounds):.1f}",
        "tokens per second": f"{streamed / clock:,.0f}",
        "load": f"{100 * cpu / clock:.0f} %",
        "tokens per CPU second": f"{streamed / cpu:,.0f}",
        "µs a token": f"{_MICRO * cpu / streamed:.1f}",
        **{name: "-" if seconds is None else f"{_MICRO * seconds:.2f}" for name, seconds in told.items()},
        "µs a request": f"{_MICRO * request:.0f}",
    }


def _does(waits: bool) -> str:
    return "waits" if waits else "runs ahead"


def stream(
    token_ids: Sequence[int], connections: int, tokens: int, tokens_a_step: int, rounds: int, *, waits: bool
) -> list[Round]:
    """Rounds of one server, which has a core of its own where there are two; the first round warms it up."""
    cores = api_cpu.cores()
    with tempfile.TemporaryDirectory(prefix="dflash-") as folder, zmq.Context() as context:
        turn = context.socket(zmq.PUSH)
        turn.linger = 0
        turn.bind(address := f"ipc://{folder}/turn")
        sizes = [str(connections), str(tokens_a_step)]
        engine = [json.dumps(cores[:-1]), address, *sizes, json.dumps(waits), json.dumps(list(token_ids))]
        program = ("tools.lab.api_server", json.dumps(cores[-1:]), json.dumps(engine))
        with turn, OwnServer("plain", [], program) as server:
            server.wait_until_ready(lambda _: None)
            cpu = partial(api_cpu.cpu_seconds, server.process.pid)
            clients = Clients(server.port, turn, cpu, connections, tokens, waits=waits)
            return [asyncio.run(clients.run()) for _ in range(rounds + 1)][1:]


def says(tokenizer: Tokenizer) -> list[int]:
    """Prose of which every token shows at once and no stop string begins: a line without anything but words."""
    answers = " ".join(sample.answer for sample in itertools.islice(samples("prose", "heldout", 0), _SAMPLES))
    return tokenizer.encode(" ".join(answers.split()), add_special_tokens=False)
