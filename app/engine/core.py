"""EngineCore: add requests, call step(), get tokens. The whole architecture is `step`."""

import time
from collections.abc import Callable
from typing import NamedTuple

from app.engine.faults import Faults
from app.engine.schedule.batch import Batch
from app.engine.schedule.overlap import schedule_ahead
from app.engine.schedule.scheduler import Scheduler
from app.engine.step.runner import ModelRunner, PendingStep, no_rows
from app.messages import Request, StepOutput, TokenDelta

_FAULT = "fault"
"""Reason of a step that was not launched ahead because its launch failed."""


class Launched(NamedTuple):
    """A step in flight: launched, and not read yet."""

    batch: Batch
    pending: PendingStep


class EngineCore:
    """One scheduler over one runner. Not thread-safe: its owner calls it from one thread.

    With `overlap` the device gets the next step before this one is read, unless that depends on the result. So the
    device computes while the host commits, takes commands, and builds the following step.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, *, overlap: bool = False) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.overlap = overlap
        self.faults = Faults(scheduler)
        self.in_flight: Launched | None = None
        """The step that was launched before the last one was read, if there is one."""
        self._ended = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, naming what is wrong, for one that could never run."""
        vocab_size = self.runner.forward.target.config.vocab_size
        added = [token for token, _ in request.sampling.logit_bias]
        added += request.stop_token_ids if request.sampling.min_tokens else ()
        if not all(0 <= token < vocab_size for token in (*request.token_ids, *added)):
            raise ValueError(
                f"request {request.request_id}: token ids, of logit_bias and stop_token_ids too, must lie in "
                f"0..{vocab_size - 1}"
            )
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def flush_cache(self) -> None:
        """Evict all cached prefixes."""
        self.scheduler.flush_cache()

    def step(self) -> StepOutput:
        """Run one step for all sequences; call only while `has_work`. `faults.py` has the steps that fail.

        Schedule and launch it, unless it is in flight already. With `overlap` schedule and launch the next one. Then
        read this one. Raises an error that no sequence is to blame for.
        """
        ahead, self.in_flight = self.in_flight, None
        waits_for = ""
        self.scheduler.has_progress = False
        if ahead and ahead.batch.has_live_rows:
            started = self._ended  # the device began it as it ended the previous one
        else:
            ahead, started = None, time.perf_counter()
        batch = ahead.batch if ahead else self.scheduler.schedule()
        try:
            pending = ahead.pending if ahead else self.launch(batch)
            if self.overlap:
                self.in_flight, waits_for = self._launch_after(batch)
            result = pending.read()
        except Exception as error:
            deltas = self._recover(batch, error, next_has_begun=bool(self.in_flight) or waits_for == _FAULT)
            return self._output(batch, deltas, started, waits_for, has_failed=True)
        return self._output(batch, self.scheduler.commit(batch, result), started, waits_for)

    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step on the device. The runner gets arrays only."""
        if any(slots := self.scheduler.to_scrub):
            self.runner.scrub(slots)
            for numbers in slots:
                numbers.clear()
        return self.runner.launch(self.runner.layout.build(batch)) if batch else no_rows()

    def _launch_after(self, batch: Batch) -> tuple[Launched | None, str]:
        """Launch the step after `batch`, which is in flight, or return why that waits for the result."""
        try:
            after = schedule_ahead(self.scheduler, batch, draws=self.runner.layout.draws_in_graphs)
            return (Launched(after, self.launch(after)), "") if isinstance(after, Batch) else (None, after)
        except Exception as error:
            self.faults.give_up_ahead(error, self.runner)
            return None, _FAULT

    def _recover(self, batch: Batch, error: Exception, *, next_has_begun: bool) -> list[TokenDelta]:
        """Return the deltas of a step that failed, after its sequences have run again."""
        self.in_flight = None
        if next_has_begun and self.scheduler.states.num_slots:
            self.overlap = False  # then the next failure can be isolated
            return self.faults.recompute(batch, error, self.runner)
        return self.faults.isolate(batch, error, self.runner, self.launch)

    def _output(
        self, batch: Batch, deltas: list[TokenDelta], started: float, waits_for: str, *, has_failed: bool = False
    ) -> StepOutput:
        """Return the step's output. The scheduler learns the time of a step that did not fail."""
        self._ended = time.perf_counter()
        scheduler = self.scheduler
        seconds = self._ended - started
        if not has_failed:
            scheduler.record_time(batch, seconds)
        if scheduler.last_fault:
            deltas = self.faults.end_step(deltas)
        stats = scheduler.stats(batch, seconds, waits_for)
        return StepOutput(deltas, stats, scheduler.take_cache_events(), batch.begun)

    def run(self, requests: list[Request], on_step: Callable[[StepOutput], None] | None = None) -> dict[str, list[int]]:
        """Run requests without a server. Return {id: emitted tokens}. Raises RuntimeError if one ends with an error."""
        emitted: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.add(request)
        while self.has_work:
            step = self.step()
            for delta in step.deltas:
                if delta.error:
                    raise RuntimeError(delta.error)
                emitted[delta.request_id] += delta.token_ids
            if on_step:
                on_step(step)
        return emitted
