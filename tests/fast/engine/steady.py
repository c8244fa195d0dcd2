"""Fixed costs of steps, which do not depend on the machine."""

from itertools import count
from types import SimpleNamespace

import pytest

from app.engine import core
from app.engine.load import engine as build
from app.engine.load.plan import Sizes
from app.engine.schedule.costs import CostTable, shapes
from app.engine.step.runner import ModelRunner


def steady_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines built from now on measure cheap drafts, and ten milliseconds for every step.

    So `verify="auto"` decides the same on every machine.
    """

    def costs(
        runner: ModelRunner, sizes: Sizes, num_pages: int, on_progress: object = None, **rest: object
    ) -> CostTable:
        timed = [shape for seqs in (1, sizes.max_num_seqs) for shape in shapes(seqs, sizes.block_size)]
        return CostTable({s: 9.0 + s.seqs + s.drafting * (0.05 * s.block + 0.1 * s.rows) for s in timed})

    ticks = count()
    monkeypatch.setattr(build, "measure_costs", costs)
    monkeypatch.setattr(core, "time", SimpleNamespace(perf_counter=lambda: 0.01 * next(ticks)))
