"""Separate pages for the KV of a draft whose layers all have windows: few, however long a sequence is. No torch."""

from array import array
from collections.abc import Iterable
from typing import Any

from app.engine.models.page_pool import PagePool
from app.engine.sequence import Sequence


def window_pages(window: int, block_size: int, page_size: int) -> int:
    """Return the pages of a decoding sequence: its window and two blocks may straddle a page at both ends, and so may a
    prompt's chunk before it."""
    return (window + 2 * block_size) // page_size + 3


def num_draft_pages(sizes: Any) -> int:
    """Return the pages by `load.plan.Sizes`: of all sequences, of prompts' rows in a step, and scratch; 0 for none."""
    of_all = sizes.max_num_seqs * sizes.window_pages + sizes.max_num_batched_tokens // sizes.page_size
    return sizes.scratch_pages + of_all if sizes.window_pages else 0


class DraftPages:
    """Pages of `pool`. A sequence holds the pages of its rows, and of the `window` tokens before them.

    Its `draft_pages` are numbered like its pages, and 0 before `first_draft_page`. The pool has enough for all
    sequences. Full pages are cached like the target's, and evicted first once they lie before a window. If fewer are
    cached than a window takes, the draft sees only the tokens on these.
    """

    def __init__(self, num_pages: int, page_size: int, scratch_pages: int, window: int) -> None:
        self.pool = PagePool(num_pages, page_size, scratch_pages)
        self._window = window

    def begin(self, seq: Sequence) -> None:
        """Give a new sequence the cached pages before its first row, as far back as its window goes."""
        size, end = self.pool.page_size, seq.num_computed // self.pool.page_size
        cached = self.pool.find(seq.digest(page, size) for page in range(end - 1, self._first(seq) - 1, -1))
        self.pool.share(cached)
        seq.first_draft_page = end - len(cached)
        seq.draft_pages = array("i", [0] * seq.first_draft_page) + cached[::-1]

    def move(self, seq: Sequence, filled: Iterable[int]) -> None:
        """Cache the pages with numbers `filled`, and release those that lie before the window."""
        for page in filled:
            self.pool.publish(seq.draft_pages[page], seq.digest(page, self.pool.page_size))
        old, new = seq.first_draft_page, self._first(seq)
        if old < new:
            self.pool.release(seq.draft_pages[old:new], reuse_first=True)
            seq.draft_pages[old:new] = array("i", [0] * (new - old))
            seq.first_draft_page = new

    def release(self, seq: Sequence, num_known: int) -> None:
        """Release all pages. Those after the first `num_known` pages of the sequence count as not sound."""
        first = seq.first_draft_page
        self.pool.release(seq.draft_pages[max(first, num_known) :], sound=False)
        # The last page is what a sequence would go on from, so it is the last to be reused.
        self.pool.release(seq.draft_pages[first:num_known][::-1], sound=seq.is_sound)
        seq.draft_pages, seq.first_draft_page = array("i"), 0

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that every page is free, cached or owned, and that sequences hold none before their first."""
        owned = []
        for seq in sequences:
            before, held = seq.draft_pages[: seq.first_draft_page], seq.draft_pages[seq.first_draft_page :]
            assert not any(before), f"{seq.request.request_id} holds pages of the draft before its first one"
            owned.append(held)
        self.pool.check(owned)

    def _first(self, seq: Sequence) -> int:
        return max(0, seq.num_computed - self._window) // self.pool.page_size
