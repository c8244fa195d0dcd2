"""Stream of one request's deltas, coalesced while its reader is busy."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from app.messages import FinishReason, TokenDelta
from app.metrics import Metrics


@dataclass(slots=True)
class Timeline:
    """Events of one request, in seconds of `time.monotonic()`, and None before they happen.

    `scheduled` is the beginning of the first step with rows of the request. `cached_tokens` are of the prompt. `steps`
    counts those that verified drafts, and `drafted_tokens` what these emitted. `outcome` is the reason by which the
    request was counted, and `error` the engine's.
    """

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    latest_token: float | None = None
    cached_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    verified: int = 0
    accepted: int = 0
    drafted_tokens: int = 0
    outcome: str = ""
    error: str | None = None

    def begin(self, moment: float) -> None:
        """Take the moment of the first step, not of one after a preemption."""
        if self.scheduled is None:
            self.scheduled = max(moment, self.arrived)

    def add(self, delta: TokenDelta, now: float) -> None:
        """Take a delta that arrives now."""
        if delta.token_ids:
            self.first_token = now if self.first_token is None else self.first_token
            self.latest_token = now
            self.tokens += len(delta.token_ids)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.error = delta.error or self.error
        for step in delta.steps:
            if step.n_verified:
                self.steps += 1
                self.verified += step.n_verified
                self.accepted += step.n_accepted
                self.drafted_tokens += step.n_tokens

    def phases(self) -> Iterator[tuple[str, float]]:
        """Yield the phases that are over, with their seconds."""
        moments = self.arrived, self.scheduled, self.first_token, self.latest_token
        for phase, (start, end) in zip(("queue", "prefill", "decode"), pairwise(moments), strict=True):
            if start is not None and end is not None:
                yield phase, end - start


class RequestStream:
    """Deltas of one request, for one reader, which gives an event with `notify` and calls `take`. Its owner closes it.

    The last delta has a `finish_reason`. Deltas that arrive before they are taken are joined into one: a slow reader
    never costs a queue of messages. A reader of several streams gives all of them the same event. `expired` is set
    before a deadline aborts the request.
    """

    def __init__(
        self, request_id: str, on_close: Callable[["RequestStream"], None], metrics: Metrics, arrived: float
    ) -> None:
        self.request_id = request_id
        self.expired = False
        self.timeline = Timeline(arrived)
        self._on_close = on_close
        self._metrics = metrics
        self._pending: TokenDelta | None = None
        self._event, self._num_awaited = asyncio.Event(), 1
        self._finish_reason: FinishReason | None = None
        self._closed = False

    def put(self, delta: TokenDelta) -> None:
        """Add a delta. Called by the task that reads the engine's replies; never waits."""
        now, latest = time.monotonic(), self.timeline.latest_token
        if delta.token_ids and latest is not None:
            self._metrics.observe("inter_token_latency_seconds", now - latest, len(delta.token_ids))
        elif delta.token_ids:
            self._metrics.observe("time_to_first_token_seconds", now - self.timeline.arrived)
        self.timeline.add(delta, now)
        if self._pending is not None:
            ids, steps = self._pending.token_ids, self._pending.steps
            ids.extend(delta.token_ids)
            steps.extend(delta.steps)
            delta = TokenDelta(delta.request_id, ids, steps, delta.cached_tokens, delta.finish_reason, delta.error)
        self._pending = delta
        if delta.finish_reason is not None or len(delta.token_ids) >= self._num_awaited:
            self._event.set()

    def notify(self, event: asyncio.Event, tokens: int = 1) -> None:
        """Set `event` from now on if `tokens` or the last delta are pending, and at once if anything is."""
        self._event, self._num_awaited = event, tokens
        if self._pending is not None:
            event.set()

    def take(self) -> TokenDelta | None:
        """Return all that has arrived since the last call, or None if nothing has or the stream has ended."""
        if self._finish_reason is not None or self._closed:
            return None
        delta, self._pending = self._pending, None
        if delta is not None:
            self._finish_reason = delta.finish_reason
        return delta

    def close(self, reason: FinishReason | None = None) -> None:
        """End the request, and abort it in the engine if it still runs. Idempotent.

        The request is counted as `reason`, or "deadline" if that has passed, or the engine's finish_reason, or "abort".
        """
        if self._closed:
            return
        self._closed = True
        self._on_close(self)
        line = self.timeline
        line.outcome = reason or ("deadline" if self.expired else self._finish_reason) or "abort"
        self._metrics.count("request_success", label=line.outcome)
        self._metrics.observe("e2e_request_latency_seconds", (line.latest_token or time.monotonic()) - line.arrived)
        for phase, seconds in line.phases():
            self._metrics.observe(f"request_{phase}_time_seconds", seconds)
        for name in ("request_generation_tokens", "request_max_num_generation_tokens"):
            self._metrics.observe(name, line.tokens)
