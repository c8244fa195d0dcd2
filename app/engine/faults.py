"""Steps that fail: who is to blame for an exception, and what goes on without it. Off the path of a step that works."""

import logging
from collections.abc import Callable
from typing import TypeVar

from app.engine.schedule.batch import Batch, StepResult
from app.engine.schedule.scheduler import Scheduler
from app.engine.step.runner import ModelRunner
from app.messages import TokenDelta

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Faults:
    """Recovery of one core from steps that fail."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self._has_failed = False
        self._scheduler = scheduler
        self._runner = runner
        self._was_logged = False

    def isolate(
        self, batch: Batch, run: Callable[[Batch], StepResult], rerun: Callable[[Batch], StepResult]
    ) -> list[TokenDelta]:
        """Run a step and commit it. If it fails, `rerun` its halves, and drop a sequence that fails alone.

        Nothing of a step counts before its commit, because the next step writes the same slots.
        """
        if not batch:
            return []
        try:
            result = run(batch)
        except Exception as error:
            self._rollback(error)
            self._has_failed = True
            batch = batch.live_part
            if len(batch.rows) > 1:
                first, second = batch.halves
                deltas = self.isolate(first, rerun, rerun)
                second = second.live_part  # the first commit may have preempted some of it
                return deltas + self.isolate(second, rerun, rerun)
            return [self._scheduler.drop(rows.seq, error) for rows in batch.rows]
        return self._scheduler.commit(batch, result)

    def tolerate(self, launch: Callable[[], T | None]) -> T | None:
        """Return what `launch` returns, or None if it fails: the step is tried again with nothing in flight."""
        try:
            return launch()
        except Exception as error:
            self._rollback(error)
            if not self._was_logged:
                logger.warning("a step could not be launched before the one before it was read", exc_info=error)
                self._was_logged = True
            return None

    def take_failed(self) -> bool:
        """Return True if a step has failed since the last call."""
        has_failed, self._has_failed = self._has_failed, False
        return has_failed

    def _rollback(self, error: Exception) -> None:
        """Undo the launches that were not read. Raises `error` if the device cannot go on after it."""
        if self._runner.backend.is_fatal(error):
            if meaning := self._runner.backend.explain(error):
                error.add_note(meaning)
            raise error
        self._scheduler.discard_ahead()
        self._runner.rollback()
