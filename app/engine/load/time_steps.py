"""Times of decode steps on this machine, taken before the first request in the calls that serving makes."""

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from app.engine.load.sizes import Sizes
from app.engine.load.step_memory import pages_of, verify_batch
from app.engine.schedule.batch import Batch
from app.engine.schedule.costs import CostTable, Shape, shapes
from app.engine.step.inputs import StepInputs
from app.engine.step.runner import ModelRunner, PendingStep

MAX_SECONDS = 10
"""Time for all steps. A step begins only if it is expected to end by then, and its cost is scaled otherwise."""
_SECONDS = 2.0
"""Time after which only the smallest and the largest number of sequences are timed, and those once."""
_ROUNDS = 6
_IN_A_ROW = 3
"""Steps of a shape in every round, of which the last is timed."""
_SLOW_MS = 100.0
"""A step that takes longer is timed at once, because steps like it before it would save few of its milliseconds."""
_CONTEXT = 128
"""Tokens before the rows, like in an answer. Without context a plain step would look too cheap, because context is more
of its time than of a step that drafts."""


def measure_costs(
    runner: ModelRunner,
    sizes: Sizes,
    num_pages: int,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    *,
    overlap: bool = False,
) -> CostTable:
    """Time decode steps of 1, 2, 4 ... sequences in the shapes of `shapes`, and return their costs.

    Blocks are as wide as those of the runner's graphs, if it has some. With `overlap` a step is launched before the
    previous one is read, as in serving, so that the host's part is hidden alike.

    Every round runs every shape once, and the quickest time of each counts, because other load only makes steps slower.
    Free pages are overwritten; sizes that need more than `num_pages` are left out. A plain step and a whole block of
    one sequence are timed in any case. `on_progress` gets the seconds that are over, and `MAX_SECONDS`.
    """
    seqs = sorted({*(1 << i for i in range(sizes.max_num_seqs.bit_length())), sizes.max_num_seqs})
    seqs = [n for n in seqs if n <= sizes.max_num_seqs and pages_of(n, sizes) <= num_pages]
    ends = (seqs[0], seqs[-1])
    widths = sorted({width for _, width in runner.padded_to.drafts}) if runner.padded_to else []
    times: dict[Shape, list[float]] = {}
    begun = time.perf_counter()
    for done in range(_ROUNDS):
        for n in dict.fromkeys((*ends, *seqs[::2], *seqs)):
            if time.perf_counter() - begun > _SECONDS and (done or n not in ends):
                break
            for shape in shapes(n, sizes.block_size, widths):
                seconds = time.perf_counter() - begun
                on_progress(min(int(seconds), MAX_SECONDS - 1), MAX_SECONDS)
                if len(times) < 2 or seconds + _expected_seconds(shape, times) <= MAX_SECONDS:
                    times.setdefault(shape, []).append(_timed(runner, made_up(shape, sizes), overlap=overlap))
    on_progress(MAX_SECONDS, MAX_SECONDS)
    wanted = [shape for n in seqs if n in ends or Shape(n) in times for shape in shapes(n, sizes.block_size, widths)]
    return CostTable({shape: _expected_ms(shape, times) for shape in wanted}, runner.padded_to)


def _expected_ms(shape: Shape, times: Mapping[Shape, Sequence[float]]) -> float:
    """Return the quickest time of a shape. Without one, scale the timed shapes by their rows.

    A row of the target and a row of the draft each have one cost, fitted to all shapes and the first plain step.
    """
    if taken := times.get(shape):
        return min(taken)
    first = min(times[Shape(1)])
    rows = np.array([_rows(timed) for timed in times], dtype=float)
    rest = np.array([min(taken) - first for taken in times.values()])
    return first + float(_rows(shape) @ np.linalg.lstsq(rows, rest)[0].clip(min=0))


def _expected_seconds(shape: Shape, times: Mapping[Shape, Sequence[float]]) -> float:
    ms = _expected_ms(shape, times)
    return (ms if ms > _SLOW_MS else _IN_A_ROW * ms) / 1000


def _rows(shape: Shape) -> NDArray[np.int64]:
    """Return the rows `[2]` of the target and of the draft, without the row of one plain sequence."""
    return np.array((shape.seqs - 1 + shape.drafting * (shape.rows - 1), shape.drafting * shape.block))


def made_up(shape: Shape, sizes: Sizes, context: int = _CONTEXT) -> Batch:
    """Return a step of made-up sequences after a context that is their first page over and over.

    The context is shorter where `sizes.padded_len` leaves no room for it, because RoPE's table ends there.
    """
    batch = verify_batch(shape.seqs, shape.rows, sizes)
    batch.block_rows = shape.block
    room = sizes.padded_len - len(batch.decodes[0].seq.pages) * sizes.page_size
    pages = max(0, min(context, sizes.max_model_len, room) // sizes.page_size)
    for rows in batch.decodes:
        rows.seq.pages = array("i", [rows.seq.pages[0]] * pages) + rows.seq.pages
        rows.seq.token_ids = [0] * pages * sizes.page_size + rows.seq.token_ids
        rows.start += pages * sizes.page_size
    for rows in batch.decodes[shape.drafting :]:
        rows.count, rows.num_drafts = 1, 0
    return batch


def _with_varied_tokens(runner: ModelRunner, inputs: StepInputs) -> StepInputs:
    """Return a step whose rows have different tokens, like those of text, in the place of anchors and drafts.

    Rows of one token have the same experts. A target with experts would read few of them, and a wide step would look
    too cheap.
    """
    target = inputs.target
    token_ids = _varied_tokens(runner.forward.target.config.vocab_size, len(target.token_ids))
    inputs.target = replace(target, token_ids=token_ids, token_source=np.arange(len(token_ids), dtype=np.int32))
    return inputs


@cache
def _varied_tokens(vocab_size: int, count: int) -> NDArray[np.int32]:
    return np.random.default_rng(0).integers(vocab_size, size=count, dtype=np.int32)


def _timed(runner: ModelRunner, batch: Batch, *, overlap: bool) -> float:
    """Return the milliseconds of a step that follows others like it, like in serving. A slow one follows none.

    With `overlap` they are those from one read to the next, with a step launched between them.
    """

    def launch() -> PendingStep:
        return runner.launch(_with_varied_tokens(runner, runner.layout.build(batch)))

    ahead = launch() if overlap else None
    for _ in range(_IN_A_ROW):
        begun = time.perf_counter()
        step = launch()
        (ahead or step).read()
        ms = 1000 * (time.perf_counter() - begun)
        ahead = step if overlap else None
        if ms > _SLOW_MS:
            break
    if ahead:
        ahead.read()
    return ms
