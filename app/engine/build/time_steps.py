"""What steps cost on this machine: timed before the first request, in the calls that serving makes."""

import time
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from app.engine.build.config import Sizes
from app.engine.build.memory import pages_of, verify_batch
from app.engine.dflash.policy import CostTable
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

Point = tuple[int, float]
"""(size, milliseconds)."""


class Shape(NamedTuple):
    """A step to be timed: `seqs` decode, of which `drafting` draft blocks of `block` rows and verify `rows` of each."""

    seqs: int
    drafting: int = 0
    rows: int = 1
    block: int = 0


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
    return table({shape: min(taken) for shape, taken in times.items()})


def shapes(seqs: int, block_size: int) -> list[Shape]:
    """What is timed of so many sequences: a plain step, one sequence that drafts beside plain ones, and blocks of a
    quarter, a half and all of the block size, of which all rows are verified or two."""
    blocks = sorted({max(2, -(-block_size // parts)) for parts in (1, 2, 4)})
    whole = Shape(seqs, 1, block_size, block_size)
    all_draft = [Shape(seqs, seqs, rows, block) for block in blocks for rows in (2, block)]
    return list(dict.fromkeys((Shape(seqs), whole, *all_draft)))


def _step(shape: Shape, sizes: Sizes) -> Batch:
    """Sequences of nobody behind a context that is their first page over and over."""
    batch = verify_batch(shape.seqs, shape.rows, sizes)
    batch.least_block = shape.block
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
        runner.launch(batch).read()
    return 1000 * (time.perf_counter() - begun)


def table(ms: Mapping[Shape, float]) -> CostTable:
    """Of {shape: ms of a step} with all of `shapes` of every number of sequences.

    What few drafts take to verify grows linearly from none on; a draft pass is what is left of a step that verifies
    next to nothing. So whole blocks of every width cost what was timed. One sequence that drafts beside plain ones says
    what the target takes to treat sequences differently, which is charged with the first draft; the draft pass of one
    is known from one alone.
    """
    by_seqs: dict[int, dict[Shape, float]] = {}
    for shape in sorted(ms):
        by_seqs.setdefault(shape.seqs, {})[shape] = ms[shape]
    widths = sorted({shape.block for shape in ms if shape.block})
    plain: list[Point] = []
    draft: dict[int, list[Point]] = {width: [] for width in widths}
    verify: list[list[Point]] = []
    for n, timed in by_seqs.items():
        base = timed[Shape(n)]
        slope = _slope(n, widths, timed)
        passes = {w: max(timed[Shape(n, n, 2, w)] - base - slope * n, 0.05 * base) for w in widths}
        points = [(0, 0.0), (n, slope * n)]
        if n > 1:
            most = widths[-1]
            beside = timed[Shape(n, 1, most, most)] - base - slope * (most - 1)
            ragged = max(0.0, min(beside, passes[most]) - draft[most][0][1])
            points = [(0, 0.0), (1, slope + ragged), (n, slope * n + ragged)]
            passes = {w: max(taken - ragged, draft[w][0][1]) for w, taken in passes.items()}
        plain.append((n, base))
        for w, taken in passes.items():
            draft[w].append((n, taken))
            points.append((n * (w - 1), max(0.0, timed[Shape(n, n, w, w)] - base - taken)))
        verify.append(_rising(sorted(set(points))))
    return CostTable(_rising(plain), {w: _rising(points) for w, points in draft.items()}, verify)


def _slope(seqs: int, widths: Sequence[int], timed: Mapping[Shape, float]) -> float:
    """Milliseconds that one of few verified drafts adds: more of them never add less, so the least of all widths."""
    slopes = [
        (timed[Shape(seqs, seqs, w, w)] - timed[Shape(seqs, seqs, 2, w)]) / (seqs * (w - 2)) for w in widths if w > 2
    ]
    return max(0.0, min(slopes, default=0.0))


def _rising(costs: Sequence[Point]) -> list[Point]:
    """More never costs less; where it was timed so, something else held the smaller one up."""
    highest, rising = 0.0, []
    for size, ms in costs:
        highest = max(highest, ms)
        rising.append((size, highest))
    return rising
