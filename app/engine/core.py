"""EngineCore: add requests, call step(), get tokens. The whole architecture is `step`."""

import time
from collections.abc import Callable
from typing import NamedTuple

from app.engine.schedule.batch import Batch
from app.engine.schedule.overlap import schedule_ahead
from app.engine.schedule.scheduler import Scheduler
from app.engine.step.runner import ModelRunner, PendingStep
from app.messages import Request, StepOutput, TokenDelta


class Launched(NamedTuple):
    """A step in flight."""

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
        self._ahead: Launched | None = None
        self._started = self._ended = 0.0

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
        """Forget all cached prefixes."""
        self.scheduler.flush_cache()

    def step(self) -> StepOutput:
        """Run one step for all sequences; call only while `has_work`. `faults.py` has the steps that fail."""
        step = self._take_ahead() or self._launch(self.scheduler.schedule())
        self._ahead = self._launch_ahead(step) if self.overlap else None
        deltas = self._commit(step)
        return self._output(step.batch, deltas)

    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step on the device. The runner gets arrays alone."""
        return self.runner.launch(self.runner.layout.build(batch))

    def _take_ahead(self) -> Launched | None:
        """Return the step that was launched ahead, if any of its rows still count. It began as the last one ended."""
        ahead, self._ahead = self._ahead, None
        is_live = ahead is not None and ahead.batch.has_live_rows
        self._started = self._ended if is_live else time.perf_counter()
        return ahead if is_live else None

    def _launch(self, batch: Batch) -> Launched:
        return Launched(batch, self.launch(batch))

    def _launch_ahead(self, step: Launched) -> Launched | None:
        """Launch the step behind one in flight, unless it depends on that one's result."""
        behind = schedule_ahead(self.scheduler, step.batch)
        return self._launch(behind) if behind else None

    def _commit(self, step: Launched) -> list[TokenDelta]:
        return self.scheduler.commit(step.batch, step.pending.read())

    def _output(self, batch: Batch, deltas: list[TokenDelta]) -> StepOutput:
        self._ended = time.perf_counter()
        seconds, num_seqs = self._ended - self._started, len(batch.decodes)
        if num_seqs:
            self._record_time(batch, 1000 * seconds)
        kind = batch.kind if batch else "idle"
        stats = self.scheduler.stats(kind, seconds, num_decoding=num_seqs, num_drafting=batch.num_drafting)
        return StepOutput(deltas, stats, self.scheduler.take_cache_events(), batch.begun)

    def _record_time(self, batch: Batch, ms: float) -> None:
        """Let the policy learn the time of a decode step."""
        work = len(batch.decodes), batch.num_drafting, batch.block_rows, batch.num_drafts
        self.scheduler.policy.record_time(*work, ms, prefilled=bool(batch.prefills))

    def run(self, requests: list[Request], on_step: Callable[[StepOutput], None] | None = None) -> dict[str, list[int]]:
        """Run requests to their end, without a server. Return {request id: emitted tokens}.

        Raises RuntimeError if a request ends with an error.
        """
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
