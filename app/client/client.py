"""AsyncEngine, the asyncio face of the engine process: start, generate, abort, drain, shut down, and restart.

One task reads the engine's replies; every request has a mailbox of its own. When the engine process dies, or has work
and is silent for too long, each running request ends with an error, new ones are refused with the reason, and the next
epoch is started after a pause. An engine that says its configuration is at fault, fails before it was ever ready and
says why, or dies again and again, is given up: then the state is "dead" for good.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from app.client.admission import Busy, Door, Places
from app.client.link import EngineLink
from app.client.request_stream import Generation
from app.messages import (
    Abort,
    EngineInfo,
    Fatal,
    FlushCache,
    LoadProgress,
    Ready,
    Reply,
    Sampling,
    Shutdown,
    StepOutput,
    StepStats,
    Submit,
    TokenDelta,
)
from app.metrics import Metrics

logger = logging.getLogger(__name__)

_WAITING_PER_SEAT = 4
_LEAST_UNHEARD = 64
_MOST_DEATHS = 3
_DEATHS_WINDOW_SECONDS = 60.0
_END_GRACE_SECONDS = 2.0
_NAPS = 10


@dataclass(frozen=True, slots=True)
class EngineState:
    """Where the engine stands. `info` is set once it was ready; `reason` says why it is not ready, if there is one."""

    phase: Literal["loading", "ready", "draining", "dead"]
    info: EngineInfo | None = None
    progress: LoadProgress | None = None
    reason: str | None = None


class EngineUnavailable(Exception):
    """The engine takes no requests: it is loading, draining or dead. The argument is a sentence for the client."""


class Engine(Protocol):
    """What the HTTP side needs of an engine; AsyncEngine is one, and tests may bring their own."""

    @property
    def state(self) -> EngineState: ...

    @property
    def stats(self) -> StepStats | None: ...

    def ready_info(self) -> EngineInfo: ...

    def most_at_once(self, info: EngineInfo) -> int: ...

    def check_room(self, owner: str) -> None: ...

    def admit(self, owner: str, count: int = 1) -> Places: ...

    def generate(
        self,
        request_id: str,
        token_ids: list[int],
        sampling: Sampling,
        stop_token_ids: list[int],
        max_tokens: int,
        speculate: bool = True,
        cache_salt: str = "",
        arrived: float | None = None,
        deadline: float | None = None,
        places: Places | None = None,
    ) -> Generation: ...

    def flush_cache(self) -> None: ...


class AsyncEngine:
    """`command` is the engine's argv without the addresses; `settings` is the JSON line for its stdin.

    At most `max_queue` requests wait beside those that run together (None: four for each of these), and at most
    `max_of_one` of one owner are in flight (None: no bound). `step_timeout` is how many seconds an engine that has work
    may be silent before it counts as hanging, and `nap` lets a part of them pass; `backoff` is the pause in seconds
    before the first restart, which doubles with every start that failed.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: str,
        metrics: Metrics,
        *,
        step_timeout: float,
        max_queue: int | None = None,
        max_of_one: int | None = None,
        backoff: float = 1.0,
        nap: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._command = command
        self._settings = settings
        self._metrics = metrics
        self._step_timeout = step_timeout
        self._max_queue = max_queue
        self._max_of_one = max_of_one
        self._door = Door(max_of_one)
        self._backoff = backoff
        self._nap = nap
        self._state = EngineState("loading")
        self._state_changed = asyncio.Event()
        self._stats: StepStats | None = None
        self._link: EngineLink | None = None
        self._epoch = 0
        self._running: dict[str, Generation] = {}
        self._places: dict[str, Places] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._engine_has_work = asyncio.Event()
        self._num_step_outputs = 0
        self._num_unheard = 0
        self._deaths: deque[float] = deque(maxlen=_MOST_DEATHS)
        self._worked_since: float | None = None
        self._deaths_at_work = 0
        self._failed_starts = 0
        self._ever_ready = False
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def stats(self) -> StepStats | None:
        """The engine after its last step; None before the first."""
        return self._stats

    async def next_state(self) -> EngineState:
        """Wait for the state to change, and return it."""
        await self._state_changed.wait()
        return self._state

    def _set_state(self, state: EngineState) -> None:
        self._state = state
        changed, self._state_changed = self._state_changed, asyncio.Event()
        changed.set()

    def start(self) -> None:
        """Start the engine process and return; `state` tells how far it is."""
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    def ready_info(self) -> EngineInfo:
        """What was loaded. Raises EngineUnavailable unless requests are taken now."""
        state = self._state
        if state.phase == "ready" and state.info is not None:
            return state.info
        because = f": {state.reason}" if state.reason else ""
        if state.phase == "loading":
            raise EngineUnavailable(f"The model is loading{because}. Ask GET /ready for progress and try again.")
        if state.phase == "draining":
            raise EngineUnavailable("The server is shutting down and takes no new requests.")
        raise EngineUnavailable(f"The engine is dead{because}.")

    def most_at_once(self, info: EngineInfo) -> int:
        """How many places a client could ever be given at once."""
        most = self._most(info)
        return most if self._max_of_one is None else min(most, self._max_of_one)

    def _most(self, info: EngineInfo) -> int:
        """How many requests may be in flight: those that run together, and those that wait."""
        queue = _WAITING_PER_SEAT * info.max_num_seqs if self._max_queue is None else self._max_queue
        return info.max_num_seqs + queue

    def _room(self) -> int:
        """How many requests may be in flight now. Raises EngineUnavailable; Busy while an engine that says nothing has
        more than that to hear of: who leaves gives a place back, but what was sent waits for the engine."""
        most = self._most(self.ready_info())
        if self._num_unheard > max(most, _LEAST_UNHEARD):
            raise Busy(
                f"The engine has said nothing since {self._num_unheard} requests were given up, and no more are sent "
                "to it before it does. Try again shortly."
            )
        return most

    def check_room(self, owner: str) -> None:
        """Raises EngineUnavailable or Busy if no request of this owner would be admitted now."""
        self._door.check(owner, 1, self._room())

    def admit(self, owner: str, count: int = 1) -> Places:
        """Places for requests whose prompts are still to be made, all or none. Raises EngineUnavailable or Busy. The
        caller closes them."""
        return self._door.enter(owner, count, self._room())

    def generate(
        self,
        request_id: str,
        token_ids: list[int],
        sampling: Sampling,
        stop_token_ids: list[int],
        max_tokens: int,
        speculate: bool = True,
        cache_salt: str = "",
        arrived: float | None = None,
        deadline: float | None = None,
        places: Places | None = None,
    ) -> Generation:
        """Submit one request, which uses one of `places`. `request_id` must be new; `arrived` is `time.monotonic()`
        when its client asked, and `deadline` when it is aborted if it still runs.

        Raises EngineUnavailable, or Busy if no `places` were given. Whatever is raised, nothing was sent and no place
        is used. The caller closes the Generation.
        """
        self.ready_info()
        places = places or self.admit(owner="")
        assert self._link is not None and request_id not in self._running
        try:
            self._link.send(
                Submit(request_id, self._epoch, token_ids, sampling, stop_token_ids, max_tokens, speculate, cache_salt)
            )
        except BaseException:
            places.close()
            raise
        places.use()
        generation = Generation(request_id, self._leave, self._metrics, arrived or time.monotonic())
        self._running[request_id] = generation
        self._places[request_id] = places
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._timers[request_id] = loop.call_later(deadline - time.monotonic(), self._expire, generation)
        if self._worked_since is None:
            self._worked_since = time.monotonic()
        self._idle.clear()
        self._engine_has_work.set()
        self._metrics.request_accepted(len(token_ids))
        return generation

    def flush_cache(self) -> None:
        """Forget all cached prefixes: no request submitted from now on finds one. Raises EngineUnavailable or
        Busy."""
        self._room()
        assert self._link is not None
        self._link.send(FlushCache(self._epoch))
        self._num_unheard += 1
        self._engine_has_work.set()

    def abort(self, request_id: str) -> None:
        """End a request as if its reader had gone; an unknown id is not an error, for it may just have finished."""
        if generation := self._running.get(request_id):
            generation.put(TokenDelta(request_id, [], [], finish_reason="abort"))
            self._leave(generation)

    def _expire(self, generation: Generation) -> None:
        """Its deadline has come."""
        generation.expired = True
        self.abort(generation.request_id)

    def _leave(self, generation: Generation) -> None:
        """The reader has gone: free what the engine still holds of it."""
        if self._running.get(generation.request_id) is generation:
            self._forget(generation.request_id)
            if self._link is not None:
                self._link.send(Abort(generation.request_id, self._epoch))
                self._num_unheard += 1

    def _forget(self, request_id: str) -> None:
        """The engine is done with it: its place is free, though it may not be read to its end yet."""
        del self._running[request_id]
        self._places.pop(request_id).leave()
        if timer := self._timers.pop(request_id, None):
            timer.cancel()
        if not self._running:
            self._idle.set()

    def _fail_running(self, reason: str) -> None:
        for request_id, generation in list(self._running.items()):
            generation.put(TokenDelta(request_id, [], [], finish_reason="error", error=reason))
            self._forget(request_id)

    async def drain(self, timeout: float) -> None:
        """Take no new requests and wait for the running ones; what is not done in `timeout` s ends in an error."""
        if self._state.phase == "dead":
            return
        self._set_state(EngineState("draining", info=self._state.info))
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            self._fail_running(f"the server shut down before the request was done (waited {timeout:g} s)")

    async def shutdown(self, grace: float = 5.0) -> None:
        """End the engine process. Running requests end in an error.

        It gets `grace` seconds to do it by itself; while it loads it hears nothing, and gets none.
        """
        if self._state.phase != "dead":
            self._set_state(EngineState("draining", info=self._state.info))
        self._fail_running("the server is shutting down")
        if self._supervisor is None:
            return
        if self._link is not None:
            self._link.send(Shutdown())
            await asyncio.wait({self._supervisor}, timeout=0 if self._state.info is None else grace)
        self._supervisor.cancel()
        await asyncio.wait({self._supervisor})

    async def _supervise(self) -> None:
        """Run one engine process after another until one is not worth restarting."""
        while True:
            self._epoch += 1
            fatal = await self._live()
            if self._state.phase == "draining":
                return
            if self._beyond_hope(fatal):
                logger.error("giving up: %s", fatal.reason)
                self._set_state(EngineState("dead", reason=fatal.reason))
                return
            pause = self._backoff * 2**self._failed_starts
            logger.error("%s; starting it again in %.1f s", fatal.reason, pause)
            self._set_state(EngineState("loading", reason=f"{fatal.reason}; it is being started again"))
            self._metrics.engine_restarted()
            await asyncio.sleep(pause)

    async def _live(self) -> Fatal:
        """One engine process from start to end; returns why it ended.

        Everyone hears of the end before the process is waited for: with a device to give back, that may take a while.
        """
        self._failed_starts += 1
        self._engine_has_work.clear()
        self._num_unheard = 0
        grace = 0.0
        try:
            fatal = await self._converse()
            grace = _END_GRACE_SECONDS
            self._metrics.engine_ended()
            self._fail_running(fatal.reason)
            if self._state.phase != "draining":
                self._set_state(EngineState("loading", reason=fatal.reason))
            return fatal
        finally:
            link, self._link = self._link, None
            if link is not None:
                await link.close(grace)

    async def _converse(self) -> Fatal:
        """Start an engine process and take what it says, until it ends or has to be killed.

        What an engine says against its very first start would be said again: that counts as a user error.
        """
        try:
            self._link = link = await EngineLink.open(self._command, self._settings, self._epoch)
        except OSError as error:
            return Fatal(self._epoch, f"the engine process cannot be started: {error}", user_error=True)
        try:
            async with self._watched(), aclosing(link.replies()) as replies:
                async for reply in replies:
                    if isinstance(reply, Fatal) and reply.epoch == self._epoch:
                        return Fatal(self._epoch, reply.reason, reply.user_error or not self._ever_ready)
                    self._take(reply)
            return Fatal(self._epoch, link.exit_reason())
        except TimeoutError:
            reason = f"no step result within {self._step_timeout:g} s (--step-timeout): the engine hangs"
        except msgspec.DecodeError as error:
            reason = f"the engine process sent a message that cannot be read: {error}"
        link.kill()
        return Fatal(self._epoch, reason)

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """The body is left with TimeoutError once the engine hangs."""
        async with asyncio.timeout(None) as patience:
            watchdog = asyncio.create_task(self._watch(patience), name="engine watchdog")
            try:
                yield
            finally:
                watchdog.cancel()

    async def _watch(self, patience: asyncio.Timeout) -> None:
        """Let `patience` end when the engine has had work for `step_timeout` seconds and sent no StepOutput.

        Silence is counted in naps, not by the clock: when the whole server was paused, that is one nap of it, and the
        engine can still speak.
        """
        silent_naps = 0
        while silent_naps < _NAPS:
            await self._engine_has_work.wait()
            before = self._num_step_outputs
            await self._nap(self._step_timeout / _NAPS)
            silent_naps = silent_naps + 1 if self._num_step_outputs == before else 0
        patience.reschedule(0.0)

    def _take(self, reply: Reply) -> None:
        if reply.epoch != self._epoch:
            return
        if isinstance(reply, StepOutput):
            self._stats = reply.stats
            self._num_step_outputs += 1
            self._num_unheard = 0
            self._metrics.step(reply)
            for delta in reply.deltas:
                if generation := self._running.get(delta.request_id):
                    if delta.finish_reason is not None:
                        self._forget(delta.request_id)
                    generation.put(delta)
            if not self._running:  # And not before: an engine that hangs has not heard an Abort.
                self._engine_has_work.clear()
        elif self._state.phase == "draining":
            return
        elif isinstance(reply, LoadProgress):
            self._set_state(EngineState("loading", progress=reply, reason=self._state.reason))
        elif isinstance(reply, Ready):
            self._failed_starts = 0
            self._ever_ready = True
            self._set_state(EngineState("ready", info=reply.info))

    def _beyond_hope(self, fatal: Fatal) -> bool:
        """A user error, three starts in a row that never became ready, three deaths within a minute, or three in a row
        that came, or began as a hang, within a minute of an engine's first work."""
        now = time.monotonic()
        self._deaths.append(now)
        quick = len(self._deaths) == _MOST_DEATHS and now - self._deaths[0] < _DEATHS_WINDOW_SECONDS
        worked_since, self._worked_since = self._worked_since, None
        if worked_since is not None:
            soon = now - worked_since < _DEATHS_WINDOW_SECONDS + self._step_timeout
            self._deaths_at_work = self._deaths_at_work + 1 if soon else 0
        often = quick or self._deaths_at_work >= _MOST_DEATHS
        return fatal.user_error or often or self._failed_starts >= _MOST_DEATHS
