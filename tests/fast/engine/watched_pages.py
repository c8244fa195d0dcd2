"""A guard of cached pages, around every step of an engine."""

from typing import Any

import torch

from app.engine.load.engine import Engine
from app.engine.schedule.batch import Batch
from tests.fast.schedule.scheduler_harness import check_pages, protected


def watch(engine: Engine) -> None:
    """Assert in every step that it leaves cached and shared pages alone, and that the books of all pages are right."""
    scheduler, runner = engine.core.scheduler, engine.core.runner
    launch, size = engine.core.launch, engine.sizes.page_size
    pools = [runner.forward.pool, *([runner.forward.drafter.pool] if runner.forward.drafter else [])]

    def kept(pages: torch.Tensor) -> list[torch.Tensor]:
        return [x[pages] for pool in pools for kv in pool.layers for x in (kv.k, kv.v)]

    def watched(batch: Batch) -> Any:
        check_pages(scheduler)
        untouchable = protected(scheduler)
        for share in batch.shares:
            end = max(share.end, share.start + engine.sizes.block_size) if share.num_drafts else share.end
            written = set(share.seq.pages[share.start // size : (end - 1) // size + 1])
            assert written and not written & untouchable
        pages = torch.tensor(sorted(untouchable), dtype=torch.long)
        runner.forward.pending_context.write()  # a plain stretch may have left some to be written
        before = kept(pages)
        pending = launch(batch)
        assert all(map(torch.equal, kept(pages), before)), "a cached page was written"
        return pending

    engine.core.launch = watched
