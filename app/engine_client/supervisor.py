"""Supervisor of the engine process: start it, watch it, restart it, give it up.

An engine process fails by its death, or if it has work and stands still. Its requests then end with an error, and new
ones are refused with the reason. The next engine is started after a pause.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

import msgspec
import zmq

from app.engine_client.link import EngineLink
from app.messages import EngineInfo, StepOutput
from app.metrics import Metrics
from app.wire import Command, Fatal, LoadProgress, Ready, Reply, Shutdown, Stepped, Submit

logger = logging.getLogger(__name__)

# Two deaths may be chance. Three within a minute have a cause that a restart does not remove.
MAX_DEATHS = 3
DEATHS_WINDOW_SECONDS = 60.0
# A pause of the whole server counts as a tenth of the timeout.
NUM_NAPS = 10
# An engine that has sent Fatal exits, and may have to release a device first.
_END_GRACE_SECONDS = 2.0

Phase = Literal["loading", "ready", "draining", "dead"]


@dataclass(frozen=True, slots=True)
class EngineState:
    """Phase of the engine. `info` is set once it was ready; `reason` says why it is not ready, if that is known. With
    `user_error` it is dead because its first start failed, as the next would."""

    phase: Phase
    info: EngineInfo | None = None
    progress: LoadProgress | None = None
    reason: str | None = None
    user_error: bool = False


class EngineUnavailable(Exception):
    """Refusal because the engine is loading, draining or dead. The message is a sentence for the client."""

    def __init__(self, message: str, phase: Phase) -> None:
        super().__init__(message)
        self.phase = phase


class Supervisor:
    """Engine processes, one after another.

    `command` is the engine's argv without the addresses, and `settings` is the JSON line for its stdin. An engine that
    has work counts as hanging if it neither sends a result nor computes a layer for `step_timeout` seconds. `nap` lets
    a part of these seconds pass. `backoff` is the pause in seconds before the first restart; it doubles with every
    start that failed.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: str,
        metrics: Metrics,
        *,
        step_timeout: float,
        backoff: float = 1.0,
        nap: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.state = EngineState("loading")
        self._command = command
        self._settings = settings
        self._metrics = metrics
        self._step_timeout = step_timeout
        self._backoff = backoff
        self._nap = nap
        self._state_changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._link: EngineLink | None = None
        self._closing: EngineLink | None = None
        self._has_work = asyncio.Event()
        self._num_outputs = 0
        self._first_request_at: float | None = None
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._num_deaths_at_work = 0
        self._num_failed_starts = 0
        self._was_ready = False

    def start(self, on_output: Callable[[StepOutput], bool], on_death: Callable[[str], None]) -> None:
        """Start the engine process. `on_output` returns True while requests run. `on_death` gets a reason."""
        self._on_output = on_output
        self._on_death = on_death
        self._task = asyncio.create_task(self._run(), name="engine supervisor")

    def send(self, command: Command) -> None:
        """Send a command, which a Stepped must answer in `step_timeout` seconds. Raise what its encoder raises."""
        assert self._link is not None
        self._link.send(command)
        self._has_work.set()
        if isinstance(command, Submit) and self._first_request_at is None:
            self._first_request_at = time.monotonic()

    def drain(self) -> None:
        """Refuse new requests from now on."""
        if self.state.phase != "dead":
            self._set_state(EngineState("draining", info=self.state.info))

    async def stop(self, grace: float) -> None:
        """End the engine process, which gets `grace` seconds to do that itself. A loading one hears nothing."""
        if self._task is None:
            return
        if self._link is not None:
            self._link.send(Shutdown())
            await asyncio.wait({self._task}, timeout=0 if self.state.info is None else grace)
        self._task.cancel()
        await asyncio.wait({self._task})

    def kill(self) -> None:
        """Kill the engine process and remove its folder without waiting, before this process ends at once."""
        for link in (self._link, self._closing):
            if link is not None:
                link.abandon()

    async def next_state(self) -> EngineState:
        """Wait for the state to change, and return it."""
        await self._state_changed.wait()
        return self.state

    def _set_state(self, state: EngineState) -> None:
        self.state = state
        changed, self._state_changed = self._state_changed, asyncio.Event()
        changed.set()

    async def _run(self) -> None:
        """Run one engine process after another until one is not worth restarting."""
        while True:
            fatal = await self._run_engine()
            if self.state.phase == "draining":
                return
            if self._count_death(fatal):
                if not fatal.user_error:  # the server prints the reason of a refusal as its last line
                    logger.error("giving up: %s", fatal.reason)
                self._set_state(EngineState("dead", reason=fatal.reason, user_error=fatal.user_error))
                return
            pause = self._backoff * 2**self._num_failed_starts
            logger.error("%s; starting it again in %.1f s", fatal.reason, pause)
            self._set_state(EngineState("loading", reason=f"{fatal.reason}; it is being started again"))
            self._metrics.count("engine_restarts")
            await asyncio.sleep(pause)

    async def _run_engine(self) -> Fatal:
        """Run one engine process, and return why it ended. Clients get the reason before it is waited for."""
        self._num_failed_starts += 1
        self._has_work.clear()
        grace = 0.0
        try:
            fatal = await self._run_once()
            grace = _END_GRACE_SECONDS
            self._metrics.engine_ended()
            self._on_death(fatal.reason)
            if self.state.phase != "draining":
                self._set_state(EngineState("loading", reason=fatal.reason))
            return fatal
        finally:
            link, self._link, self._closing = self._link, None, self._link
            if link is not None:
                await link.close(grace)

    async def _run_once(self) -> Fatal:
        """Start an engine process and handle its replies, until it ends or has to be killed."""
        # Before any engine was ready a Fatal counts as a user error, because the next start would fail alike.
        try:
            self._link = link = await EngineLink.open(self._command, self._settings)
        except (OSError, zmq.ZMQError) as error:
            return Fatal(f"the engine process cannot be started: {error}", user_error=not self._was_ready)
        hang = asyncio.timeout(None)
        watchdog = asyncio.create_task(self._watch(link, hang), name="engine watchdog")
        try:
            async with hang, aclosing(link.replies()) as replies:
                async for reply in replies:
                    if isinstance(reply, Fatal):
                        return Fatal(reply.reason, reply.user_error or not self._was_ready)
                    self._handle(reply)
            return Fatal(link.exit_reason())
        except TimeoutError:
            reason = f"no layer and no step result within {self._step_timeout:g} s (--step-timeout): the engine hangs"
        except msgspec.DecodeError as error:
            reason = f"the engine process sent a message that cannot be read: {error}"
        finally:
            watchdog.cancel()
        link.kill()
        return Fatal(reason)

    def _handle(self, reply: Reply) -> None:
        if isinstance(reply, Stepped):
            self._num_outputs += 1
            if not self._on_output(reply.output):  # Not earlier, because a hanging engine does not read an Abort.
                self._has_work.clear()
        elif self.state.phase == "draining":
            return
        elif isinstance(reply, LoadProgress):
            self._set_state(EngineState("loading", progress=reply, reason=self.state.reason))
        elif isinstance(reply, Ready):
            self._num_failed_starts = 0
            self._was_ready = True
            self._metrics.engine_ready(reply.info)
            self._set_state(EngineState("ready", info=reply.info))

    async def _watch(self, link: EngineLink, hang: asyncio.Timeout) -> None:
        """Expire `hang` once the engine has had work for `step_timeout` seconds, and sent no Stepped and had no beat.

        Silence is counted in naps, not by the clock: after a pause of the whole server the engine can still reply.
        """
        num_silent = 0
        while num_silent < NUM_NAPS:
            await self._has_work.wait()
            before = self._num_outputs, link.num_beats
            await self._nap(self._step_timeout / NUM_NAPS)
            num_silent = num_silent + 1 if (self._num_outputs, link.num_beats) == before else 0
        hang.reschedule(0.0)

    def _count_death(self, fatal: Fatal) -> bool:
        """Count a death. Return True if the engine must not be restarted.

        That is after a user error, three starts in a row that were never ready, three deaths within a minute, or
        three in a row within a minute of the first request. A hang counts from its beginning.
        """
        now = time.monotonic()
        self._deaths.append(now)
        quick = len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < DEATHS_WINDOW_SECONDS
        first_request_at, self._first_request_at = self._first_request_at, None
        if first_request_at is not None:
            soon = now - first_request_at < DEATHS_WINDOW_SECONDS + self._step_timeout
            self._num_deaths_at_work = self._num_deaths_at_work + 1 if soon else 0
        return fatal.user_error or quick or max(self._num_deaths_at_work, self._num_failed_starts) >= MAX_DEATHS
