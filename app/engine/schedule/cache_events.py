"""Changes of the prefix cache, for routers that keep an index of its pages."""

from itertools import groupby

from app.engine.sequence import Sequence
from app.messages import CacheEvent


class CacheEvents:
    """Changes since they were last taken, in order. Consecutive pages of one change are one event."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def stored(self, seq: Sequence, pages: list[int], page_size: int) -> None:
        """Record that pages of a sequence were cached. They are indices in its pages, ascending."""
        for _, numbered in groupby(enumerate(pages), lambda at: at[1] - at[0]):
            run = [page for _, page in numbered]
            start = run[0]
            tokens = seq.token_ids[start * page_size : (run[-1] + 1) * page_size]
            digests = [seq.digest(page, page_size) for page in run]
            parent = seq.digest(start - 1, page_size) if start else None
            salt = "" if start else seq.request.cache_salt
            self._events.append(CacheEvent("stored", digests, parent, tokens, page_size, salt))

    def removed(self, digest: bytes) -> None:
        """Record an evicted page."""
        if self._events and self._events[-1].kind == "removed":
            self._events[-1].digests.append(digest)
        else:
            self._events.append(CacheEvent("removed", [digest]))

    def cleared(self) -> None:
        """Record that all pages were evicted."""
        self._events.append(CacheEvent("cleared"))

    def take(self) -> list[CacheEvent]:
        """Return the changes and clear them."""
        events, self._events = self._events, []
        return events
