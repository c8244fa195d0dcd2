"""A Ray cluster of this machine, driven by a program in the environment of Ray."""

import contextlib
import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tools.bench.own_server import free_port

PYTHON = ROOT / ".venv-ray" / "bin" / "python"
PATIENCE = 240.0
"""Seconds for each event that must happen, generous because the machine may be slow."""
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "device": "cpu",
    "num_replicas": 2,
    "num_cpus": 0.4,
    "max_num_seqs": 4,
    "max_queue": 2,
    "verify": "full",
    "health_check_period_s": 2,
    "shutdown_timeout": 60,
}
ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "hdr(x-session-id)",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "600",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "HF_HUB_OFFLINE": "1",
}


def skip_without_ray() -> None:
    """Skip a test where Ray is not installed. With CI set that is a failure."""
    if not PYTHON.exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("Ray is not installed: `make test-ray`")


class Cluster:
    """Cluster with the demo pair's application, at `url`."""

    def __init__(self, program: "subprocess.Popen[str]", port: int, log: Path) -> None:
        self._program = program
        self._log = log
        self.url = f"http://127.0.0.1:{port}"

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Return the driver's answer, which follows lines of Ray's own."""
        assert self._program.stdin is not None and self._program.stdout is not None
        self._program.stdin.write(json.dumps(command) + "\n")
        self._program.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self._program.stdout is not None
        for line in self._program.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError(f"the driver ended: {self._log.read_text(encoding='utf-8')[-3000:]}")

    def deploy(self, **changes: Any) -> dict[str, Any]:
        return self.obey({"deploy": SETTINGS | changes})

    def num_running(self) -> int:
        return int(self.obey({})["states"].get("RUNNING", 0))


@contextlib.contextmanager
def cluster(log: Path) -> Iterator[Cluster]:
    """Yield a cluster without an application. What Ray says goes into `log`."""
    port = free_port()
    command = [PYTHON, ROOT / "tests" / "ray" / "driver.py", str(port)]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    pipe = subprocess.PIPE
    with (
        log.open("w", encoding="utf-8") as lines,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=lines, text=True, env=environment) as program,
    ):
        running = Cluster(program, port, log)
        try:
            assert running.answer() == {"started": True}
            yield running
        finally:
            assert program.stdin is not None
            program.stdin.close()
            try:
                program.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                program.kill()


def engines() -> dict[int, int]:
    """Return the engine processes of replicas, with the replica's process of each."""
    found: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if "app.engine.process" in (folder / "cmdline").read_text():
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                if "ray::" in (Path("/proc") / parent / "cmdline").read_text():
                    found[int(folder.name)] = int(parent)
    return found


def until(holds: Callable[[], Any], what: str) -> None:
    """Wait until it holds. Raises AssertionError after PATIENCE seconds."""
    ends = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < ends, what
        time.sleep(0.5)
