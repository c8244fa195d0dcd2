"""Sizes of decode steps that are captured in graphs, and the size that a step is padded to. No torch."""

from collections.abc import Collection
from dataclasses import dataclass

from app.engine.errors import UnsupportedError

MAX_WIDTHS = 4

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """A target graph for each of `seqs` with each mean width of `widths`, and a draft graph with each of `blocks`.

    All ascend. The largest are all sequences and the whole block, so every step has a size to round up to. Every graph
    has at least `spare` padding rows, because attention on an NPU does not accept a sequence without rows.
    """

    seqs: tuple[int, ...]
    widths: tuple[int, ...]
    spare: int

    @property
    def blocks(self) -> tuple[int, ...]:
        """Return the captured rows of draft blocks: the widths that have drafts."""
        return tuple(width for width in self.widths if width > 1)

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
            for width in self.widths
            if seqs >= num_seqs and seqs * width >= num_rows + seqs - num_seqs
        )
        return next(size for size in sizes if size not in missing)

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

    If these are too many, b/4 and b/2 go first, then every other number of sequences, and 1 last. Raises
    UnsupportedError if not even one size fits.
    """
    widths = sorted({1, -(-block_size // 4), -(-block_size // 2), block_size})[-MAX_WIDTHS:]
    seqs = [1 << i for i in range((max_num_seqs - 1).bit_length())] + [max_num_seqs]
    if max_graphs < 1 + draft_graphs:
        raise UnsupportedError(
            f"--max-graphs {max_graphs} is too small: a step takes {1 + draft_graphs}; or give --enforce-eager"
        )
    while len(seqs) * (len(widths) + draft_graphs * sum(width > 1 for width in widths)) > max_graphs:
        if len(widths) > 2:
            widths.pop(1)
        elif len(seqs) > 1:
            seqs = seqs[-1::-2][::-1]
        else:
            widths.pop(0)
    return GraphSizes(tuple(seqs), tuple(widths), spare)
