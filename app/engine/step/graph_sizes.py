"""Sizes of decode steps that are captured in graphs, and the size that a step is padded to. No torch."""

from collections.abc import Collection
from dataclasses import dataclass

from app.engine.errors import UnsupportedError

MAX_WIDTHS = 4
FEW_SEQS = 8
"""Sequences whose steps may all be whole blocks. Up to some 128 rows the weights are most of a step's time."""

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """A target graph for each of `seqs` with each mean width of `widths`, and a draft graph with each width above 1.

    All ascend. The largest are all sequences and the whole block, so every step has a size to round up to. Every graph
    has at least `spare` padding rows, because attention on an NPU does not accept a sequence without rows. Up to `few`
    sequences, or draft blocks, only width 1 and the whole block are captured.
    """

    seqs: tuple[int, ...]
    widths: tuple[int, ...]
    spare: int
    few: int = 0

    @property
    def targets(self) -> list[tuple[int, int]]:
        """Return (sequences, rows) of the target's graphs, ascending."""
        return [(seqs, self.rows(seqs, width)) for seqs in self.seqs for width in self._widths_of(seqs)]

    @property
    def drafts(self) -> list[tuple[int, int]]:
        """Return (blocks, width) of the draft's graphs, ascending."""
        return [(blocks, width) for blocks in self.seqs for width in self._widths_of(blocks) if width > 1]

    def seqs_for(self, num_seqs: int) -> int:
        """Return the number of sequences that `num_seqs` are padded to."""
        return next(size for size in self.seqs if size >= num_seqs)

    def draft(self, num_blocks: int, rows: int, missing: Collection[Size] = ()) -> Size:
        """Return (blocks, rows of each) that the draft is padded to, none of `missing`."""
        sizes = ((blocks, rows) for blocks in self.seqs if blocks >= num_blocks)
        return next(size for size in sizes if size not in missing)

    def target(self, num_seqs: int, num_rows: int, missing: Collection[Size] = ()) -> Size:
        """Return (sequences, rows) that a step is padded to, none of `missing`. Padding sequences have a row each."""
        sizes = (
            (seqs, self.rows(seqs, width))
            for seqs in self.seqs
            for width in self._widths_of(seqs)
            if seqs >= num_seqs and seqs * width >= num_rows + seqs - num_seqs
        )
        return next(size for size in sizes if size not in missing)

    def padded_drafts(self, num_seqs: int) -> tuple[int, list[int]]:
        """Return the sequences that a target pass is padded to, and the numbers of drafts that its graphs hold."""
        seqs = self.seqs_for(num_seqs)
        return seqs, [seqs * (width - 1) for width in self._widths_of(seqs)]

    def block_width(self, num_blocks: int, width: int) -> int:
        """Return the width that `num_blocks` draft blocks of `width` rows are widened to."""
        captured = self._widths_of(self.seqs_for(num_blocks))
        return next(each for each in captured if each >= max(width, 2))

    def _widths_of(self, seqs: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys((self.widths[0], self.widths[-1]))) if seqs <= self.few else self.widths

    def rows(self, seqs: int, width: int) -> int:
        return seqs * width + self.spare

    @property
    def max_rows(self) -> int:
        """Return the rows of the largest graph. While it is captured, every row is padding."""
        return self.rows(self.seqs[-1], self.widths[-1])


def settle_graph_sizes(
    max_num_seqs: int, block_size: int, max_graphs: int, *, draft_graphs: bool, spare: int
) -> GraphSizes:
    """Return sizes of at most `max_graphs` graphs: powers of two of sequences, by a mean of 1, b/4, b/2 and b rows.

    If these are too many, b/4 and b/2 go first where there are few sequences. Then they go everywhere, then every other
    number of sequences, and 1 last. Raises UnsupportedError if not even one size fits.
    """
    widths = sorted({1, -(-block_size // 4), -(-block_size // 2), block_size})[-MAX_WIDTHS:]
    seqs = [1 << i for i in range((max_num_seqs - 1).bit_length())] + [max_num_seqs]
    if max_graphs < 1 + draft_graphs:
        raise UnsupportedError(
            f"--max-graphs {max_graphs} is too small: a step takes {1 + draft_graphs}; or give --enforce-eager"
        )
    few = 0
    while True:
        sizes = GraphSizes(tuple(seqs), tuple(widths), spare, few)
        if len(sizes.targets) + draft_graphs * len(sizes.drafts) <= max_graphs:
            return sizes
        if len(widths) > 2 and few < min(FEW_SEQS, seqs[-1]):
            few = sizes.seqs_for(few + 1)
        elif len(widths) > 2:
            widths.pop(1)
        elif len(seqs) > 1:
            seqs = seqs[-1::-2][::-1]
        else:
            widths.pop(0)
