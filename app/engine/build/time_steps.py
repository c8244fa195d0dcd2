"""Times of decode steps on this machine, taken before the first request in the calls that serving makes."""

import time
from array import array

from app.engine.build.config import Sizes
from app.engine.build.cost_table import Shape, cost_table, shapes
from app.engine.build.memory import pages_of, verify_batch
from app.engine.dflash.costs import CostTable
from app.engine.schedule.batch import Batch
from app.engine.step.runner import ModelRunner

_SECONDS = 1.0
"""Time for the first round, which then leaves out sizes between the ends, and once more for all others."""
_ROUNDS = 7
_IN_A_ROW = 3
"""Steps of a shape in every round, of which the last is timed."""
_CONTEXT = 128
"""Tokens before the rows, like in an answer. Without context a plain step would look too cheap, because context is more
of its time than of a step that drafts."""


def measure_costs(runner: ModelRunner, sizes: Sizes, num_pages: int) -> CostTable:
    """Time decode steps of 1, 2, 4 ... sequences in the shapes of `shapes`, and return their costs.

    Every round runs every shape once, and the quickest time of each counts, because other load only makes steps slower.
    One sequence alone gets twice the time, because it is cheap and a width that looks dear is not tried again. Free
    pages are overwritten; sizes that need more than `num_pages` are left out.
    """
    seqs = [1 << i for i in range(sizes.max_num_seqs.bit_length())]
    seqs = [
        n for n in sorted({*seqs, sizes.max_num_seqs}) if n <= sizes.max_num_seqs and pages_of(n, sizes) <= num_pages
    ]
    ends = (seqs[0], seqs[-1])  # they are timed in any case
    seqs = list(dict.fromkeys((*ends, *seqs[::2], *seqs)))
    times: dict[Shape, list[float]] = {}
    for done in range(_ROUNDS + 1):
        if done < 2:
            started = time.perf_counter()
        for n in seqs:
            is_late = time.perf_counter() - started > (_SECONDS if n > 1 else 2 * _SECONDS)
            if is_late and (done > 1 or (done == 0 and n not in ends)):
                break
            for shape in shapes(n, sizes.block_size):
                times.setdefault(shape, []).append(_timed(runner, _step(shape, sizes)))
        seqs = [n for n in seqs if Shape(n) in times]
    return cost_table({shape: min(taken) for shape, taken in times.items()})


def _step(shape: Shape, sizes: Sizes) -> Batch:
    """Return a step of made-up sequences, behind a context that is their first page over and over."""
    batch = verify_batch(shape.seqs, shape.rows, sizes)
    batch.block_rows = shape.block
    pages = min(_CONTEXT, sizes.max_model_len) // sizes.page_size
    for rows in batch.decodes:
        rows.seq.pages = array("i", [rows.seq.pages[0]] * pages) + rows.seq.pages
        rows.seq.token_ids = [0] * pages * sizes.page_size + rows.seq.token_ids
        rows.start += pages * sizes.page_size
    for rows in batch.decodes[shape.drafting :]:
        rows.count, rows.num_drafts = 1, 0
    return batch


def _timed(runner: ModelRunner, batch: Batch) -> float:
    """Return the milliseconds of a step that follows others like it, like in serving."""
    for _ in range(_IN_A_ROW):
        begun = time.perf_counter()
        runner.launch(runner.layout.build(batch)).read()
    return 1000 * (time.perf_counter() - begun)
