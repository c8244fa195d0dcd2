"""Child process that answers in lines, each within a time limit. Imports neither torch nor ZeroMQ."""

import asyncio
import contextlib
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path

from app.messages import how_ended

KEYS = {"DFLASH_API_KEY", "DFLASH_ADMIN_KEY"}
_MAX_LINE_BYTES = 1 << 24


def engine_environment() -> dict[str, str]:
    """Return this process's environment with this package first on PYTHONPATH, and without the API keys.

    The engine is started with -P, so that no `app` and no `json.py` of the working directory is imported instead.
    """
    root = str(Path(__file__).parents[2])
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {name: value for name, value in os.environ.items() if name.upper() not in KEYS}
    return environment | {"PYTHONPATH": os.pathsep.join([root, *others])}


class LineProcess:
    """Child process, made with `start`; its owner must `end` it. Ctrl-C reaches only its parent."""

    _end_seconds = 2.0

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], stdin: str = "") -> "LineProcess":
        """Start `command`, which reads `stdin` and then its end. Raise OSError if it cannot be started."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE if stdin else DEVNULL,
            stdout=PIPE,
            env=engine_environment(),
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(stdin.encode())
                await process.stdin.drain()
            process.stdin.close()
        return cls(process)

    async def line(self, seconds: float) -> bytes:
        """Return the next line, or b"" if none came within `seconds` or the process has ended."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):  # wait_for of Python 3.11 loses a cancellation as a line comes
                return await self._process.stdout.readline()
        except TimeoutError:
            return b""

    async def end(self) -> str:
        """Kill the process if it has not ended, and return in words how it ended."""
        try:
            code = await asyncio.wait_for(self._process.wait(), self._end_seconds)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            return "did not answer in time, and was ended"
        return how_ended(code)
