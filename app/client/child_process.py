"""A process of ours that answers in lines, each within a time limit. Imports neither torch nor ZeroMQ."""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path

KEYS = {"DFLASH_API_KEY", "DFLASH_ADMIN_KEY"}
_LONGEST_LINE = 1 << 24


def engine_environment() -> dict[str, str]:
    """Ours, with this very package first on the path: the engine is started with -P, so that an `app` or a `json.py` in
    the folder where somebody starts the server is never imported in our place. Without the keys that clients show."""
    root = str(Path(__file__).parents[2])
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {name: value for name, value in os.environ.items() if name.upper() not in KEYS}
    return environment | {"PYTHONPATH": os.pathsep.join([root, *others])}


class LineProcess:
    """Made with `start`; always `end` it. In a session of its own, so that Ctrl-C reaches its parent alone."""

    _end_seconds = 2.0

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], said: str = "") -> "LineProcess":
        """`said` is all of its stdin. Raises OSError if it cannot be started."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE if said else DEVNULL,
            stdout=PIPE,
            env=engine_environment(),
            start_new_session=True,
            limit=_LONGEST_LINE,
        )
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(said.encode())
                await process.stdin.drain()
            process.stdin.close()
        return cls(process)

    async def line(self, seconds: float) -> bytes:
        """The next line, or nothing where the process ended or said none for so long."""
        assert self._process.stdout is not None
        try:
            return await asyncio.wait_for(self._process.stdout.readline(), seconds)
        except TimeoutError:
            return b""

    async def end(self) -> str:
        """Why the process says no more, in words; it is ended if it has not yet."""
        try:
            code = await asyncio.wait_for(self._process.wait(), self._end_seconds)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                self._process.kill()
            await self._process.wait()
            return "did not answer in time, and was ended"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
