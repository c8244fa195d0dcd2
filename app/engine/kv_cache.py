"""Pages of KV memory: which are free, which are owned. The tensors they stand for are in `kv_pool`."""

from array import array
from collections import deque

SCRATCH_PAGES = 1
"""Pages [0, SCRATCH_PAGES) at least belong to nobody: padded page tables and padding rows point there."""


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


class PagePool:
    """Hands out page ids of `page_size` tokens each; the target's and the draft's pools share them.

    Every page outside the scratch pages is either free or owned by exactly one sequence. Free pages are reused
    least-recently-used first.
    """

    def __init__(self, num_pages: int, page_size: int, scratch_pages: int = SCRATCH_PAGES) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_usable = num_pages - scratch_pages
        self._free: deque[int] = deque(range(scratch_pages, num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def grow(self, pages: "array[int]", num_tokens: int) -> None:
        """Extend `pages` in place until it holds `num_tokens`. Raises OutOfPages and takes nothing otherwise."""
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > len(self._free):
            raise OutOfPages(f"{missing} pages wanted, {len(self._free)} free")
        pages.extend(self._free.popleft() for _ in range(missing))

    def release(self, pages: "array[int]") -> None:
        """Take pages back, the tail first: a sequence's first pages are the likeliest to be wanted again."""
        self._free.extend(reversed(pages))
