"""EngineClient, the asyncio side of the engine process: submit, abort, flush, drain.

One task reads the engine's replies, and every request has its own stream. When the engine dies or hangs, every request
that runs ends with an error, so that no reader hangs.
"""

import asyncio
import time
from typing import NamedTuple

from app.engine_client.admission import Admission, Permits
from app.engine_client.kv_events import KvEventPublisher
from app.engine_client.request_stream import RequestStream
from app.engine_client.supervisor import EngineState, EngineUnavailable, Supervisor
from app.messages import CacheEvent, EngineInfo, Request, StepOutput, StepStats, TokenDelta
from app.metrics import Metrics
from app.wire import Abort, FlushCache, Submit


class _Running(NamedTuple):
    """A request that the engine works on."""

    stream: RequestStream
    permits: Permits
    timer: asyncio.TimerHandle | None


class EngineClient:
    """Client of one engine. `kv_events` publishes how its prefix cache changes."""

    def __init__(
        self, supervisor: Supervisor, admission: Admission, metrics: Metrics, kv_events: KvEventPublisher | None = None
    ) -> None:
        self.supervisor = supervisor
        self.admission = admission
        self.stats: StepStats | None = None  # after the last step of the running engine
        self._metrics = metrics
        self._kv_events = kv_events
        self._running: dict[str, _Running] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    def start(self) -> None:
        """Start the engine process and return; `state` tells its progress."""
        if self._kv_events is not None:
            self._kv_events.start()
        self.supervisor.start(self._handle, self._on_death)

    @property
    def state(self) -> EngineState:
        return self.supervisor.state

    async def loaded(self) -> None:
        """Wait while the engine is loading."""
        while self.state.phase == "loading":
            await self.supervisor.next_state()

    @property
    def num_running(self) -> int:
        """The number of requests that were submitted and have not ended in the engine."""
        return len(self._running)

    def ready_info(self) -> EngineInfo:
        """Return what is loaded. Raise EngineUnavailable unless the engine takes requests now."""
        state = self.state
        if state.phase == "ready" and state.info is not None:
            return state.info
        because = f": {state.reason}" if state.reason else ""
        messages = {
            "loading": f"The model is loading{because}. Ask GET /ready for progress and try again.",
            "draining": "The server is shutting down and takes no new requests.",
        }
        raise EngineUnavailable(messages.get(state.phase, f"The engine is dead{because}."), state.phase)

    def check(self) -> EngineInfo:
        """Return what is loaded, before a request's body is read. Raise EngineUnavailable or Busy if it is refused."""
        info = self.ready_info()
        self.admission.check(1, info.max_num_seqs)
        return info

    def submit(
        self,
        request: Request,
        *,
        arrived: float | None = None,
        deadline: float | None = None,
        permits: Permits | None = None,
    ) -> RequestStream:
        """Send one request to the engine, and return the stream of its deltas, which the caller closes.

        `request.request_id` must be new. `arrived` is the `time.monotonic()` when the client asked, and `deadline` the
        one at which a running request is aborted. One of `permits` is used; without `permits` one is acquired. Raise
        EngineUnavailable or Busy, or what the encoder raises. Then nothing was sent and no permit was used.
        """
        info = self.ready_info()  # the engine may have ended since the request came
        permits = permits or self.admission.acquire("", 1, info.max_num_seqs)
        assert request.request_id not in self._running
        try:
            self.supervisor.send(Submit(request))
        except BaseException:
            permits.close()
            raise
        permits.use()
        now = time.monotonic()
        stream = RequestStream(request.request_id, self._leave, self._metrics, arrived or now)
        loop = asyncio.get_running_loop()
        timer = None if deadline is None else loop.call_later(deadline - now, self.expire, request.request_id)
        self._running[request.request_id] = _Running(stream, permits, timer)
        self.idle.clear()
        self._metrics.count("prompt_tokens", len(request.token_ids))
        self._metrics.observe("request_prompt_tokens", len(request.token_ids))
        return stream

    def flush_cache(self) -> None:
        """Forget all cached prefixes: no request submitted from now on finds one. Raise EngineUnavailable or Busy."""
        self.admission.check(0, self.ready_info().max_num_seqs)
        self.supervisor.send(FlushCache())
        self.admission.num_unacknowledged += 1

    def abort(self, request_id: str) -> None:
        """End a request with an "abort". An unknown id is ignored: the request may just have finished."""
        if running := self._running.get(request_id):
            running.stream.put(TokenDelta(request_id, [], [], finish_reason="abort"))
            self._leave(running.stream)

    def expire(self, request_id: str) -> None:
        """End a request whose deadline has come."""
        if running := self._running.get(request_id):
            running.stream.expired = True
            self.abort(request_id)

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and wait for the running ones. Those left after `timeout` seconds end in an error."""
        self.supervisor.drain()
        try:
            async with asyncio.timeout(timeout):
                await self.idle.wait()
        except TimeoutError:
            self._fail_running(f"the server shut down before the request was done (waited {timeout:g} s)")

    async def shutdown(self, grace: float = 5.0) -> None:
        """End the engine process, which gets `grace` seconds to do that itself. Running requests end in an error."""
        self.supervisor.drain()
        self._fail_running("the server is shutting down")
        await self.supervisor.stop(grace)
        kv_events, self._kv_events = self._kv_events, None
        if kv_events is not None:
            await kv_events.stop(grace)

    def _handle(self, output: StepOutput) -> bool:
        """Hand every delta to its stream. Return True while requests run."""
        self.admission.num_unacknowledged = 0
        self._metrics.step(output)
        self.stats = output.stats
        if self._kv_events is not None and output.cache_events:
            self._kv_events.publish(output.cache_events)
        for request_id in output.scheduled:
            if running := self._running.get(request_id):
                running.stream.timeline.begin(time.monotonic() - output.stats.seconds)
        for delta in output.deltas:
            if running := self._running.get(delta.request_id):
                if delta.finish_reason is not None:
                    self._forget(delta.request_id)
                delta.steps[:] = [step._replace(seconds=output.stats.seconds) for step in delta.steps]
                running.stream.put(delta)
        return bool(self._running)

    def _on_death(self, reason: str) -> None:
        self.stats = None
        if self._kv_events is not None:
            self._kv_events.publish([CacheEvent("cleared")])
        self._fail_running(reason)
        self.admission.num_unacknowledged = 0

    def _leave(self, stream: RequestStream) -> None:
        """Abort the request of a closed stream, if it still runs."""
        if stream.request_id in self._running:
            self._forget(stream.request_id)
            self.supervisor.send(Abort(stream.request_id))
            self.admission.num_unacknowledged += 1

    def _forget(self, request_id: str) -> None:
        """Return the permit of a request that the engine is done with, though its stream may not be read yet."""
        _, permits, timer = self._running.pop(request_id)
        permits.release()
        if timer is not None:
            timer.cancel()
        if not self._running:
            self.idle.set()

    def _fail_running(self, reason: str) -> None:
        for request_id, running in list(self._running.items()):
            running.stream.put(TokenDelta(request_id, [], [], finish_reason="error", error=reason))
            self._forget(request_id)
