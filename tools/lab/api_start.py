"""How soon the command answers, and the server."""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

from app.bench.own_server import OwnServer
from app.bench.report import Table
from app.client.child_process import engine_environment
from tools.lab import api_cpu
from tools.lab.verdict import Verdict

MOST_SECONDS = {"dflash-server --help": 0.4, "dflash-server serve, a second start": 6.0}
MEANING = "Until the command has ended, and until `/ready` says 200; CPU seconds are of both processes of the server."


def measure(options: argparse.Namespace, tell: Callable[[str], None]) -> tuple[Table, list[Verdict]]:
    """A row for each of both."""
    rows = []
    verdicts = []
    for (what, most), once in zip(MOST_SECONDS.items(), (help_once, start_once), strict=True):
        tell(what)
        once()
        runs = [once() for _ in range(options.rounds)]
        clock, cpu = (median(figures) for figures in zip(*runs, strict=True))
        rows.append({"command": what, "seconds": f"{clock:.2f}", "CPU seconds": f"{cpu:.2f}"})
        verdicts.append(Verdict(f"{what} takes at most {most:g} s", clock <= most, f"{clock:.2f} s"))
    return Table("start", "Start-up", MEANING, rows), verdicts


def help_once() -> tuple[float, float]:
    """Seconds, and CPU seconds."""
    used, started = _children(), time.perf_counter()
    command = [sys.executable, "-P", "-m", "app", "--help"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=engine_environment())
    return time.perf_counter() - started, _children() - used


def start_once() -> tuple[float, float]:
    """Until the demo pair is ready; CPU seconds are of both processes."""
    started = time.perf_counter()
    with OwnServer("auto", ["--log-level", "warning"]) as server:
        server.wait_until_ready(lambda _: None)
        took = time.perf_counter() - started
        pids = server.process.pid, api_cpu.only_child(server.process.pid)
        return took, sum(map(api_cpu.cpu_seconds, pids))


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
