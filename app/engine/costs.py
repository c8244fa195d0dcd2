"""What steps cost on this machine: timed before the first request, in the calls that serving makes."""

import time
from statistics import median

from app.engine.batch import Batch
from app.engine.config import Sizes
from app.engine.dflash.policy import CostTable
from app.engine.model_runner import ModelRunner
from app.engine.profile_run import pages_of, verify_batch

_SECONDS = 0.5
"""Spent on the first round, which leaves larger sizes out then, and once more on all others."""
_ROUNDS = 7


def measure_costs(runner: ModelRunner, sizes: Sizes, num_pages: int) -> CostTable:
    """Run decode steps of 1, 2, 4 ... sequences: plain, with two rows verified of each, and with whole blocks.

    Every round runs every shape once, so that no shape is timed in a stretch of its own. The pages must be nobody's;
    sizes that need more than `num_pages` are left out.
    """
    seqs = [1 << i for i in range(sizes.max_num_seqs.bit_length())]
    seqs = [
        n for n in sorted({*seqs, sizes.max_num_seqs}) if n <= sizes.max_num_seqs and pages_of(n, sizes) <= num_pages
    ]
    widths = (1, 2, sizes.block_size)
    times: dict[tuple[int, int], list[float]] = {}
    for done in range(_ROUNDS + 1):
        if done < 2:
            started = time.perf_counter()
        elif time.perf_counter() - started > _SECONDS:
            break
        for num_seqs in seqs:
            if not done and times and time.perf_counter() - started > _SECONDS:
                break
            for width in widths:
                times.setdefault((num_seqs, width), []).append(_timed(runner, verify_batch(num_seqs, width, sizes)))
        seqs = [n for n in seqs if (n, 1) in times]
    return tables({shape: median(taken[1:] or taken) for shape, taken in times.items()}, sizes.block_size)


def _timed(runner: ModelRunner, batch: Batch) -> float:
    """Milliseconds."""
    begun = time.perf_counter()
    runner.launch(batch).read()
    return 1000 * (time.perf_counter() - begun)


def tables(ms: dict[tuple[int, int], float], block_size: int) -> CostTable:
    """Of {(sequences, rows of each): ms of a step}: one row is plain, more have a draft pass before them.

    The draft pass of n blocks is what a step of two rows a sequence takes longer than a plain one of as many rows.
    """
    seqs = sorted({n for n, _ in ms})
    plain = CostTable([(1, 0.0)], [(n, ms[n, 1]) for n in seqs])
    draft = [(n, max(ms[n, 2] - float(plain.target_ms(2 * n)), 0.05 * ms[n, 1])) for n in seqs]
    target = {n: ms[n, 1] for n in seqs}
    for (n, draft_ms), shape in zip(draft, seqs, strict=True):
        target.setdefault(n * block_size, max(ms[shape, block_size] - draft_ms, ms[shape, 1]))
    return CostTable(_rising(draft), _rising(sorted(target.items())))


def _rising(table: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """More never costs less; where it was timed so, something else held the smaller one up."""
    highest, rising = 0.0, []
    for size, ms in table:
        highest = max(highest, ms)
        rising.append((size, highest))
    return rising
