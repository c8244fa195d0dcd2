"""Servers that the bench starts: a `dflash-server serve` process for each variant."""

import contextlib
import ctypes
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import httpx

from app.config.error import ConfigError
from app.engine_client.child_process import engine_environment
from tools.bench.client import ServerError

VARIANTS = {
    "plain": ("--no-speculation",),
    "dflash": ("--verify", "full"),
    "auto": ("--verify", "auto"),
}
WISHES = "plain, dflash, auto, k=N (verify N rows of a block), b=N (blocks of N rows)"
OURS = ("--host", "--port", "--root-path")
_POLL_SECONDS = 0.1
_END_SECONDS = 20.0
_LINES_SHOWN = 4


def flags_of(variant: str) -> tuple[str, ...]:
    """Return the flags of `serve` for a variant. Raises ConfigError for an unknown one."""
    if variant in VARIANTS:
        return VARIANTS[variant]
    if found := re.fullmatch(r"k=([1-9]\d*)", variant):
        return ("--verify", found.group(1))
    if found := re.fullmatch(r"b=([1-9]\d*)", variant):
        return ("--verify", "full", "--speculative-dflash-block-size", found.group(1))
    raise ConfigError(f"--compare: there is no variant {variant!r}", f"there are {WISHES}")


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_the_bench() -> None:
    """Ask Linux to end this process with the one that started it, which may be killed."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ServerProcess:
    """Context with a running server, in a separate session because Ctrl-C must reach only the bench.

    `ready` is the path that answers 200 when it has loaded.
    """

    def __init__(self, variant: str, command: Sequence[str], port: int, ready: str = "/ready") -> None:
        self.variant, self.command, self.port, self.ready = variant, command, port, ready
        self.url = f"http://127.0.0.1:{port}"

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=engine_environment(),
            start_new_session=True,
            preexec_fn=_end_with_the_bench,
        )
        return self

    def wait_until_ready(self, tell: Callable[[str], None]) -> None:
        """Wait until it is ready, and tell the stage.

        Raises ServerError with the end of the log if the server ends.
        """
        with httpx.Client(base_url=self.url, timeout=5.0, trust_env=False) as http:
            while self.process.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    response = http.get(self.ready)
                    if response.status_code == 200:
                        return
                    progress = response.json().get("progress")
                    tell(f"starting {self.variant}: {progress['stage'] if progress else 'loading'}")
                time.sleep(_POLL_SECONDS)
        raise ServerError(
            f"the server {self.variant} did not start: {self.last_words()}", f"it was started with {self}"
        )

    def last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-_LINES_SHOWN:] if line.strip()) or "it said nothing"

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def __str__(self) -> str:
        return shlex.join([Path(self.command[0]).name, *self.command[1:]])


class OwnServer(ServerProcess):
    """This package's server. `program` is the module that gets the command line, preceded by its arguments."""

    def __init__(self, variant: str, serve_args: Sequence[str], program: Sequence[str] = ("app",)) -> None:
        for argument in serve_args:
            if argument.partition("=")[0] in OURS:
                raise ConfigError(f"--serve-args {argument}: each server gets an address of its own", "leave it out")
        port = free_port()
        self.arguments = ["serve", *serve_args, *flags_of(variant), "--no-prefix-caching", "--port", str(port)]
        command = [sys.executable, "-P", "-m", *program, *self.arguments, "--host", "127.0.0.1"]
        super().__init__(variant, command, port)

    def __str__(self) -> str:
        return f"dflash-server {' '.join(self.arguments)}"


def free_port() -> int:
    """Return a free port that Linux gives to no connection and to no server on port 0: those are 32768 and more."""
    while True:
        port = secrets.choice(range(20_000, 32_768))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
