"""Steps that fail: a batch runs again in halves, down to the sequence that is to blame."""

import logging
from collections.abc import Callable
from dataclasses import replace

from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.schedule.scheduler import Scheduler
from app.engine.step.runner import ModelRunner, PendingStep
from app.messages import TokenDelta

logger = logging.getLogger(__name__)

MAX_FAULTS_IN_ROW = 3
"""Number of sequences that may be dropped in a row without progress. Then none of them is to blame."""


class Faults:
    """Recovery from a step that failed.

    A sequence that raises when no other one runs with it is dropped. Nothing of a step counts before its commit,
    because the next step writes the same slots. So a batch that fails is rolled back and runs again in halves.

    Logits that are not finite end their sequence in `Scheduler.commit`. Pages whose KV was not seen to be finite are
    zeroed before reuse. Rows in flight of a sequence that has ended may be NaN, so their pages count as not sound.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._was_logged = False

    def end_step(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Return the deltas of a step and of the sequences that were dropped before it.

        Raises the last error if too many sequences were dropped in a row without progress.
        """
        scheduler = self._scheduler
        if scheduler.has_progress:
            scheduler.last_fault, scheduler.num_faults_in_row = None, 0
        elif scheduler.last_fault and scheduler.num_faults_in_row >= MAX_FAULTS_IN_ROW:
            raise scheduler.last_fault
        return scheduler.take_dropped() + deltas

    def give_up_ahead(self, error: Exception, runner: ModelRunner) -> None:
        """Discard a step that could not be launched ahead. It is tried again with nothing in flight."""
        self._rollback(error, runner)
        if not self._was_logged:
            logger.warning("a step could not be launched before the previous one was read", exc_info=error)
            self._was_logged = True

    def recompute(self, batch: Batch, error: Exception, runner: ModelRunner) -> list[TokenDelta]:
        """Preempt the sequences of a failed batch, the newest first, because their recurrent states are lost.

        The step ahead may have committed rows of this one to them, so this one cannot run again.
        """
        self._rollback(error, runner)
        logger.warning("a step failed after the next one was launched; its requests are recomputed")
        lost = {entry.seq for entry in batch.entries}
        for seq in [seq for seq in reversed(self._scheduler.running) if seq in lost]:
            self._scheduler.preempt(seq)
        return []

    def isolate(
        self, batch: Batch, error: Exception, runner: ModelRunner, launch: Callable[[Batch], PendingStep]
    ) -> list[TokenDelta]:
        """Run a failed batch again in halves, which may fail in turn, and drop a sequence that fails by itself."""
        self._rollback(error, runner)
        decodes, prefills = _live(batch.decodes), _live(batch.prefills)
        if len(decodes) + len(prefills) < 2:
            return [self._scheduler.drop(entry.seq, error) for entry in decodes + prefills]
        middle = (len(decodes) + len(prefills) + 1) // 2
        chunks = max(0, middle - len(decodes))
        deltas: list[TokenDelta] = []
        for part in ((decodes[:middle], prefills[:chunks]), (decodes[middle:], prefills[chunks:])):
            # The first commit may have preempted sequences of the second part.
            half = Batch(_live(part[0]), _live(part[1]), batch.block_rows)
            try:
                result = launch(half).read()
            except Exception as again:
                deltas += self.isolate(half, again, runner, launch)
            else:
                deltas += self._scheduler.commit(half, result)
        return deltas

    def _rollback(self, error: Exception, runner: ModelRunner) -> None:
        """Undo the launches that were not read. Raises `error` if the device cannot go on after it."""
        if runner.is_fatal(error):
            runner.backend.annotate(error)
            raise error
        self._scheduler.unclean |= self._scheduler.in_flight  # a step ahead may have written some of its KV
        runner.rollback()


def _live(entries: list[ScheduledSequence]) -> list[ScheduledSequence]:
    """Return the live entries, with their starts as if nothing were in flight."""
    return [
        replace(entry, start=entry.seq.num_computed, prev_row=-1, max_accepted=0) for entry in entries if entry.is_live
    ]
