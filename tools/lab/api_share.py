"""What the API process adds to the CPU time of a run of the demo pair. Whole blocks are verified: what `auto` chooses
depends on what else the machine does."""

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from app.bench import prompts
from app.bench.client import Server, ServerError, first_model
from app.bench.own_server import OwnServer
from app.bench.report import Table
from app.bench.traffic import Pressure, Round, Wishes, run_round
from tools.lab import api_cpu
from tools.lab.verdict import Verdict

MOST = 0.05
_TIMEOUT = 60.0
_MICRO = 1e6


MEANING = (
    "CPU time of both processes over the same requests to the demo pair, whole blocks. `added` is what the API process "
    "adds to the engine's; `API µs a request` has all of it in it, streaming too."
)


def measure(options: argparse.Namespace, tell: Callable[[str], None]) -> tuple[Table, list[Verdict]]:
    """A row for each text, and one of all."""
    rows = []
    verdicts = []
    all_rounds: list[Round] = []
    all_api = all_engine = 0.0
    with OwnServer("dflash", ["--log-level", "warning"]) as own:
        own.wait_until_ready(tell)
        server = Server("own", own.url)
        server = replace(server, model=asyncio.run(first_model(server)))
        engine = api_cpu.only_child(own.process.pid)
        for dataset in prompts.named(options.dataset, seed=0):
            tell(dataset.name)
            asked = dataset.first(options.num_prompts)
            go = (server, asked, Pressure(options.concurrency), Wishes(options.max_tokens), _TIMEOUT)
            asyncio.run(run_round(*go))
            before = api_cpu.cpu_seconds(own.process.pid), api_cpu.cpu_seconds(engine)
            rounds = [asyncio.run(run_round(*go)) for _ in range(options.rounds)]
            api, work = (api_cpu.cpu_seconds(pid) for pid in (own.process.pid, engine))
            api, work = api - before[0], work - before[1]
            rows.append(row(dataset.name, rounds, api, work))
            all_rounds, all_api, all_engine = all_rounds + rounds, all_api + api, all_engine + work
    rows.append(row("all", all_rounds, all_api, all_engine))
    claim = f"the API process adds at most {MOST:.0%} to the CPU time of the demo pair, {options.concurrency} at once"
    share = all_api / all_engine
    verdicts.append(Verdict(claim, share <= MOST, f"{share:.1%}"))
    return Table("share", "What the API process adds", MEANING, rows), verdicts


def row(text: str, rounds: list[Round], api: float, engine: float) -> dict[str, Any]:
    """CPU seconds of both processes as shares and by token. Raises ServerError where a request failed."""
    if failures := [failure for round in rounds for failure in round.failures]:
        raise ServerError(f"{text}: {failures[0]}")
    tokens = sum(round.tokens for round in rounds)
    answers = [answer for round in rounds for answer in round.answers]
    return {
        "text": text,
        "tokens a request": f"{tokens / len(answers):.0f}",
        "tokens an event": f"{tokens / sum(len(answer.chunks) for answer in answers):.1f}",
        "API µs a token": f"{_MICRO * api / tokens:.0f}",
        "engine µs a token": f"{_MICRO * engine / tokens:.0f}",
        "API µs a request": f"{_MICRO * api / len(answers):.0f}",
        "added": f"{api / engine:.1%}",
    }
