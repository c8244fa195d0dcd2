"""The captured size that a step is padded to. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

Size = tuple[int, int]

CHUNK_ROWS = 256
"""Rows, less a spare one, of the largest graph for prompt chunks. By its figures an Ascend910B multiplies some 200 rows
while it reads the weights, so padding up to there is cheap, and many more take longer than the launches. Not timed."""


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes of graphs, ascending: `targets` by (sequences, rows), and `drafts` by (blocks, width).

    The last ones are all sequences and the whole block, so every step has a size to round up to. Where attention takes
    sequences without rows, sequences share a target's rows in any way. Elsewhere each has at least one, padding too.
    """

    targets: list[Size]
    drafts: list[Size]
    block_size: int
    spare: int  # rows of each target for padding: 0 if attention takes sequences without rows, else 1
    chunks: bool = True  # graphs may hold prompt chunks

    @property
    def max_rows(self) -> int:
        """Return the rows of the largest graph. While it is captured, every row is padding."""
        return self.targets[-1][1]

    def draft(self, num_blocks: int, width: int) -> Size:
        """Return (blocks, width) that the draft is padded to."""
        return next(size for size in self.drafts if size[0] >= num_blocks and size[1] >= width)

    def target(self, num_seqs: int, num_rows: int) -> Size:
        """Return (sequences, rows) that a decode step is padded to."""
        return next(self._fitting(num_seqs, num_rows))

    def with_chunks(self, num_seqs: int, num_rows: int) -> Size | None:
        """Return (sequences, rows) that a step with prompt chunks is padded to, or None for one too large."""
        fitting = self._fitting(num_seqs, num_rows) if self.chunks else iter(())
        return next((size for size in fitting if size[1] <= CHUNK_ROWS + self.spare), None)

    def with_longest_chunks(self) -> dict[Size, int]:
        """Return the target graphs to try with a prompt chunk, the largest of each mean width, and the chunk's rows:
        all but the spare one and one for each other sequence."""
        largest = {}
        for seqs, rows in self.targets if self.chunks else []:
            chunk = rows - self.spare - (seqs - 1)
            if chunk > 1 and rows <= CHUNK_ROWS + self.spare:
                largest[(rows - self.spare) // seqs] = (seqs, rows), chunk
        return dict(largest.values())

    def _fitting(self, num_seqs: int, num_rows: int) -> Iterator[Size]:
        for seqs, rows in self.targets:
            if seqs >= num_seqs and rows >= num_rows + self.spare + (seqs - num_seqs) * self.padding_rows(seqs, rows):
                yield seqs, rows

    def padding_rows(self, seqs: int, rows: int) -> int:
        """Return the rows of each missing sequence of a target graph but the last: 1, or 0 if rows are shared."""
        return 1 if self.spare or rows == seqs else 0

    def target_passes(self, num_seqs: int) -> list[Size]:
        """Return (sequences, drafts) of the passes that steps of `num_seqs` are padded to, by drafts, which ascend.

        Sequences without rows are not counted.
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
