"""Faults of a working engine. A fault that may cost requests their answers opens a Window."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass

from tests.soak.checks import Window
from tests.soak.server import PATIENCE, DemoServer

_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Fault:
    """Kind of a fault. If it ended an engine, also the seconds until the next one was ready."""

    kind: str
    seconds: float | None = None


@dataclass
class Faults:
    """`pause` is how long an engine is stopped that has to survive it, `step_timeout` after how long it may not.
    `lost` says after what the server was not ready again, and nothing can go on. Without an engine it does nothing, and
    errors of requests have no excuse then.
    """

    server: DemoServer
    step_timeout: float
    pause: float
    done: list[Fault]
    windows: list[Window]
    lost: str | None = None

    async def killed(self) -> None:
        await self._ended("SIGKILL", signal.SIGKILL)

    async def hung(self) -> None:
        await self._ended("SIGSTOP for good", signal.SIGSTOP)

    async def paused(self) -> None:
        """Stop the engine for less than the step timeout. No request may lose anything."""
        await self._stopped([], self.pause)
        self.done.append(Fault(f"SIGSTOP for {self.pause:g} s"))

    async def slept(self) -> None:
        """Stop both processes for longer than the step timeout, like a closed laptop. No request may lose anything."""
        seconds = 1.2 * self.step_timeout
        await self._stopped([self.server.process.pid], seconds)
        self.done.append(Fault(f"both processes stopped for {seconds:g} s"))

    async def _stopped(self, others: list[int], seconds: float) -> None:
        """The engine, which goes on first, and others."""
        if (engine := self.server.engine()) is None:
            return
        for pid in (*others, engine):
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        for pid in (engine, *others):
            os.kill(pid, signal.SIGCONT)

    async def _ended(self, kind: str, number: signal.Signals) -> None:
        """The window ends when the next engine is ready."""
        if (engine := self.server.engine()) is None:
            return
        began = time.monotonic()
        os.kill(engine, number)
        while self.server.engine() in (engine, None) or not await asyncio.to_thread(self.server.is_ready):
            if time.monotonic() - began > PATIENCE:
                self.lost = f"no engine was ready within {PATIENCE:g} s of {kind}:\n{self.server.last_words()}"
                break
            await asyncio.sleep(_POLL_SECONDS)
        self.windows.append(Window("engine", began, time.monotonic()))
        self.done.append(Fault(kind, time.monotonic() - began))
