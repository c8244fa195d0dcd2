"""Steps that fail: sequences to blame for exceptions, and for logits that are not finite."""

import logging
from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from app.engine.core import EngineCore, Launched
from app.engine.schedule.batch import Batch, ScheduledSequence, StepResult
from app.engine.schedule.page_pool import SCRATCH_PAGES, PagePool
from app.engine.schedule.scheduler import Scheduler
from app.engine.sequence import NOT_FINITE, Sequence
from app.engine.step.runner import ModelRunner, PendingStep
from app.messages import SpecStep, StepOutput, TokenDelta

logger = logging.getLogger(__name__)

MAX_FAULTS_IN_ROW = 3
"""So many sequences may be dropped in a row without progress. Then none of them is to blame."""
_NOT_FINITE = "the model's logits are not finite (NaN or infinity) {} tokens into the answer, so there is no next token"


class QuarantinePagePool(PagePool):
    """Pool that remembers pages whose KV may not be finite.

    A page is suspect from a release as not sound until a later owner releases it as sound. If it is reused before that,
    it has to be scrubbed.
    """

    def __init__(self, num_pages: int, page_size: int, scratch_pages: int = SCRATCH_PAGES) -> None:
        super().__init__(num_pages, page_size, scratch_pages)
        self._suspects: set[int] = set()
        self._to_scrub: list[int] = []

    def release(self, pages: "array[int]", *, sound: bool = True) -> None:
        """Remove an owner. The pages are `sound` if all KV on them is known to be finite."""
        if not sound:
            self._suspects.update(pages)
        elif self._suspects:
            self._suspects.difference_update(pages)
        super().release(pages)

    def pages_to_scrub(self) -> list[int]:
        """Return pages that were reused and may hold KV that is not finite, each once."""
        pages, self._to_scrub = self._to_scrub, []
        return pages

    def _take(self) -> int:
        page = super()._take()
        if page in self._suspects:
            self._suspects.discard(page)
            self._to_scrub.append(page)
        return page


class FaultTolerantScheduler(Scheduler):
    """Scheduler that drops a sequence that raises, and quarantines KV that may not be finite.

    A sequence whose logits are not finite ends with an error. If it found pages in the cache, these may be at fault, so
    it is first recomputed on pages of its own. Pages whose KV was not seen to be finite are zeroed before reuse. Rows
    in flight of a sequence that has ended may be NaN, so their pages count as not sound.
    """

    def __init__(self, pool: QuarantinePagePool, **settings: Any) -> None:
        super().__init__(pool, **settings)
        self.pool: QuarantinePagePool = pool
        self.fault: Exception | None = None
        """Error of the last dropped sequence, until there is progress."""
        self.unclean: set[Sequence] = set()
        """Sequences with KV behind the last token that may not be finite."""
        self._num_in_row = 0
        self._has_progress = False
        self._dropped: list[TokenDelta] = []
        self._suspects: list[Sequence] = []
        self._to_scrub: list[int] = []

    def schedule(self) -> Batch:
        """Return the rows of the next step. They are empty if all sequences that could run had to be dropped."""
        self._to_scrub += [slot for seq in self.unclean for slot in self._slots_behind(seq)]
        self.unclean.clear()
        while True:
            try:
                return super().schedule()
            except Exception as error:
                if self.at_hand is None:
                    raise
                self._dropped.append(self.drop(self.at_hand, error))

    def commit(self, batch: Batch, result: StepResult) -> list[TokenDelta]:
        self._suspects.clear()
        deltas = super().commit(batch, result)
        for seq in self._suspects:
            if seq.batch_slot < 0:  # another sequence's recomputation has preempted it
                seq.cacheable = False
            else:
                self._start_over(seq)
        return deltas

    def drop(self, seq: Sequence, error: Exception) -> TokenDelta:
        """End a sequence that alone raises `error`, and return its last delta."""
        self.fault = error
        self._num_in_row += 1
        self.num_faults += 1
        seq.is_sound = False
        self._end(seq)
        request_id = seq.request.request_id
        logger.error("request %s is dropped", request_id, exc_info=error)
        reason = f"the request was dropped because its step failed: {type(error).__name__}: {error}"
        return TokenDelta(request_id, [], [SpecStep(0, 0, 0)], seq.num_cached or 0, "error", reason)

    def take_dropped(self) -> list[TokenDelta]:
        """Return the last deltas of sequences that nothing could be scheduled for, once."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_slots_to_scrub(self) -> list[int]:
        """Return slots that have to be zeroed before the next step, once."""
        slots, self._to_scrub = self._to_scrub, []
        page_size = self.pool.page_size
        for page in self.pool.pages_to_scrub():
            slots += range(page * page_size, (page + 1) * page_size)
        return slots

    def may_run_ahead(self) -> bool:
        return not self.unclean and super().may_run_ahead()

    def end_step(self) -> None:
        """Raise the last fault if too many sequences were dropped in a row without progress."""
        if self._has_progress:
            self._has_progress, self.fault, self._num_in_row = False, None, 0
        elif self.fault and self._num_in_row >= MAX_FAULTS_IN_ROW:
            raise self.fault

    def recompute(self, batch: Batch) -> None:
        """Preempt the running sequences of a batch, the newest first, because their recurrent states are lost."""
        lost = {rows.seq for rows in batch.rows}
        for seq in [seq for seq in reversed(self.running) if seq in lost]:
            self._preempt(seq)

    def discard_ahead(self) -> None:
        """Note that a step ahead failed, or will not be read. It may have written some of its KV."""
        self.unclean |= self.in_flight

    def _commit_rows(self, rows: ScheduledSequence, tokens: list[int], num_accepted: int) -> TokenDelta | None:
        seq = rows.seq
        try:
            if NOT_FINITE in tokens:  # also behind the last token, where refused drafts leave KV
                self.unclean.add(seq)
            seq.is_sound = rows.needs_logits and seq not in self.unclean
            if NOT_FINITE in tokens[: min(num_accepted + 1, seq.num_remaining)]:
                delta = self._accept_not_finite(rows, tokens[: tokens.index(NOT_FINITE)])
            else:
                delta = super()._commit_rows(rows, tokens, num_accepted)
        except Exception as error:
            return self.drop(seq, error)
        self._has_progress = True
        return delta

    def _accept_not_finite(self, rows: ScheduledSequence, tokens: list[int]) -> TokenDelta | None:
        """End a sequence behind `tokens`, because the next one cannot be chosen, or have it recomputed."""
        seq = rows.seq
        self.pool.forget(seq.pages)
        self._forget_states(seq)
        if seq.num_found:
            self._suspects.append(seq)
            return None
        delta = self._accept(rows, tokens, len(tokens))
        if not delta.finish_reason:
            self.num_not_finite += 1
            error = _NOT_FINITE.format(seq.num_tokens - len(seq.request.token_ids))
            delta = replace(delta, finish_reason="error", error=error)
        self._end(seq)
        return delta

    def _forget_states(self, seq: Sequence) -> None:
        """Let the sequence's checkpoints, of which one may not be finite, be found no more."""
        for page in range(len(seq.pages) if self.states.num_checkpoints else 0):
            if (page + 1) * self.pool.page_size <= seq.num_tokens:
                self.states.forget(seq.digest(page, self.pool.page_size))

    def _start_over(self, seq: Sequence) -> None:
        """Recompute a running sequence on pages that no other sequence has filled."""
        self._free_pages(seq)
        self.states.release(seq)
        seq.num_computed = 0
        seq.cacheable = False
        self._take_state(seq)
        self._grow_or_preempt(seq)

    def _free_pages(self, seq: Sequence) -> None:
        known = seq.num_computed // self.pool.page_size if seq in self.in_flight else len(seq.pages)
        self.pool.release(seq.pages[known:], sound=False)
        self.pool.release(seq.pages[:known], sound=seq.is_sound)
        self.unclean.discard(seq)
        seq.pages = array("i")
        seq.num_found = 0
        seq.is_sound = False

    def _slots_behind(self, seq: Sequence) -> Iterator[int]:
        """Yield the slots behind the sequence's computed tokens."""
        page_size = self.pool.page_size
        for place in range(seq.num_computed, len(seq.pages) * page_size):
            yield seq.pages[place // page_size] * page_size + place % page_size


class FailedStep(PendingStep):
    """A step that could not be launched. Its error is raised when it is read, where all errors of steps are handled."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def read(self) -> StepResult:
        raise self._error


class EmptyStep(PendingStep):
    """A step without rows."""

    def __init__(self) -> None:
        return

    def read(self) -> StepResult:
        return StepResult([], [])


class FaultTolerantCore(EngineCore):
    """Core that runs the halves of a batch that fails, and drops a sequence that fails alone.

    Nothing of a step counts before its commit, because the next step writes the same slots.
    """

    def __init__(self, scheduler: FaultTolerantScheduler, runner: ModelRunner, *, overlap: bool = False) -> None:
        super().__init__(scheduler, runner, overlap=overlap)
        self.scheduler: FaultTolerantScheduler = scheduler
        self._has_failed = False
        self._failed_ahead = False
        self._was_logged = False

    def step(self) -> StepOutput:
        """Run one step. Raises an error that no sequence is to blame for."""
        self._has_failed = self._failed_ahead = False
        output = super().step()
        self.scheduler.end_step()
        return output

    def _launch(self, batch: Batch) -> Launched:
        if slots := self.scheduler.take_slots_to_scrub():
            self.runner.scrub(slots)
        try:
            pending = self.launch(batch) if batch else EmptyStep()
        except Exception as error:
            pending = FailedStep(error)
        return Launched(batch, pending)

    def _launch_ahead(self, step: Launched) -> Launched | None:
        """Launch the step behind, or none if that fails: it is tried again with nothing in flight."""
        if isinstance(step.pending, FailedStep):
            return None
        try:
            ahead = super()._launch_ahead(step)
            if ahead and isinstance(ahead.pending, FailedStep):
                ahead.pending.read()
            return ahead
        except Exception as error:
            self._failed_ahead = True
            self._rollback(error)
            if not self._was_logged:
                logger.warning("a step could not be launched before the one before it was read", exc_info=error)
                self._was_logged = True
            return None

    def _commit(self, step: Launched) -> list[TokenDelta]:
        dropped = self.scheduler.take_dropped()
        try:
            result = step.pending.read()
        except Exception as error:
            ahead, self._ahead = self._ahead, None
            self._rollback(error)
            self._has_failed = True
            if (ahead or self._failed_ahead) and self.scheduler.states.num_slots:
                # The step ahead may have committed rows of this one to recurrent states, so this one cannot run again.
                # From now on no step is ahead, so the next failure can be isolated.
                logger.warning("a step failed behind which another was launched; its requests are recomputed")
                self.overlap = False
                self.scheduler.recompute(step.batch)
                return dropped
            return dropped + self._isolate(step.batch, error)
        return dropped + self.scheduler.commit(step.batch, result)

    def _isolate(self, batch: Batch, error: Exception) -> list[TokenDelta]:
        """Run a failed batch again in two parts, whose commits may fail in turn."""
        decodes, prefills = _live(batch.decodes), _live(batch.prefills)
        num_rows = len(decodes) + len(prefills)
        if num_rows < 2:
            return [self.scheduler.drop(rows.seq, error) for rows in decodes + prefills]
        middle = (num_rows + 1) // 2
        chunks = max(0, middle - len(decodes))
        first = Batch(decodes[:middle], prefills[:chunks], batch.block_rows)
        deltas = self._commit(self._launch(first))
        # The first commit may have preempted sequences of the second part.
        second = Batch(_live(decodes[middle:]), _live(prefills[chunks:]), batch.block_rows)
        return deltas + self._commit(self._launch(second))

    def _rollback(self, error: Exception) -> None:
        """Undo the launches that were not read. Raises `error` if the device cannot go on after it."""
        if self.runner.is_fatal(error):
            self.runner.backend.annotate(error)
            raise error
        self.scheduler.discard_ahead()
        self.runner.rollback()

    def _record_time(self, batch: Batch, ms: float) -> None:
        if not self._has_failed:
            super()._record_time(batch, ms)


def _live(rows: list[ScheduledSequence]) -> list[ScheduledSequence]:
    return [share for share in rows if share.resolve_start()]
