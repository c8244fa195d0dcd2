"""Decode steps to time at warm-up, and the table of costs that their times give. No torch, no clock."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from app.engine.schedule.costs import CostTable, Point, StepSizes


class Shape(NamedTuple):
    """A step to time: `seqs` decode, `drafting` of them draft blocks of `block` rows and verify `rows` rows each."""

    seqs: int
    drafting: int = 0
    rows: int = 1
    block: int = 0


def shapes(seqs: int, block_size: int, widths: Sequence[int] = ()) -> list[Shape]:
    """Return the shapes to time for a number of sequences.

    These are a plain step, and one sequence that drafts beside plain ones. Then all draft blocks of `widths`, of which
    two rows or all are verified. Without `widths` blocks are a quarter, a half and all of the block size.
    """
    blocks = sorted({max(2, width) for width in widths or [-(-block_size // parts) for parts in (1, 2, 4)]})
    all_draft = [Shape(seqs, seqs, rows, block) for block in blocks for rows in (2, block)]
    return list(dict.fromkeys((Shape(seqs), Shape(seqs, 1, block_size, block_size), *all_draft)))


def cost_table(ms: Mapping[Shape, float], sizes: StepSizes | None = None) -> CostTable:
    """Build a table from {shape: ms} with all of `shapes` for every number of sequences, of steps padded to `sizes`.

    Verification cost is linear in drafts while they are few. The draft pass costs what remains of a step in which each
    block verifies two rows, so whole blocks cost what was timed. One sequence that drafts beside plain ones shows what
    ragged rows cost the target; the first draft is charged with that.
    """
    by_seqs: dict[int, dict[Shape, float]] = {}
    for shape in sorted(ms):
        by_seqs.setdefault(shape.seqs, {})[shape] = ms[shape]
    widths = sorted({shape.block for shape in ms if shape.block})
    widest = widths[-1]
    plain: list[Point] = []
    draft: dict[int, list[Point]] = {width: [] for width in widths}
    verify: list[list[Point]] = []
    for n, timed in by_seqs.items():
        base = timed[Shape(n)]
        slope = _verify_slope(n, widths, timed)
        passes = {w: max(timed[Shape(n, n, 2, w)] - base - slope * n, 0.05 * base) for w in widths}
        points = [(0, 0.0), (n, slope * n)]
        if n > 1:
            beside = timed[Shape(n, 1, widest, widest)] - base - slope * (widest - 1)
            ragged = max(0.0, min(beside, passes[widest]) - draft[widest][0][1])
            points = [(0, 0.0), (1, slope + ragged), (n, slope * n + ragged)]
            passes = {w: max(pass_ms - ragged, draft[w][0][1]) for w, pass_ms in passes.items()}
        plain.append((n, base))
        for w, pass_ms in passes.items():
            draft[w].append((n, pass_ms))
            points.append((n * (w - 1), max(0.0, timed[Shape(n, n, w, w)] - base - pass_ms)))
        verify.append(_rising(sorted(set(points))))
    return CostTable(_rising(plain), {w: _rising(points) for w, points in draft.items()}, verify, sizes)


def _verify_slope(seqs: int, widths: Sequence[int], timed: Mapping[Shape, float]) -> float:
    """Return ms that one draft adds while few are verified: the least over all widths, because noise only adds."""
    slopes = [
        (timed[Shape(seqs, seqs, w, w)] - timed[Shape(seqs, seqs, 2, w)]) / (seqs * (w - 2)) for w in widths if w > 2
    ]
    return max(0.0, min(slopes, default=0.0))


def _rising(points: Sequence[Point]) -> list[Point]:
    """Return the points with no cost below that of a smaller size: a smaller size that took longer was held up."""
    highest, rising = 0.0, []
    for size, ms in points:
        highest = max(highest, ms)
        rising.append((size, highest))
    return rising
