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

from app.bench import api_cpu
from app.bench.api_client import Clients, Round
from app.bench.api_engine import num_steps
from app.bench.api_split import split
from app.bench.own_server import OwnServer
from app.bench.verdict import Verdict
from app.checkpoint import DEMO
from app.demo.corpus import samples
from app.text.tokenizer import Tokenizer

LEAST_SPEED = 20_000
"""Tokens of a second of the API process's CPU time."""
_SAMPLES = 12
_MICRO = 1e6


def measure(options: argparse.Namespace, tell: Callable[[str], None]) -> tuple[list[dict[str, Any]], list[Verdict]]:
    """A row for each number of tokens a step."""
    tokenizer = Tokenizer(DEMO / "target")
    token_ids = says(tokenizer)
    rows = []
    verdicts = []
    for tokens_a_step in options.tokens_a_step:
        tell(f"{tokens_a_step} tokens a step")
        tokens = 1 + (options.steps - 1) * tokens_a_step
        rounds = stream(token_ids, options.connections, tokens, tokens_a_step, options.rounds)
        streamed = options.connections * (tokens - 1)
        cpu = median(round.last.cpu - round.first.cpu for round in rounds) / streamed
        parts = split(tokenizer, token_ids, options.connections, tokens, tokens_a_step)
        request = median(_beside_streaming(round) for round in rounds) / options.connections
        speed = median(streamed / (round.last.clock - round.first.clock) for round in rounds)
        rows.append(
            {
                "tokens a step": tokens_a_step,
                "tokens per CPU second": f"{1 / cpu:,.0f}",
                "per second": f"{speed:,.0f}",
                "µs a token": f"{_MICRO * cpu:.1f}",
                **{name: f"{_MICRO * seconds:.2f}" for name, seconds in parts._asdict().items()},
                "sockets, HTTP, asyncio": f"{_MICRO * (cpu - parts.whole):.1f}",
                "µs a request": f"{_MICRO * request:.0f}",
            }
        )
        claim = f"at least {LEAST_SPEED:,} tokens a CPU second over {options.connections} connections"
        verdicts.append(Verdict(f"{claim}, {tokens_a_step} a step", 1 / cpu >= LEAST_SPEED, f"{1 / cpu:,.0f}"))
    return rows, verdicts


def stream(token_ids: Sequence[int], connections: int, tokens: int, tokens_a_step: int, rounds: int) -> list[Round]:
    """Rounds of one server, which has a core of its own where there are two; the first round warms it up."""
    cores = api_cpu.cores()
    with tempfile.TemporaryDirectory(prefix="dflash-") as folder, zmq.Context() as context:
        turn = context.socket(zmq.PUSH)
        turn.linger = 0
        turn.bind(address := f"ipc://{folder}/turn")
        engine = [json.dumps(cores[:-1]), address, str(connections), str(tokens_a_step), json.dumps(list(token_ids))]
        program = ("app.bench.api_server", json.dumps(cores[-1:]), json.dumps(engine))
        with turn, OwnServer("plain", [], program) as server:
            server.wait_until_ready(lambda _: None)
            cpu = partial(api_cpu.cpu_seconds, server.process.pid)
            clients = Clients(server.port, turn, cpu, connections, tokens, num_steps(tokens, tokens_a_step))
            return [asyncio.run(clients.run()) for _ in range(rounds + 1)][1:]


def says(tokenizer: Tokenizer) -> list[int]:
    """Prose of which every token shows at once and no stop string begins: a line without anything but words."""
    answers = " ".join(sample.answer for sample in itertools.islice(samples("prose", "heldout", 0), _SAMPLES))
    return tokenizer.encode(" ".join(answers.split()), add_special_tokens=False)


def _beside_streaming(round: Round) -> float:
    return (round.end.cpu - round.start.cpu) - (round.last.cpu - round.first.cpu)
