"""Compilation while the engine serves: a process at the lowest priority, and a thread that waits for it."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from app.engine.compile.aot import Compiled
from app.engine.compile.packages import load_kept, take_up
from app.engine.step.runner import ModelRunner

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "app.engine.compiler")

_NICE = 19
"""The lowest priority, because requests come first."""
_NEEDED_BYTES = 3 << 29
"""Memory of the process and g++ together: 0.85 GB for 6 layers and 1.16 GB for 33 were measured."""
_END_SECONDS = 2.0
"""Time for the end of a process that was killed, or for code that is being loaded, which takes a tenth of it."""
_LOOK_SECONDS = 0.05
"""Time between looks for a process that is just being started."""


class Compiling:
    """The process that compiles the forwards of an engine's runner, and what comes of it.

    `settings` is the JSON line of the EngineConfig for its stdin, whose end tells it that the engine is gone. It leads
    a process group, which it ends with g++ in it. `on_end` is called once it is known how the forwards run.
    """

    def __init__(
        self, runner: ModelRunner, settings: str, on_end: Callable[[], object], command: Sequence[str] = COMMAND
    ) -> None:
        self._runner = runner
        self._on_end = on_end
        self._command = [*command, str(_NICE)]
        self._started = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._compiled: list[Compiled] | None = None
        self._reason = ""
        self._thread = threading.Thread(target=self._run, args=(settings,), daemon=True)
        self._thread.start()

    def take_up(self) -> bool:
        """Let the engine run what was compiled, if that has ended. Call it between two steps, until it returns True."""
        if self._thread.is_alive():
            return False
        if self._compiled is None:
            logger.warning("no faster code, because it could not be compiled: %s", self._reason)
        else:
            take_up(self._runner, self._compiled)
            logger.info("faster code is in use from here on, after %.0f s", time.monotonic() - self._started)
        self._on_end()
        return True

    def close(self) -> None:
        """End the process, with g++ if it runs, and the thread, which removes its files once it has loaded code."""
        until = time.monotonic() + _END_SECONDS
        while self._thread.is_alive() and time.monotonic() < until:
            if self._process and self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._thread.join(_LOOK_SECONDS)

    def _run(self, settings: str) -> None:
        """Run the process to its end, and load what it has kept, or note why it has not."""
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:
            if (free := _free_bytes(self._runner)) < _NEEDED_BYTES:
                self._reason = f"{free >> 20} MiB are free after KV, and it takes {_NEEDED_BYTES >> 20} MiB"
                return
            logger.info("serving now; faster code is being compiled in the background, about 2 minutes")
            with subprocess.Popen(self._command, stdin=pipe, stdout=null, stderr=pipe, process_group=0) as process:
                self._process = process
                assert process.stdin is not None and process.stderr is not None
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(f"{settings}\n".encode())
                    process.stdin.flush()
                said = process.stderr.read().decode(errors="replace")
                code = process.wait()
            if code:
                self._reason = f"the process ended with exit code {code}: {_reason(said)}"
            else:
                self._compiled = load_kept(self._runner.forward)
                self._reason = "it kept other code than is wanted"
        except Exception as error:
            self._reason = f"{type(error).__name__}: {error}"


def _reason(said: str) -> str:
    """Return the last line about an error, because g++ shows code after it, else the last one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "")


def _free_bytes(runner: ModelRunner) -> int:
    """Return free memory less that of KV, which counts once it is written.

    Where it runs out Linux may end all of a container (`memory.oom.group`, which Kubernetes sets), and each new start
    would compile again.
    """
    kv = sum(part.nbytes for pool in runner.pools for part in (pool.all_layers.k, pool.all_layers.v))
    return runner.backend.memory()[0] - kv
