"""What steps cost on this machine: timed before the first request, in the calls that serving makes."""

import time
from statistics import median

from app.engine.batch import Batch
from app.engine.config import Sizes
from app.engine.dflash.policy import CostTable
from app.engine.model_runner import ModelRunner
from app.engine.profile_run import pages_of, verify_batch

_SECONDS = 1.0
"""Spent on the first round, which leaves sizes between the ends out then, and once more on all others."""
_ROUNDS = 7
_IN_A_ROW = 3
"""Steps of a shape in every round, of which the last is timed."""


def measure_costs(runner: ModelRunner, sizes: Sizes, num_pages: int) -> CostTable:
    """Run decode steps of 1, 2, 4 ... sequences: plain, and with two rows, a quarter, half and all of a block verified.

    Every round runs every shape for a moment, so that none is timed in a stretch of its own. The pages must be
    nobody's; sizes that need more than `num_pages` are left out.
    """
    seqs = [1 << i for i in range(sizes.max_num_seqs.bit_length())]
    seqs = [
        n for n in sorted({*seqs, sizes.max_num_seqs}) if n <= sizes.max_num_seqs and pages_of(n, sizes) <= num_pages
    ]
    seqs = list(dict.fromkeys((seqs[0], seqs[-1], *seqs)))  # the ends are timed whatever time they take
    ends = seqs[:2]
    widths = sorted({1, 2, -(-sizes.block_size // 4), -(-sizes.block_size // 2), sizes.block_size})
    times: dict[tuple[int, int], list[float]] = {}
    for done in range(_ROUNDS + 1):
        if done < 2:
            started = time.perf_counter()
        elif time.perf_counter() - started > _SECONDS:
            break
        for num_seqs in seqs:
            if not done and num_seqs not in ends and time.perf_counter() - started > _SECONDS:
                break
            for width in widths:
                times.setdefault((num_seqs, width), []).append(_timed(runner, verify_batch(num_seqs, width, sizes)))
        seqs = [n for n in seqs if (n, 1) in times]
    return table({shape: median(taken[1:] or taken) for shape, taken in times.items()})


def _timed(runner: ModelRunner, batch: Batch) -> float:
    """Milliseconds of a step that follows others like it, as in serving."""
    for _ in range(_IN_A_ROW):
        begun = time.perf_counter()
        runner.launch(batch).read()
    return 1000 * (time.perf_counter() - begun)


def table(ms: dict[tuple[int, int], float]) -> CostTable:
    """Of {(sequences, rows of each): ms of a step}: one row is plain, more have a draft pass before them.

    What drafts take to verify grows linearly from none on to the second width that has some; the draft pass is what is
    left of a step without it.
    """
    seqs = sorted({n for n, _ in ms})
    plain, draft, verify = [], [], []
    for n in seqs:
        some = sorted((n * (width - 1), taken) for (count, width), taken in ms.items() if count == n and width > 1)
        (few, ms_of_few), (more, ms_of_more) = some[0], some[min(1, len(some) - 1)]
        slope = max(0.0, ms_of_more - ms_of_few) / max(1, more - few)
        plain.append((n, ms[n, 1]))
        draft.append((n, max(ms_of_few - few * slope - ms[n, 1], 0.05 * ms[n, 1])))
        rest = ms[n, 1] + draft[-1][1]
        verify.append(_rising([(0, 0.0), *((drafts, max(0.0, taken - rest)) for drafts, taken in some)]))
    return CostTable(_rising(plain), _rising(draft), verify)


def _rising(costs: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """More never costs less; where it was timed so, something else held the smaller one up."""
    highest, rising = 0.0, []
    for size, ms in costs:
        highest = max(highest, ms)
        rising.append((size, highest))
    return rising
