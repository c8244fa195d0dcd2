"""Times and counts of one request, for its span."""

from dataclasses import dataclass

from app.messages import TokenDelta


@dataclass(slots=True)
class Timeline:
    """Events of one request, in seconds of `time.monotonic()`, and None before they happen.

    `scheduled` is the beginning of the first step with rows of the request. `steps` counts those that verified drafts,
    and `drafted_tokens` what these emitted. `outcome` is the reason by which the request was counted, and `error` the
    engine's.
    """

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    latest_token: float | None = None
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
        self.error = delta.error or self.error
        for step in delta.steps:
            if step.n_verified:
                self.steps += 1
                self.verified += step.n_verified
                self.accepted += step.n_accepted
                self.drafted_tokens += step.n_tokens
