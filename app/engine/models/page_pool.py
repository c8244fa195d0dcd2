"""Pages of KV memory: free, owned and cached. Their tensors are in `kv_pool.py`. No torch."""

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

SCRATCH_PAGES = 1
"""At least the pages [0, SCRATCH_PAGES) are scratch: padded page tables and padding rows point there."""


class OutOfPages(Exception):
    """Fewer pages are free than were asked for. Nothing was taken."""


class PagePool:
    """Page ids of `page_size` tokens each, of the target's KV and the draft's, or of either.

    Every page but the scratch pages is either free or owned. A cached page is found by its digest, may have several
    owners, and stays cached when the last one releases it. Free uncached pages are reused first, then cached ones,
    least-recently-used first. `on_forget` is called with the digest of an evicted page.

    KV on pages that are released as not sound may not be finite. If such a page is reused before a later owner releases
    it as sound, its slots are added to `to_scrub`, which are to be zeroed before the next step.
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
        self.on_forget: Callable[[bytes], None] = lambda _: None
        self.to_scrub: list[int] = []
        self._suspects: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._free_cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    @property
    def cached(self) -> Mapping[bytes, int]:
        """Cached pages by digest, owned or not."""
        return MappingProxyType(self._page_of)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def find(self, digests: Iterable[bytes]) -> "array[int]":
        """Return the pages of `digests`, up to the first that is not cached."""
        pages = array("i")
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def cost(self, cached: "array[int]", num_tokens: int) -> int:
        """Return how many free pages are needed to hold `num_tokens`, the first of them on pages from `find`."""
        return self.pages_for(num_tokens) - sum(self._num_owners[page] > 0 for page in cached)

    def share(self, cached: "array[int]") -> None:
        """Add an owner to pages from `find`."""
        for page in cached:
            if not self._num_owners[page]:
                del self._free_cached[page]
            self._num_owners[page] += 1

    def is_writable(self, page: int) -> bool:
        """Return True if the page may be written: it has one owner, and is not cached."""
        return self._num_owners[page] == 1 and page not in self._digest_of

    def grow(self, pages: "array[int]", num_tokens: int) -> None:
        """Extend `pages` in place until they hold `num_tokens`. Raises OutOfPages, and takes nothing then."""
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > self.num_free:
            raise OutOfPages(f"{missing} pages wanted, {self.num_free} free")
        pages.extend(self._take() for _ in range(missing))

    def publish(self, page: int, digest: bytes) -> bool:
        """Cache an owned page, full of valid KV, under `digest`. Return False if another page has it already."""
        if digest in self._page_of:
            return False
        self._page_of[digest] = page
        self._digest_of[page] = digest
        return True

    def forget(self, pages: Iterable[int]) -> None:
        """Remove pages from the prefix cache."""
        for page in pages:
            if digest := self._digest_of.pop(page, None):
                del self._page_of[digest]
                self.on_forget(digest)

    def release(self, pages: "array[int]", *, sound: bool = True, reuse_first: bool = False) -> None:
        """Remove an owner, last pages first, because a sequence's first pages are the likeliest to be hit again.

        The pages are `sound` if all KV on them is known to be finite. With `reuse_first` cached ones are evicted first.
        """
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
                if reuse_first:
                    self._free_cached.move_to_end(page, last=False)
            else:
                self._free.append(page)

    def scrub(self, pages: "array[int]", start: int) -> None:
        """Add the slots of `pages` from token `start` on to `to_scrub`."""
        size = self.page_size
        self.to_scrub += [pages[token // size] * size + token % size for token in range(start, len(pages) * size)]

    def flush(self) -> None:
        """Forget all cached pages. Owners keep theirs."""
        self._free.extend(self._free_cached)
        self._free_cached.clear()
        self._page_of.clear()
        self._digest_of.clear()

    def check(self, owned: Iterable["array[int]"]) -> None:
        """Assert that every page is free, cached or owned, if `owned` has the pages of each owner."""
        owners = Counter(page for pages in owned for page in pages)
        free = Counter((*self._free, *self._free_cached))
        for page, counted in enumerate(self._num_owners):
            is_scratch = page < self.num_pages - self.num_usable
            assert not (is_scratch and owners[page]), f"scratch page {page} is owned"
            assert counted == owners[page], f"page {page} has {owners[page]} owners, but {counted} are counted"
            wanted = 0 if is_scratch or owners[page] else 1
            assert free[page] == wanted, f"page {page}, of {owners[page]} owners, is {free[page]} times free"
        for digest, page in self._page_of.items():
            assert self._digest_of.get(page) == digest, f"page {page} is cached under another page's digest"
        assert len(self._digest_of) == len(self._page_of), "a page has a digest that is not in the cache"
        for page in self._free_cached:
            assert page in self._digest_of, f"free page {page} counts as cached, and has no digest"
        for page in self._free:
            assert page not in self._digest_of, f"cached page {page} is reused before those that are not cached"

    def _take(self) -> int:
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._free_cached.popitem(last=False)
            self.forget([page])
        self._num_owners[page] = 1
        if page in self._suspects:
            self._suspects.discard(page)
            self.to_scrub += range(page * self.page_size, (page + 1) * self.page_size)
        return page
