"""Steps that fail: sequences to blame for exceptions, and for logits that are not finite."""

import logging
from collections.abc import Callable
from dataclasses import replace

from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.schedule.scheduler import Scheduler
from app.engine.sequence import NOT_FINITE, Sequence
from app.engine.step.runner import ModelRunner, PendingStep
from app.messages import SpecStep, TokenDelta

logger = logging.getLogger(__name__)

MAX_FAULTS_IN_ROW = 3
"""Number of sequences that may be dropped in a row without progress. Then none of them is to blame."""
_NOT_FINITE = "the model's logits are not finite (NaN or infinity) {} tokens into the answer, so there is no next token"


class Faults:
    """The scheduler's hooks for sequences that fail, and the ways to run a failed batch again.

    A sequence that raises when no other one runs with it is dropped. Nothing of a step counts before its commit,
    because the next step writes the same slots. So a batch that fails is rolled back and runs again in halves.

    A sequence whose logits are not finite ends with an error. If it found pages in the cache, these may be at fault, so
    it is first recomputed on pages that it fills itself. Pages whose KV was not seen to be finite are zeroed before
    reuse. Rows in flight of a sequence that has ended may be NaN, so their pages count as not sound.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        scheduler.on_error, scheduler.on_not_finite = self.drop, self.end_not_finite
        self.error: Exception | None = None
        """Error of the last dropped sequence, until there is progress."""
        self._num_in_row = 0
        self._was_logged = False

    def drop(self, seq: Sequence, error: Exception) -> TokenDelta:
        """End a sequence that raises `error` by itself, and return its last delta."""
        scheduler, request_id = self._scheduler, seq.request.request_id
        self.error = error
        self._num_in_row += 1
        scheduler.num_faults += 1
        seq.is_sound = False
        scheduler.end(seq)
        logger.error("request %s is dropped", request_id, exc_info=error)
        reason = f"the request was dropped because its step failed: {type(error).__name__}: {error}"
        return TokenDelta(request_id, [], [SpecStep(0, 0, 0)], seq.num_cached or 0, "error", reason)

    def end_not_finite(self, share: ScheduledSequence, tokens: list[int]) -> TokenDelta | None:
        """End a sequence after the finite ones of `tokens`, or have it recomputed."""
        scheduler, seq, tokens = self._scheduler, share.seq, tokens[: tokens.index(NOT_FINITE)]
        scheduler.forget_pages(seq)
        if seq.num_found:
            scheduler.to_start_over.append(seq)
            return None
        delta = scheduler.accept(share, tokens, len(tokens))
        if not delta.finish_reason:
            scheduler.num_not_finite += 1
            error = _NOT_FINITE.format(seq.num_tokens - len(seq.request.token_ids))
            delta = replace(delta, finish_reason="error", error=error)
        scheduler.end(seq)
        return delta

    def end_step(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Return the deltas of a step and of the sequences that were dropped before it.

        Raises the last error if too many sequences were dropped in a row without progress.
        """
        if self._scheduler.has_progress:
            self.error, self._num_in_row = None, 0
        elif self.error and self._num_in_row >= MAX_FAULTS_IN_ROW:
            raise self.error
        return self._scheduler.take_dropped() + deltas

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
        lost = {share.seq for share in batch.shares}
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
            return [self.drop(share.seq, error) for share in decodes + prefills]
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


def _live(shares: list[ScheduledSequence]) -> list[ScheduledSequence]:
    return [share for share in shares if share.resolve_start()]
