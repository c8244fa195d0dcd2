"""The cost of the way through HTTP, by token, and the time of a start: `python -m tools.lab api`.

`streaming` has a scripted engine, so that the API process is all there is to measure. `share` compares that process
with the engine of the demo pair. The figures are CPU time, because other work on the machine changes it least. Exits
with 1 if a bound was missed, and with 2 for a mistake in the command line.
"""

import argparse
import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from app.config.error import ConfigError
from app.engine_client.child_process import engine_environment
from tools.bench import prompts, traffic
from tools.bench.client import Server, ServerError, first_model
from tools.bench.command import out_folder, progress
from tools.bench.flags import add_out_flag, count, counts, listed
from tools.bench.markdown import Row, Table
from tools.bench.own_server import OwnServer
from tools.lab import streaming
from tools.lab.publish import Verdict, publish
from tools.lab.streaming import cpu_seconds
from tools.parts import ToolParser

MAX_SHARE = 0.05
MAX_SECONDS = {"dflash-server --help": 0.4, "dflash-server serve, a second start": 6.0}
SHARE = (
    "CPU time of both processes over the same requests to the demo pair, whole blocks. `added` is what the API process "
    "adds to the engine's; `API µs a request` has all of it in it, streaming too."
)
START = "Until the command has ended, and until `/ready` says 200; CPU seconds are of both processes of the server."

Tell = Callable[[str], None]


def share(options: argparse.Namespace, tell: Tell) -> tuple[Table, list[Verdict]]:
    """Return a row for each text, and one for all. Whole blocks, because `auto` depends on the machine's other work."""
    rows = []
    every: list[traffic.Round] = []
    api_sum = engine_sum = 0.0
    with OwnServer("dflash", ["--log-level", "warning"]) as own:
        own.wait_until_ready(tell)
        server = Server("own", own.url)
        server = replace(server, model=asyncio.run(first_model(server)))
        pids = own.process.pid, only_child(own.process.pid)
        for dataset in prompts.named(options.dataset, seed=0):
            tell(dataset.name)
            asked = dataset.first(options.num_prompts)
            load = traffic.Load(options.concurrency, max_tokens=options.max_tokens, timeout=60.0)
            rounds = []
            before = [0.0, 0.0]
            for number in range(options.rounds + 1):
                rounds.append(asyncio.run(traffic.run_round(server, asked, load)))
                if number == 0:  # it warms the server up
                    before = [cpu_seconds(pid) for pid in pids]
            api, engine = (cpu_seconds(pid) - start for pid, start in zip(pids, before, strict=True))
            rows.append(share_row(dataset.name, rounds[1:], api, engine))
            every, api_sum, engine_sum = every + rounds[1:], api_sum + api, engine_sum + engine
    rows.append(share_row("all", every, api_sum, engine_sum))
    claim = f"the API process adds at most {MAX_SHARE:.0%} to the CPU time of the demo pair"
    added = api_sum / engine_sum
    verdict = Verdict(f"{claim}, {options.concurrency} at once", added <= MAX_SHARE, f"{added:.1%}")
    return Table("share", "What the API process adds", SHARE, rows), [verdict]


def share_row(text: str, rounds: Sequence[traffic.Round], api: float, engine: float) -> Row:
    """Return CPU seconds of both processes as shares and by token. Raises ServerError if a request failed."""
    if failures := [failure for found in rounds for failure in found.failures]:
        raise ServerError(f"{text}: {failures[0]}")
    tokens = sum(found.tokens for found in rounds)
    answers = [answer for found in rounds for answer in found.answers]
    return {
        "text": text,
        "tokens a request": f"{tokens / len(answers):.0f}",
        "tokens an event": f"{tokens / sum(len(answer.chunks) for answer in answers):.1f}",
        "API µs a token": f"{1e6 * api / tokens:.0f}",
        "engine µs a token": f"{1e6 * engine / tokens:.0f}",
        "API µs a request": f"{1e6 * api / len(answers):.0f}",
        "added": f"{api / engine:.1%}",
    }


def start(options: argparse.Namespace, tell: Tell) -> tuple[Table, list[Verdict]]:
    """Return a row for the command's help, and one for the server."""
    rows = []
    verdicts = []
    for (command, most), once in zip(MAX_SECONDS.items(), (help_once, start_once), strict=True):
        tell(command)
        once()
        runs = [once() for _ in range(options.rounds)]
        clock, cpu = (median(figures) for figures in zip(*runs, strict=True))
        rows.append({"command": command, "seconds": f"{clock:.2f}", "CPU seconds": f"{cpu:.2f}"})
        verdicts.append(Verdict(f"{command} takes at most {most:g} s", clock <= most, f"{clock:.2f} s"))
    return Table("start", "Start-up", START, rows), verdicts


def help_once() -> tuple[float, float]:
    """Return the seconds of the clock and of CPU time until the help has ended."""

    def children() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    used, started = children(), time.perf_counter()
    command = [sys.executable, "-P", "-m", "app", "--help"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=engine_environment())
    return time.perf_counter() - started, children() - used


def start_once() -> tuple[float, float]:
    """Return the seconds of the clock and of both processes' CPU time until the demo pair is ready."""
    started = time.perf_counter()
    with OwnServer("auto", ["--log-level", "warning"]) as server:
        server.wait_until_ready(lambda _: None)
        seconds = time.perf_counter() - started
        pids = server.process.pid, only_child(server.process.pid)
        return seconds, sum(map(cpu_seconds, pids))


def only_child(pid: int) -> int:
    """Return the one process that this process has started, a server's engine."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # that process has ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    (child,) = found
    return child


PARTS = {"streaming": streaming.measure, "share": share, "start": start}


def bench(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    for part in options.parts:
        if part not in PARTS:
            raise ConfigError(f"--parts: there is no part {part!r}", f"there are {', '.join(PARTS)}")
    if not Path("/proc/self/stat").exists():
        raise ConfigError("the CPU time of other processes is read like Linux tells it", "measure on Linux")
    folder = out_folder(options)
    tables: list[Table] = []
    verdicts: list[Verdict] = []
    with progress() as bar:
        for part in options.parts:
            task = bar.add_task(part, total=None)
            tell = partial(_tell, bar.update, task, part)
            table, more = PARTS[part](options, tell)
            bar.remove_task(task)
            tables.append(table)
            verdicts += more
    return publish("api", arguments, tables, folder, verdicts=verdicts)


def _tell(update: Callable[..., None], task: int, part: str, text: str) -> None:
    update(task, description=f"{part}: {text}")


def parser() -> argparse.ArgumentParser:
    made = ToolParser(
        prog="python -m tools.lab api", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--parts", type=listed, default=list(PARTS), metavar="PART,...", help=f"[default: {','.join(PARTS)}]")
    add("--rounds", type=count, default=5, metavar="N", help="of each part [default: 5]")
    add = made.add_argument_group("streaming").add_argument
    add("--connections", type=count, default=64, metavar="N", help="[default: 64]")
    about = "1 is plain decoding [default: 1,4,8]"
    add("--tokens-a-step", type=counts, default=[1, 4, 8], metavar="N,...", help=about)
    add("--steps", type=count, default=256, metavar="N", help="of every answer [default: 256]")
    add = made.add_argument_group("share").add_argument
    add("--concurrency", type=count, default=16, metavar="N", help="[default: 16]")
    add("--num-prompts", type=count, default=48, metavar="N", help="of each text [default: 48]")
    add("--max-tokens", type=count, default=128, metavar="N", help="[default: 128]")
    add("--dataset", default="demo", metavar="NAME", help="demo, demo:math,prose [default: demo]")
    add_out_flag(made, "api.json")
    return made
