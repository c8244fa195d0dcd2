"""A soak, round by round: load and a fault, then quiet, in which every answer and both processes are looked at."""

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.soak.checks import KV_POOL, QuietPoint, complaint, leaks
from tests.soak.client import Outcome, ask, connecting
from tests.soak.faults import Fault, Faults
from tests.soak.load import Load
from tests.soak.questions import Catalogue, catalogue
from tests.soak.server import DemoServer, Footprint

WARM_UP = "warm-up"
CYCLE = ("pause", "kill", "burst", "hang", "calm")
"""Rounds that come again and again. Two engines die in each: a third within a minute would end the server."""
ROUND_SECONDS = 40.0
"""Seconds of a round in a soak with time for it. No engine then counts as one that dies soon after its first work."""
_WORST_SHOWN = 20
_QUIET_SECONDS = 120.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """`minutes` of load. The step timeout and how long an engine is paused are seconds; `slow_tokens` is how long each
    of the four choices is that slow readers read. Answers at SIGTERM have to end within `shutdown_timeout` seconds."""

    minutes: float
    seed: int
    step_timeout: float = 10.0
    pause: float = 5.0
    workers: int = 12
    slow_tokens: int = 800
    cycle: tuple[str, ...] = CYCLE
    shutdown_timeout: float = 30.0

    @property
    def flags(self) -> list[str]:
        times = ["--step-timeout", f"{self.step_timeout:g}", "--shutdown-timeout", f"{self.shutdown_timeout:g}"]
        return [*times, "--max-num-seqs", "16", "--kv-cache-memory", str(KV_POOL)]

    def rounds(self) -> list[str]:
        """The warm-up, and as many cycles as there is time for, at least one."""
        cycles = int((self.minutes * 60 / ROUND_SECONDS - 1) / len(self.cycle))
        return [WARM_UP, *self.cycle * max(1, cycles)]


@dataclass
class Findings:
    """Results of a soak. `problems` is empty if every promise was kept."""

    plan: Plan
    problems: list[str] = field(default_factory=list)
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    errors: Counter[tuple[int, str]] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    points: list[QuietPoint] = field(default_factory=list)
    first_tokens: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    gaps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    seconds: float = 0.0


def soak(plan: Plan, tell: Callable[[str], None]) -> Findings:
    """Start the server, do all of it, end the server. `tell` gets a line for every round."""
    findings = Findings(plan)
    server = DemoServer(plan.flags)
    with server:
        tell(f"asking everything alone, of {server.url}")
        asked = catalogue(server.url, plan.seed, plan.slow_tokens)
        began = time.monotonic()
        if all(_is_survived(findings, number, server, asked, tell) for number in range(len(plan.rounds()))):
            load = Load(server.url, asked, random.Random(), workers=0)
            asyncio.run(_farewell(load, server))
            _judge(findings, "farewell", load)
        findings.seconds = time.monotonic() - began
    findings.problems += [*leaks(findings.points), *server.exit_complaints]
    return findings


def _is_survived(
    findings: Findings, number: int, server: DemoServer, asked: Catalogue, tell: Callable[[str], None]
) -> bool:
    """One round; whether the server is ready after it, so that another one can be."""
    plan, names = findings.plan, findings.plan.rounds()
    name = names[number]
    load = Load(server.url, asked, random.Random(f"{plan.seed}/{number}"), plan.workers)
    faults = Faults(server, plan.step_timeout, plan.pause, findings.faults, load.windows)
    asyncio.run(_round(name, load, faults, plan.minutes * 60 / len(names)))
    _judge(findings, name, load)
    if (lost := faults.lost or server.lost()) is not None:
        findings.problems.append(f"round {name!r}: {lost}")
        return False
    _quiet(findings, name, server)
    tell(f"{number + 1}/{len(names)} {_line(findings, name, load)}")
    return True


async def _round(name: str, load: Load, faults: Faults, seconds: float) -> None:
    """Load for so many seconds, longer if the fault takes longer, with the fault in its midst."""
    enough = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(enough))
        await asyncio.sleep(seconds / 4)
        began = time.monotonic()
        await _happen(name, load, faults)
        await asyncio.sleep(max(seconds / 4, 3 * seconds / 4 - (time.monotonic() - began)))
        enough.set()


async def _farewell(load: Load, server: DemoServer) -> None:
    """SIGTERM while answers are written: each is written to its end."""
    async with connecting(load.url) as http:
        asks = [asyncio.create_task(ask(http, "farewell", load.asked.slow, stream=stream)) for stream in (True, False)]
        while not any(each.done() for each in asks):
            gauges = await asyncio.to_thread(server.gauges)
            if gauges["num_requests_running"] == len(asks) * len(load.asked.expected["slow"].texts):
                break
        server.terminate()
        load.outcomes += await asyncio.gather(*asks)


async def _happen(name: str, load: Load, faults: Faults) -> None:
    match name:
        case "warm-up" | "burst":
            await load.burst()
        case "pause":
            await faults.paused()
            await faults.slept()
        case "kill":  # with a full house
            async with asyncio.TaskGroup() as group:
                group.create_task(load.burst())
                await asyncio.sleep(0.5)
                await faults.killed()
        case "hang":
            await faults.hung()


def _judge(findings: Findings, name: str, load: Load) -> None:
    """Look at every outcome, and book its times."""
    findings.held += load.held
    wrong = []
    for outcome in load.outcomes:
        found = complaint(outcome, load.asked.expected, load.windows)
        if found is not None:
            wrong.append(f"round {name!r}: {found}")
        findings.ends[outcome.kind, "wrong" if found else _end(outcome)] += 1
        if outcome.error is not None and outcome.question.status == 200:
            findings.errors[outcome.status, str(outcome.error.get("code"))] += 1
        if found is None and outcome.done:
            for kind in ("all", f"round {name}"):
                findings.first_tokens[kind] += [outcome.chunks[0] - outcome.sent] if outcome.chunks else []
                if outcome.kind != "slow reader":
                    findings.gaps[kind] += [after - before for before, after in pairwise(outcome.chunks)]
    findings.problems += wrong[:_WORST_SHOWN]
    if len(wrong) > _WORST_SHOWN:
        findings.problems.append(f"round {name!r}: and {len(wrong) - _WORST_SHOWN} more")


def _end(outcome: Outcome) -> str:
    if outcome.left:
        return "left"
    refused_rightly = outcome.status == outcome.question.status != 200
    return "right" if refused_rightly or (outcome.status == 200 and outcome.error is None) else "error"


def _quiet(findings: Findings, name: str, server: DemoServer) -> None:
    """Wait until no request is served and no connection is left, then examine both processes."""
    findings.problems += [f"after round {name!r}: {found}" for found in _unrest(server)]
    if (engine := server.engine()) is not None:
        findings.points.append(QuietPoint(name, _settled(server, findings.points), engine, Footprint.of(engine)))


def _unrest(server: DemoServer) -> Iterator[str]:
    deadline = time.monotonic() + _QUIET_SECONDS
    while any(gauges := server.gauges().values()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if any(gauges):
        yield f"no request is served, and yet /metrics says {server.gauges()}"
    yield from server.untidy()


def _settled(server: DemoServer, points: Sequence[QuietPoint]) -> Footprint:
    """Return the API process once it has closed the sockets of its clients, with as many descriptors as at the first
    point. At the first itself, once they get no fewer."""
    found, deadline = server.footprint(), time.monotonic() + _QUIET_SECONDS
    while time.monotonic() < deadline:
        if points and found.descriptors <= points[0].api.descriptors:
            break
        time.sleep(10 * _POLL_SECONDS)
        found, before = server.footprint(), found
        if not points and found.descriptors >= before.descriptors:
            break
    return found


def _line(findings: Findings, name: str, load: Load) -> str:
    point = findings.points[-1]
    return (
        f"{name}: {len(load.outcomes)} requests, {len(findings.problems)} problems so far; API process "
        f"{point.api.memory / 2**20:.0f} MiB, {point.api.descriptors} descriptors; engine "
        f"{point.engine.memory / 2**20:.0f} MiB, {point.engine.descriptors} descriptors"
    )
