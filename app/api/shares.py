"""Each client's share of the API process: the bytes of its bodies, and threads for its prompts.

A client may hold as much as it leaves free: one alone gets half, and a newcomer half of the rest.
"""

import asyncio
import contextvars
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from app.engine_client.admission import ClientBusy, Permits

MAX_HELD_BYTES = 2**28
NUM_THREADS = 4

T = TypeVar("T")


@dataclass
class HeldBytes:
    """Count of the bytes of bodies that have arrived and whose prompts are not made yet, by client."""

    total: int = 0
    by_client: Counter[str] = field(default_factory=Counter)


@dataclass
class Held:
    """What a request holds of its client's share until its prompt is made.

    The `permit` counts as one of the client's requests in flight, until permits for its choices take its place.
    """

    client_id: str
    permit: Permits
    _bytes: HeldBytes
    _num_bytes: int = 0

    def add(self, count: int) -> None:
        """Count bytes of the body that have arrived. Raises ClientBusy if they are more than the client's share."""
        self._num_bytes += count
        self._bytes.total += count
        self._bytes.by_client[self.client_id] += count
        if (of_client := self._bytes.by_client[self.client_id]) > MAX_HELD_BYTES - self._bytes.total:
            raise ClientBusy(
                f"Bodies of your requests that are being read have {of_client:,} bytes, and a client may have as many "
                f"as are left free, here {MAX_HELD_BYTES - self._bytes.total:,}. Try again when one has been read."
            )

    def close(self) -> None:
        """Give everything back."""
        self.permit.close()
        self._bytes.total -= self._num_bytes
        self._bytes.by_client[self.client_id] -= self._num_bytes
        if not self._bytes.by_client[self.client_id]:
            del self._bytes.by_client[self.client_id]


@dataclass(eq=False)
class _Job:
    work: Callable[[], Any]
    answer: "asyncio.Future[Any]"


class Threads:
    """Threads that clients use by turns. A job waits while its client has at least as many threads as are free."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="prompts")
        self._num_free = num_threads
        self._running = Counter[str]()
        self._waiting: dict[str, deque[_Job]] = {}  # the client whose turn is next comes first

    async def run(self, client_id: str, work: Callable[..., T], *args: Any) -> T:
        """Return what `work` returns in a thread. If this is cancelled, work that waits is dropped."""
        waiting = self._waiting.setdefault(client_id, deque())
        loop = asyncio.get_running_loop()
        job = _Job(partial(contextvars.copy_context().run, work, *args), loop.create_future())
        waiting.append(job)
        self._start(loop)
        try:
            return cast(T, await job.answer)
        except asyncio.CancelledError:
            if job in waiting:
                waiting.remove(job)
                if not waiting:
                    del self._waiting[client_id]
            raise

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the jobs whose turn has come."""
        while ready := [one for one in self._waiting if self._running[one] < self._num_free]:
            client_id = ready[0]
            waiting = self._waiting.pop(client_id)
            job = waiting.popleft()
            if waiting:
                self._waiting[client_id] = waiting  # behind the others
            self._num_free -= 1
            self._running[client_id] += 1
            end = partial(self._end, loop, client_id, job.answer)
            self._executor.submit(job.work).add_done_callback(partial(_call_soon, loop, end))

    def _end(
        self, loop: asyncio.AbstractEventLoop, client_id: str, answer: "asyncio.Future[Any]", done: "Future[Any]"
    ) -> None:
        self._num_free += 1
        self._running[client_id] -= 1
        if not self._running[client_id]:
            del self._running[client_id]
        if not answer.done():
            if (error := done.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(done.result())
        self._start(loop)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[["Future[Any]"], None], done: "Future[Any]") -> None:
    with suppress(RuntimeError):  # The loop has been closed.
        loop.call_soon_threadsafe(call, done)
