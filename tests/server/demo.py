"""The real server with the demo pair, or with another model."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fast.api.served import PATIENCE

ENDLESS = {
    "model": "demo",
    "prompt": ["1 2 3 4"] * 64,
    "max_tokens": 1900,
    "ignore_eos": True,
    "speculate": False,
    "stream": True,
}
"""Stream of 122,000 tokens, which are minutes of steps. Only its client or the engine ends it before a test does."""
ROOM = ("--max-queue", "100")
"""Flags with which the server takes it."""


@contextlib.contextmanager
def ready(*flags: str) -> Iterator[str]:
    """Yield the address of a server that is ready. SIGTERM stops it, which must end it with 0."""
    with process(*flags) as (url, server):
        yield url
    assert server.returncode == 0


@contextlib.contextmanager
def process(*flags: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Yield the address of a server that is ready, and its process, which SIGTERM stops."""
    command = [sys.executable, "-m", "app", "serve", "--port", "0", "--device", "cpu", *flags]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        # A full pipe would stop the server behind some hundred requests.
        reader = threading.Thread(target=deque, args=(server.stderr, 0))
        try:
            for line in server.stderr:
                if found := re.search(r"ready: .* at (http://\S+)", line):
                    break
            else:
                pytest.fail("the server ended before it was ready")
            reader.start()
            yield found.group(1), server
        finally:
            server.send_signal(signal.SIGTERM)
            if reader.ident:
                reader.join()


def children(parent: int) -> list[int]:
    """Return the child processes of a process, zombies included."""
    return [int(pid) for path in Path(f"/proc/{parent}/task").glob("*/children") for pid in path.read_text().split()]


def state(pid: int) -> str | None:
    """Return the state of a process as proc_pid_stat(5) has it, or None without such a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def is_gone(pid: int) -> bool:
    return state(pid) in (None, "Z")


def num_running(url: str) -> int:
    """Return the number of sequences that were submitted and have not ended."""
    (load,) = httpx.get(f"{url}/get_load", timeout=PATIENCE).json()
    return int(load["num_reqs"])


def num_ended(url: str) -> float:
    """Return how many requests this server has ended."""
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("dflash:request_success_total{"))
