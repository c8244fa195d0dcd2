"""`dflash-server serve` with the demo pair in a process of its own, and what Linux says of it."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from app.engine_client.child_process import engine_environment
from tests.server.demo import children, is_gone, state

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
"""Gauges that must be zero while no request is served."""
PATIENCE = 600.0
"""Seconds for what has no time limit of its own, on a machine that is busy."""
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resources of a process: resident memory in bytes, and open descriptors."""

    memory: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> "Footprint":
        """Raises OSError if there is no such process."""
        proc = Path(f"/proc/{pid}")
        pages = int((proc / "statm").read_text().split()[1])
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), sum(1 for _ in (proc / "fd").iterdir()))


class DemoServer:
    """Context in which the server lives. SIGTERM ends it, with exit code 0 and nothing left behind.

    Its temporary files have a folder of their own, which holds no other process's files.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        self.flags = list(flags)
        self.exit_complaints: list[str] = []
        self._last_children: list[int] | None = None

    def __enter__(self) -> "DemoServer":
        self._folder = tempfile.TemporaryDirectory(prefix="soak-")
        self.log = Path(self._folder.name) / "log"
        self._ipc = Path(self._folder.name) / "tmp"
        self._ipc.mkdir()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "app", "serve", "demo", "--port", "0", "--device", "cpu", *self.flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"OMP_NUM_THREADS": "1"} | engine_environment() | {"TMPDIR": str(self._ipc)},
                start_new_session=True,
            )
        try:
            self.url = self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < deadline:
            if found := re.search(r"ready: .* at (http://\S+)", self.log.read_text()):
                return found.group(1)
            time.sleep(_POLL_SECONDS)
        raise RuntimeError(f"the server was never ready:\n{self.log.read_text()}")

    def engine(self) -> int | None:
        """The process of the engine that lives, if one does."""
        return next((pid for pid in children(self.process.pid) if state(pid) != "Z"), None)

    def footprint(self) -> Footprint:
        return Footprint.of(self.process.pid)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", trust_env=False, timeout=PATIENCE).status_code == 200
        except httpx.TransportError:
            return False

    def lost(self) -> str | None:
        """Why it takes no requests though nothing is done to it, or None; an engine that starts is waited for."""
        deadline = time.monotonic() + PATIENCE
        while not self.is_ready():
            if self.process.poll() is not None:
                return f"the server ended with {self.process.returncode}:\n{self.last_words()}"
            if time.monotonic() > deadline:
                return f"the server was not ready within {PATIENCE:g} s:\n{self.last_words()}"
            time.sleep(_POLL_SECONDS)
        return None

    def gauges(self) -> dict[str, float]:
        """GAUGES as /metrics has them now."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=PATIENCE).text
        return {name: metric(text, name) for name in GAUGES}

    def untidy(self) -> list[str]:
        """Return the remains of dead engines."""
        complaints = [f"process {pid} is a zombie" for pid in children(self.process.pid) if state(pid) == "Z"]
        folders = [path.name for path in self._ipc.iterdir()]
        if len(folders) != 1:
            complaints.append(f"one folder of sockets is wanted, for the engine that lives; there are {folders}")
        return complaints

    def terminate(self) -> None:
        """Once: a second signal would cut running requests off."""
        if self._last_children is None:
            self._last_children = children(self.process.pid) if self.process.poll() is None else []
            self.process.send_signal(signal.SIGTERM)

    def __exit__(self, *_: object) -> None:
        """End the server, and add its faults to `exit_complaints`."""
        self.terminate()
        try:
            code = self.process.wait(PATIENCE)
            if code != 0:
                self.exit_complaints.append(f"SIGTERM ended the server with {code}:\n{self.last_words()}")
        except subprocess.TimeoutExpired:
            self.exit_complaints.append(f"the server did not end within {PATIENCE:g} s of SIGTERM")
            self.process.kill()
            self.process.wait()
        self.exit_complaints += [
            f"process {pid} outlived the server" for pid in self._last_children or () if not is_gone(pid)
        ]
        self.exit_complaints += [f"{path.name} outlived the server" for path in self._ipc.iterdir()]
        if tracebacks := self.log.read_text().count("Traceback (most recent call last)"):
            self.exit_complaints.append(f"{tracebacks} tracebacks in the log:\n{self.last_words(200)}")
        self._folder.cleanup()

    def last_words(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text().splitlines()[-lines:])


def metric(text: str, name: str) -> float:
    """The value of a metric without labels in an exposition."""
    found = re.search(rf"^dflash:{name} (\S+)$", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"/metrics has no {name}")
    return float(found.group(1))
