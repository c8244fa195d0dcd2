"""Which sizes of decode steps are captured in graphs, decided at startup."""

import logging
from dataclasses import replace

from app.config.engine import EngineConfig
from app.engine.device.base import Backend
from app.engine.errors import UnsupportedError
from app.engine.schedule.graph_sizes import GraphSizes, Size

logger = logging.getLogger(__name__)

FLAT_ROWS = 64
"""Rows up to which a step takes hardly longer with more of them, because it reads all weights once (docs/cuda.md)."""
FEW_SEQS = 8
"""Sequences whose steps may all be whole blocks. Up to some 128 rows the weights are most of a step's time."""


def plan_graphs(config: EngineConfig, max_num_seqs: int, block_size: int, backend: Backend) -> GraphSizes | None:
    """Return the sizes to capture, or None to run eagerly."""
    if not backend.captures if config.enforce_eager is None else config.enforce_eager:
        return None
    max_graphs, limit = config.max_graphs, backend.max_graphs(config.tensor_parallel_size)
    if limit is not None and limit < max_graphs:
        logger.warning("--max-graphs %d: this device has streams for %d, so that many are captured", max_graphs, limit)
        max_graphs = limit
    draft_graphs = config.draft is not None and not config.draft_enforce_eager
    spare = 0 if backend.allows_empty_sequences else 1
    sizes = settle_graph_sizes(max_num_seqs, block_size, max_graphs, draft_graphs=draft_graphs, spare=spare)
    return replace(sizes, chunks=config.prompts_in_graphs == "auto")


def settle_graph_sizes(
    max_num_seqs: int, block_size: int, max_graphs: int, *, draft_graphs: bool, spare: int
) -> GraphSizes:
    """Return sizes of at most `max_graphs` graphs: powers of two of sequences, by a mean of 1, b/4, b/2 and b rows.

    Where sequences may be empty (`spare` 0), targets are sized by rows, and blocks of 3b/8 and 3b/4 are captured too.
    If these are too many, sizes are dropped in this order: blocks narrower than b of few sequences, the two widths
    3b/8 and 3b/4, fine numbers of rows, b/4 and b/2 everywhere, every other number of sequences and rows, and width 1.
    Raises UnsupportedError if not even one size fits.
    """
    least = 1 + draft_graphs
    if max_graphs < least:
        raise UnsupportedError(f"--max-graphs {max_graphs} is too small: a step takes {least}; or give --enforce-eager")
    quarters = {1, -(-block_size // 4), -(-block_size // 2), block_size}
    widths = sorted(quarters)
    few = 0
    seqs = [1 << i for i in range((max_num_seqs - 1).bit_length())] + [max_num_seqs]
    totals, coarse = [], []
    if spare == 0 and block_size > 1:
        widths = sorted(quarters | {-(-3 * block_size // 8), -(-3 * block_size // 4)})
        totals, coarse = (_totals(block_size, block_size * max_num_seqs, fine=fine) for fine in (True, False))
    while True:
        by_width = [(n, width) for n in seqs for width in widths if n > few or width in (widths[0], block_size)]
        targets = [(n, n * width + spare) for n, width in by_width]
        if totals:
            targets = _shared(seqs if widths[0] == 1 else [], totals, max_num_seqs, block_size)
        drafts = [(n, width) for n, width in by_width if width > 1 and draft_graphs]
        if len(targets) + len(drafts) <= max_graphs:
            return GraphSizes(targets, drafts, block_size, spare)
        if len(widths) > 2 and few < min(FEW_SEQS, max_num_seqs):
            few = next(n for n in seqs if n > few)
        elif len(widths) > len(quarters):
            widths = sorted(quarters)
        elif len(totals) > len(coarse):
            totals = coarse
        elif len(widths) > 2:
            widths.pop(1)
        elif len(seqs) > 1:
            seqs, totals = seqs[-1::-2][::-1], totals[-1::-2][::-1]
        elif len(totals) > 1:
            totals = totals[-1:]
        else:
            widths.pop(0)


def _shared(plain: list[int], totals: list[int], max_num_seqs: int, block_size: int) -> list[Size]:
    """Return target sizes by rows: one row for each of `plain` sequences, and `totals` that sequences share.

    Sequences that share rows have one each at least, and one of them two: a step of T rows has fewer than T. A single
    sequence has its own graph for a block, because tiles without work are launched too.
    """
    sizes = {(n, n) for n in plain} | {(min(max_num_seqs, total - 1), total) for total in totals}
    if totals[0] == block_size:
        sizes.add((1, block_size))
    return sorted(sizes, key=lambda size: (size[1], size[0] != size[1], size[0]))


def _totals(block_size: int, most: int, *, fine: bool) -> list[int]:
    """Return rows of target graphs, up to `most`: a block's times powers of two.

    If `fine`, sizes between them are added where rows cost: one in each doubling, and three from some size on.
    """
    totals, size = {most}, block_size
    while size < most:
        parts = (5, 6, 7) if size >= 4 * FLAT_ROWS else (6,) if size >= FLAT_ROWS else ()
        totals |= {size, *(size * part // 4 for part in parts if fine)}
        size *= 2
    return sorted(total for total in totals if total <= most)
