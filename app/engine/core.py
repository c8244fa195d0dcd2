"""EngineCore: add requests, call step(), get tokens. The whole architecture is `step`."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from app.engine.schedule.batch import Batch
from app.engine.schedule.scheduler import Scheduler
from app.engine.step.runner import ModelRunner, PendingStep
from app.messages import Request, StepOutput, TokenDelta

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was launched and is not read yet."""

    batch: Batch
    pending: PendingStep


class EngineCore:
    """One scheduler over one runner. Not thread-safe: its owner calls it from one thread.

    With `overlap` the device has the next step, where the scheduler finds a continuation, before this one is read: so
    it goes on while the host commits, and takes commands, and builds the one after that.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, *, overlap: bool = False) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.overlap = overlap
        self._ahead: InFlight | None = None
        self._ended = 0.0
        self._num_faults = 0
        self._is_told = False

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
        """One step for everything that has work; call only while `has_work`.

        A sequence that alone makes it fail is dropped, and the others go on. Raises what no sequence is to blame for.
        """
        ahead, self._ahead = self._ahead, None
        if ahead and ahead.batch.has_live_rows:
            started, batch, pending = self._ended, ahead.batch, ahead.pending
        else:
            started, batch, pending = time.perf_counter(), self._schedule(), None
        num_faults = self._num_faults
        deltas = self._run(batch, pending, overlap=self.overlap) if batch else []
        self.scheduler.end_step()
        self._ended = time.perf_counter()
        seconds = self._ended - started
        if batch.decodes and num_faults == self._num_faults:
            num_seqs, prefilled = len(batch.decodes), bool(batch.prefills)
            work = num_seqs, batch.num_drafting, batch.block_rows, batch.num_verify_rows - num_seqs
            self.scheduler.policy.record_time(*work, 1000 * seconds, prefilled=prefilled)
        kind = batch.kind if batch else "idle"
        num_seqs = len(batch.decodes)
        stats = self.scheduler.stats(kind, seconds, num_decoding=num_seqs, num_drafting=batch.num_drafting)
        return StepOutput(batch.dropped + deltas, stats)

    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step on the device. The runner gets arrays alone."""
        return self.runner.launch(self.runner.layout.build(batch))

    def _schedule(self) -> Batch:
        batch = self.scheduler.schedule()
        if batch.scrub:
            self.runner.scrub(batch.scrub)
        return batch

    def _run(self, batch: Batch, pending: PendingStep | None = None, *, overlap: bool = False) -> list[TokenDelta]:
        """Launch, unless it is `pending` already, read and commit. Where that fails it is done again in halves: until
        it is committed nothing of a step counts, for the next one writes the same slots; nor does what is ahead."""
        try:
            if pending is None:
                pending = self.launch(batch)
            if overlap:
                self._ahead = self._launch_behind(batch)
            result = pending.read()
        except Exception as error:
            self._take_back(error)
            self._num_faults += 1
            self._ahead = None
            batch = batch.live_part
            if len(batch.rows) > 1:
                first, second = batch.halves
                deltas = self._run(first)
                second = second.live_part  # the first one's commit may have preempted some of it
                return deltas + (self._run(second) if second else [])
            return [self.scheduler.drop(rows.seq, error) for rows in batch.rows]
        return self.scheduler.commit(batch, result)

    def _launch_behind(self, batch: Batch) -> InFlight | None:
        """The step behind one that is in flight. Where that fails nobody is to blame yet: it will be tried again with
        nothing in flight."""
        try:
            behind = self.scheduler.schedule_ahead(batch)
            if behind is None:
                return None
            if behind.scrub:
                self.runner.scrub(behind.scrub)
            return InFlight(behind, self.launch(behind))
        except Exception as error:
            self._take_back(error)
            if not self._is_told:
                logger.warning("a step could not be launched before the one before it was read", exc_info=error)
                self._is_told = True
            return None

    def _take_back(self, error: Exception) -> None:
        """Of what was launched and not read. Raises `error` where nothing can go on after it."""
        if self.runner.backend.is_fatal(error):
            if meaning := self.runner.backend.explain(error):
                error.add_note(meaning)
            raise error
        self.scheduler.discard_ahead()
        self.runner.rollback()

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
