"""One request as its reader sees it: a mailbox whose undelivered deltas are coalesced."""

import asyncio
import time
from collections.abc import Callable

from app.metrics import Metrics
from app.types import FinishReason, SpecStep, TokenDelta

Leave = Callable[["Generation"], None]
"""Tells the engine that a Generation's reader has gone."""


class Generation:
    """An asynchronous iterator over the `TokenDelta`s of one request; the last one has a `finish_reason`.

    Deltas that arrive while the reader is busy wait as one: tokens concatenated, `steps` keeping the step bounds. So a
    slow reader costs its tokens and never a queue of messages. Whoever has a Generation must `close` it.
    """

    def __init__(self, request_id: str, leave: "Leave", metrics: Metrics, arrived: float) -> None:
        self.request_id = request_id
        self._leave = leave
        self._metrics = metrics
        self._arrived = arrived
        self._latest = arrived
        self._any_token = False
        self._clear()
        self._filled = asyncio.Event()
        self._ended: FinishReason | None = None
        self._closed = False

    def _clear(self) -> None:
        self._token_ids: list[int] = []
        self._steps: list[SpecStep] = []
        self._cached_tokens = 0
        self._finish_reason: FinishReason | None = None
        self._error: str | None = None

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
        self._token_ids.extend(delta.token_ids)
        self._steps.extend(delta.steps)
        self._cached_tokens = max(self._cached_tokens, delta.cached_tokens)
        self._finish_reason = delta.finish_reason
        self._error = delta.error
        self._filled.set()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> TokenDelta:
        """Everything that has come since the last call; waits if that is nothing. A cancelled wait sends Abort."""
        if self._ended is not None or self._closed:
            raise StopAsyncIteration
        try:
            await self._filled.wait()
        except BaseException:
            self.close()
            raise
        self._filled.clear()
        delta = TokenDelta(
            request_id=self.request_id,
            token_ids=self._token_ids,
            steps=self._steps,
            cached_tokens=self._cached_tokens,
            finish_reason=self._finish_reason,
            error=self._error,
        )
        self._clear()
        if delta.finish_reason is not None:
            self._ended = delta.finish_reason
        return delta

    def close(self, reason: FinishReason | None = None) -> None:
        """End the request; the engine is told to abort what still runs. Idempotent.

        It is booked under `reason`, else under the engine's own finish_reason, else as "abort".
        """
        if self._closed:
            return
        self._closed = True
        self._leave(self)
        self._metrics.request_ended(reason or self._ended or "abort", self._latest - self._arrived)

    async def aclose(self) -> None:
        """`close`, for contextlib.aclosing."""
        self.close()
