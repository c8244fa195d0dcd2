"""Sizes of decode steps that are captured in graphs, and the size that a step is padded to. No torch."""

from dataclasses import dataclass

from app.engine.errors import UnsupportedError

MAX_WIDTHS = 4
FLAT_ROWS = 64
"""Rows up to which a step takes hardly longer with more of them, because it reads all weights once (docs/cuda.md)."""
FEW_SEQS = 8
"""Sequences whose steps may all be whole blocks. Up to some 128 rows the weights are most of a step's time."""

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes of graphs, ascending: `targets` by (sequences, rows), and `drafts` by (blocks, width).

    The last ones are all sequences and the whole block, so every step has a size to round up to. Where attention takes
    sequences without rows, there is no `spare` row, and sequences share a target's rows in any way. Elsewhere each has
    one at least, and so has a sequence of padding.
    """

    targets: list[Size]
    drafts: list[Size]
    block_size: int
    spare: int

    @property
    def max_rows(self) -> int:
        """Return the rows of the largest graph. While it is captured, every row is padding."""
        return self.targets[-1][1]

    def draft(self, num_blocks: int, width: int) -> Size:
        """Return (blocks, width) that the draft is padded to."""
        return next(size for size in self.drafts if size[0] >= num_blocks and size[1] >= width)

    def target(self, num_seqs: int, num_rows: int) -> Size:
        """Return (sequences, rows) that a step is padded to."""
        return next(
            (seqs, rows)
            for seqs, rows in self.targets
            if seqs >= num_seqs and rows >= num_rows + self.spare + (seqs - num_seqs) * self.padding_rows(seqs, rows)
        )

    def padding_rows(self, seqs: int, rows: int) -> int:
        """Return the rows of each missing sequence of a target graph but the last: 1, or 0 if rows are shared."""
        return 1 if self.spare or rows == seqs else 0

    def target_passes(self, num_seqs: int) -> list[Size]:
        """Return (sequences, drafts) of the passes that steps of `num_seqs` are padded to, by drafts, which ascend.

        Sequences that have no rows count for nothing.
        """
        passes: list[Size] = []
        for seqs, rows in self.targets:
            counted = seqs if self.padding_rows(seqs, rows) else num_seqs
            drafts = rows - self.spare - counted
            if seqs >= num_seqs and (not passes or drafts > passes[-1][1]):
                passes.append((counted, drafts))
        return passes

    def draft_passes(self, width: int) -> list[Size]:
        """Return (blocks, width) of the passes that blocks of `width` rows are padded to, by blocks, which ascend."""
        return [self.draft(blocks, width) for blocks in dict.fromkeys(blocks for blocks, _ in self.drafts)]


def settle_graph_sizes(
    max_num_seqs: int, block_size: int, max_graphs: int, *, draft_graphs: bool, spare: int
) -> GraphSizes:
    """Return sizes of at most `max_graphs` graphs: powers of two of sequences, by a mean of 1, b/4, b/2 and b rows.

    Where sequences may be empty (`spare` 0), targets are sized by rows, and blocks of 3b/8 and 3b/4 are captured too.
    If these are too many, blocks narrower than b go first where there are few sequences. Then those two widths and
    fine numbers of rows go, then b/4 and b/2 everywhere, every other number of sequences and rows, and 1 last. Raises
    UnsupportedError if not even one size fits.
    """
    if max_graphs < 1 + draft_graphs:
        raise UnsupportedError(
            f"--max-graphs {max_graphs} is too small: a step takes {1 + draft_graphs}; or give --enforce-eager"
        )
    quarters = {1, -(-block_size // 4), -(-block_size // 2), block_size}
    widths, few = sorted(quarters)[-MAX_WIDTHS:], 0
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
        elif len(widths) > MAX_WIDTHS:
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
