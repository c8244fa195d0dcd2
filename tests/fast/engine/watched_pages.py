"""A guard of cached pages, around every step of an engine."""

from typing import Any

import torch

from app.engine.load.engine import Engine
from app.engine.schedule.batch import Batch
from tests.fast.schedule.scheduler_harness import protected, protected_in_draft


def watch(engine: Engine) -> None:
    """Assert in every step that it leaves cached and shared pages alone, and that the books of all pages are right."""
    scheduler, runner = engine.core.scheduler, engine.core.runner
    launch, size = engine.core.launch, engine.sizes.page_size
    pools = [runner.forward.pool, *([runner.forward.drafter.pool] if runner.forward.drafter else [])]

    def kept(of_target: set[int]) -> list[torch.Tensor]:
        of_draft = protected_in_draft(scheduler) if scheduler.draft_pages else of_target
        pages = [torch.tensor(sorted(own), dtype=torch.long) for own in (of_target, of_draft)]
        return [x[own] for pool, own in zip(pools, pages, strict=False) for kv in pool.layers for x in (kv.k, kv.v)]

    def watched(batch: Batch) -> Any:
        scheduler.check()
        untouchable = protected(scheduler)
        for entry in batch.entries:
            end = max(entry.end, entry.start + engine.sizes.block_size) if entry.num_drafts else entry.end
            written = set(entry.seq.pages[entry.start // size : (end - 1) // size + 1])
            assert written and not written & untouchable
        runner.forward.pending_context.write()  # a plain stretch may have left some to be written
        before = kept(untouchable)
        pending = launch(batch)
        assert all(map(torch.equal, kept(untouchable), before)), "a cached page was written"
        return pending

    engine.core.launch = watched
