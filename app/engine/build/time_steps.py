"""What steps cost on this machine: timed before the first request, in the calls that serving makes."""

import time
from array import array

from app.engine.build.config import Sizes
from app.engine.build.cost_table import Shape, cost_table, shapes
from app.engine.build.memory import pages_of, verify_batch
from app.engine.dflash.costs import CostTable
from app.engine.schedule.batch import Batch
from app.engine.step.runner import ModelRunner

_SECONDS = 1.0
"""Spent on the first round, which leaves sizes between the ends out then, and once more on all others."""
_ROUNDS = 7
_IN_A_ROW = 3
"""Steps of a shape in every round, of which the last is timed."""
_CONTEXT = 128
"""Tokens before the rows, as in the midst of an answer. Without any a plain step would look cheaper than it is: context
is more of its time than of a step that drafts."""


def measure_costs(runner: ModelRunner, sizes: Sizes, num_pages: int) -> CostTable:
    """Run decode steps of 1, 2, 4 ... sequences, see `shapes`.

    Every round runs every shape for a moment, so that none is timed in a stretch of its own, and of each the quickest
    counts: whatever else a machine does makes a step slower, never faster. One sequence alone gets twice the time, for
    it is cheap, and a width that was mistaken for a dear one is not run again. The pages must be nobody's; sizes
    that need more than `num_pages` are left out.
    """
    seqs = [1 << i for i in range(sizes.max_num_seqs.bit_length())]
    seqs = [
        n for n in sorted({*seqs, sizes.max_num_seqs}) if n <= sizes.max_num_seqs and pages_of(n, sizes) <= num_pages
    ]
    ends = (seqs[0], seqs[-1])  # are timed whatever time they take
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
    """Sequences of nobody behind a context that is their first page over and over."""
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
    """Milliseconds of a step that follows others like it, as in serving."""
    for _ in range(_IN_A_ROW):
        begun = time.perf_counter()
        runner.launch(runner.layout.build(batch)).read()
    return 1000 * (time.perf_counter() - begun)
