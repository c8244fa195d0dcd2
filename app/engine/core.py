"""EngineCore: add requests, call step(), get tokens. The whole architecture is `step`."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from app.engine.faults import Faults
from app.engine.schedule.batch import Batch, StepResult
from app.engine.schedule.overlap import schedule_ahead
from app.engine.schedule.scheduler import Scheduler
from app.engine.step.runner import ModelRunner, PendingStep
from app.messages import Request, StepOutput, TokenDelta


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was launched ahead and is not read yet."""

    batch: Batch
    pending: PendingStep


class EngineCore:
    """One scheduler over one runner. Not thread-safe: its owner calls it from one thread.

    With `overlap` the device gets the next step before this one is read, unless that depends on the result. So the
    device computes while the host commits, takes commands, and builds the step after that.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, *, overlap: bool = False) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.overlap = overlap
        self._ahead: InFlight | None = None
        self._ended = 0.0
        self._faults = Faults(scheduler, runner)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Raises ValueError, naming what is wrong, for a request that could never run."""
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
        """Forget all cached prefixes."""
        self.scheduler.flush_cache()

    def step(self) -> StepOutput:
        """Run one step for all sequences; call only while `has_work`.

        A sequence that alone makes it fail is dropped. Raises an error that no sequence is to blame for.
        """
        started, batch, pending = self._take_in_flight() or self._schedule()
        deltas = self._faults.isolate(batch, lambda batch: self._run(batch, pending), self._rerun)
        self.scheduler.end_step()
        return self._output(batch, deltas, started)

    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step on the device. The runner gets arrays alone."""
        return self.runner.launch(self.runner.layout.build(batch))

    def _schedule(self) -> tuple[float, Batch, None]:
        started, batch = time.perf_counter(), self.scheduler.schedule()
        if batch.scrub:
            self.runner.scrub(batch.scrub)
        return started, batch, None

    def _take_in_flight(self) -> tuple[float, Batch, PendingStep] | None:
        """Return the step that was launched ahead, and when the one before it ended."""
        ahead, self._ahead = self._ahead, None
        return (self._ended, ahead.batch, ahead.pending) if ahead and ahead.batch.has_live_rows else None

    def _run(self, batch: Batch, pending: PendingStep | None) -> StepResult:
        pending = pending or self.launch(batch)
        self._ahead = self._faults.tolerate(lambda: self._launch_ahead(batch)) if self.overlap else None
        try:
            return pending.read()
        except Exception:
            self._ahead = None
            raise

    def _rerun(self, batch: Batch) -> StepResult:
        return self.launch(batch).read()

    def _launch_ahead(self, batch: Batch) -> InFlight | None:
        """Launch the step behind one in flight, unless it depends on what that one yields."""
        behind = schedule_ahead(self.scheduler, batch)
        if behind is None:
            return None
        if behind.scrub:
            self.runner.scrub(behind.scrub)
        return InFlight(behind, self.launch(behind))

    def _output(self, batch: Batch, deltas: list[TokenDelta], started: float) -> StepOutput:
        """Return what the step yields. The policy learns the time of a step that did not fail."""
        self._ended = time.perf_counter()
        seconds, num_seqs = self._ended - started, len(batch.decodes)
        if not self._faults.take_failed() and num_seqs:
            work = num_seqs, batch.num_drafting, batch.block_rows, batch.num_verify_rows - num_seqs
            self.scheduler.policy.record_time(*work, 1000 * seconds, prefilled=bool(batch.prefills))
        kind = batch.kind if batch else "idle"
        stats = self.scheduler.stats(kind, seconds, num_decoding=num_seqs, num_drafting=batch.num_drafting)
        return StepOutput(batch.dropped + deltas, stats)

    def run(self, requests: list[Request], on_step: Callable[[StepOutput], None] | None = None) -> dict[str, list[int]]:
        """Run requests to their end, without a server: request id -> the tokens it emitted. Raises RuntimeError if one
        of them ends with an error."""
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
