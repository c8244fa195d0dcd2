"""What steps cost on this machine: timed before the first request, in the calls that serving makes."""

import time
from array import array
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
_CONTEXT = 128
"""Tokens before the rows, as in the midst of an answer. Without any a plain step would look cheaper than it is: context
is more of its time than of a step that drafts."""

Shape = tuple[int, int, int]
"""(sequences, how many of them draft, rows of each that drafts)."""


def measure_costs(runner: ModelRunner, sizes: Sizes, num_pages: int) -> CostTable:
    """Run decode steps of 1, 2, 4 ... sequences: plain, with two rows, a quarter, half and all of a block verified of
    each, and with one sequence that drafts beside plain ones.

    Every round runs every shape for a moment, so that none is timed in a stretch of its own. The pages must be
    nobody's; sizes that need more than `num_pages` are left out.
    """
    block = sizes.block_size
    seqs = [1 << i for i in range(sizes.max_num_seqs.bit_length())]
    seqs = [
        n for n in sorted({*seqs, sizes.max_num_seqs}) if n <= sizes.max_num_seqs and pages_of(n, sizes) <= num_pages
    ]
    ends = (seqs[0], seqs[-1])  # are timed whatever time they take
    seqs = list(dict.fromkeys((*ends, *seqs[::2], *seqs)))
    widths = sorted({2, -(-block // 4), -(-block // 2), block})
    times: dict[Shape, list[float]] = {}
    for done in range(_ROUNDS + 1):
        if done < 2:
            started = time.perf_counter()
        elif time.perf_counter() - started > _SECONDS:
            break
        for n in seqs:
            if not done and n not in ends and time.perf_counter() - started > _SECONDS:
                break
            for shape in dict.fromkeys(((n, 0, 1), (n, 1, block), *((n, n, width) for width in widths))):
                times.setdefault(shape, []).append(_timed(runner, _step(shape, sizes)))
        seqs = [n for n in seqs if (n, 0, 1) in times]
    return table({shape: median(taken[1:] or taken) for shape, taken in times.items()})


def _step(shape: Shape, sizes: Sizes) -> Batch:
    """Sequences of nobody behind a context that is their first page over and over."""
    num_seqs, drafting, width = shape
    batch = verify_batch(num_seqs, width, sizes)
    pages = min(_CONTEXT, sizes.max_model_len) // sizes.page_size
    for rows in batch.decodes:
        rows.seq.pages = array("i", [rows.seq.pages[0]] * pages) + rows.seq.pages
        rows.seq.token_ids = [0] * pages * sizes.page_size + rows.seq.token_ids
        rows.start += pages * sizes.page_size
    for rows in batch.decodes[drafting:]:
        rows.count, rows.num_drafts = 1, 0
    return batch


def _timed(runner: ModelRunner, batch: Batch) -> float:
    """Milliseconds of a step that follows others like it, as in serving."""
    for _ in range(_IN_A_ROW):
        begun = time.perf_counter()
        runner.launch(batch).read()
    return 1000 * (time.perf_counter() - begun)


def table(ms: dict[Shape, float]) -> CostTable:
    """Of {shape: ms of a step}; every number of sequences has (n, 0, 1), (n, 1, block) and some (n, n, width).

    What drafts take to verify grows linearly from none on to the second width that has some; the draft pass is what is
    left of a step without it. One sequence that drafts beside plain ones says what the target takes to treat sequences
    differently, which is charged with the first draft; the draft pass of one is known from one alone.
    """
    seqs = sorted({n for n, _, _ in ms})
    plain, draft, verify = [], [], []
    one_block = 0.0
    for n in seqs:
        base = ms[n, 0, 1]
        some = sorted((n * (width - 1), taken) for (count, blocks, width), taken in ms.items() if count == blocks == n)
        (few, ms_of_few), (more, ms_of_more) = some[0], some[min(1, len(some) - 1)]
        slope = max(0.0, ms_of_more - ms_of_few) / max(1, more - few)
        passes = max(ms_of_few - few * slope - base, 0.05 * base)
        one_block = one_block or passes
        points = [(0, 0.0)]
        if n > 1:
            ((drafts, beside),) = (
                (w - 1, taken) for (count, blocks, w), taken in ms.items() if (count, blocks) == (n, 1)
            )
            ragged = min(beside - base - one_block - drafts * slope, passes - one_block)
            points.append((1, slope + max(0.0, ragged)))
            passes -= max(0.0, ragged)
        plain.append((n, base))
        draft.append((n, passes))
        points += [(drafts, max(0.0, taken - base - passes)) for drafts, taken in some]
        verify.append(_rising(sorted(points)))
    return CostTable(_rising(plain), _rising(draft), verify)


def _rising(costs: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """More never costs less; where it was timed so, something else held the smaller one up."""
    highest, rising = 0.0, []
    for size, ms in costs:
        highest = max(highest, ms)
        rising.append((size, highest))
    return rising
