"""One request as its reader sees it: a mailbox whose undelivered deltas are coalesced."""

import asyncio
import time
from collections.abc import Callable

from app.messages import FinishReason, TokenDelta
from app.metrics import Metrics

Leave = Callable[["Generation"], None]
"""Tells the engine that a Generation's reader has gone."""


class Generation:
    """The `TokenDelta`s of one request; the last one has a `finish_reason`. Whoever has a Generation must `close` it.

    Deltas that arrive while the reader is busy wait as one: tokens concatenated, `steps` keeping the step bounds. So a
    slow reader costs its tokens and never a queue of messages. It is an asynchronous iterator; who reads several at
    once has all of them ring one bell, and takes what has come. `expired`: its deadline has aborted it.
    """

    def __init__(self, request_id: str, leave: "Leave", metrics: Metrics, arrived: float) -> None:
        self.request_id = request_id
        self.expired = False
        self._leave = leave
        self._metrics = metrics
        self._arrived = arrived
        self._latest = arrived
        self._any_token = False
        self._waiting: TokenDelta | None = None
        self._bell = asyncio.Event()
        self._ended: FinishReason | None = None
        self._closed = False

    def put(self, delta: TokenDelta) -> None:
        """Called by the engine's reader task only; never waits."""
        now = time.monotonic()
        if delta.token_ids:
            if self._any_token:
                self._metrics.later_tokens(now - self._latest, len(delta.token_ids))
            else:
                self._metrics.first_token(now - self._arrived)
            self._any_token = True
        self._latest = now
        self._waiting = delta if self._waiting is None else _joined(self._waiting, delta)
        self._bell.set()

    def ring(self, bell: asyncio.Event) -> None:
        """From now on set `bell` whenever something has come; at once if something has."""
        self._bell = bell
        if self._waiting is not None:
            bell.set()

    def take(self) -> TokenDelta | None:
        """Everything that has come since the last call; None if that is nothing, or if all is read or closed."""
        if self._ended is not None or self._closed:
            return None
        delta, self._waiting = self._waiting, None
        if delta is not None:
            self._ended = delta.finish_reason
        return delta

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> TokenDelta:
        """What `take` gives; waits if that is nothing. A cancelled wait sends Abort."""
        while self._ended is None and not self._closed:
            if (delta := self.take()) is not None:
                return delta
            self._bell.clear()
            try:
                await self._bell.wait()
            except BaseException:
                self.close()
                raise
        raise StopAsyncIteration

    def close(self, reason: FinishReason | None = None) -> None:
        """End the request; the engine is told to abort what still runs. Idempotent.

        It is booked under `reason`, else as "deadline" if that has come, else under the engine's own finish_reason,
        else as "abort".
        """
        if self._closed:
            return
        self._closed = True
        self._leave(self)
        ended = "deadline" if self.expired else self._ended
        self._metrics.request_ended(reason or ended or "abort", self._latest - self._arrived)

    async def aclose(self) -> None:
        """`close`, for contextlib.aclosing."""
        self.close()


def _joined(before: TokenDelta, delta: TokenDelta) -> TokenDelta:
    """Both as one, in lists that belong to `before`."""
    before.token_ids.extend(delta.token_ids)
    before.steps.extend(delta.steps)
    return TokenDelta(
        before.request_id,
        before.token_ids,
        before.steps,
        max(before.cached_tokens, delta.cached_tokens),
        delta.finish_reason,
        delta.error,
    )
