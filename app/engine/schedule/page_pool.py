"""Pages of KV memory: which are free, which are owned, which can be found again. The tensors they stand for are in
`kv_pool`."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable

SCRATCH_PAGES = 1
"""Pages [0, SCRATCH_PAGES) at least belong to nobody: padded page tables and padding rows point there."""


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


class PagePool:
    """Hands out page ids of `page_size` tokens each; the target's and the draft's pools share them.

    Every page outside the scratch pages is either free or owned. A cached page, found by its digest, may be owned by
    several sequences, and stays cached when the last of them gives it back. Free pages that are not cached are reused
    first, then cached ones, least-recently-used first; a page that is reused is cached no more.

    A page that was given back by a sequence that is not sound may hold KV that is not finite, until a sound one gives
    it back: when it is reused before that, it has to be scrubbed.
    """

    def __init__(self, num_pages: int, page_size: int, scratch_pages: int = SCRATCH_PAGES) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_usable = num_pages - scratch_pages
        self._free: deque[int] = deque(range(scratch_pages, num_pages))
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._num_owners = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._suspects: set[int] = set()
        self._to_scrub: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._free_cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def find(self, digests: Iterable[bytes]) -> "array[int]":
        """The pages of `digests`, up to the first that is not cached."""
        pages = array("i")
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def cost(self, found: "array[int]", num_tokens: int) -> int:
        """How many of the free pages it takes to hold `num_tokens`, the first of them on pages that `find` gave."""
        return self.pages_for(num_tokens) - sum(self._num_owners[page] > 0 for page in found)

    def share(self, found: "array[int]") -> None:
        """Own pages that `find` gave, one time more."""
        for page in found:
            if not self._num_owners[page]:
                del self._free_cached[page]
            self._num_owners[page] += 1

    def grow(self, pages: "array[int]", num_tokens: int) -> None:
        """Extend `pages` in place until it holds `num_tokens`. Raises OutOfPages and takes nothing otherwise."""
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > self.num_free:
            raise OutOfPages(f"{missing} pages wanted, {self.num_free} free")
        pages.extend(self._take() for _ in range(missing))

    def publish(self, page: int, digest: bytes) -> None:
        """Let an owned page, full of valid KV, be found by `digest`. One that is cached under it already stays so."""
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def forget(self, pages: "array[int]") -> None:
        """Let owned pages be found no more."""
        for page in pages:
            if digest := self._digest_of.pop(page, None):
                del self._page_of[digest]

    def pages_to_scrub(self) -> list[int]:
        """The pages that were reused since this was last asked, and may hold KV that is not finite."""
        pages, self._to_scrub = self._to_scrub, []
        return pages

    def release(self, pages: "array[int]", *, sound: bool = True) -> None:
        """Take pages back, the tail first: a sequence's first pages are the likeliest to be wanted again. `sound`: all
        KV on them is known to be finite."""
        if not sound:
            self._suspects.update(pages)
        elif self._suspects:
            self._suspects.difference_update(pages)
        for page in reversed(pages):
            self._num_owners[page] -= 1
            if self._num_owners[page]:
                continue
            if page in self._digest_of:
                self._free_cached[page] = None
            else:
                self._free.append(page)

    def flush(self) -> None:
        """No page is cached any more; who owns which stays as it is."""
        self._free.extend(self._free_cached)
        self._free_cached.clear()
        self._page_of.clear()
        self._digest_of.clear()

    def _take(self) -> int:
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._free_cached.popitem(last=False)
            del self._page_of[self._digest_of.pop(page)]
        if page in self._suspects:
            self._suspects.discard(page)
            self._to_scrub.append(page)
        self._num_owners[page] = 1
        return page
