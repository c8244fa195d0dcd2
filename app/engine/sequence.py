"""One request as the engine sees it."""

import collections.abc as abc
import hashlib
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from app.messages import Request

NOT_FINITE = -1
"""In the place of a token: the logits that it would be chosen by are not finite."""


class CountedTokens(NamedTuple):
    """All tokens of a sequence with penalties. `key` tells it from other sequences that had its batch slot."""

    key: tuple[str, int]
    batch_slot: int
    num_prompt_tokens: int
    token_ids: abc.Sequence[int]


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way: its tokens, its pages, and for how many of its tokens KV is valid.

    With n tokens, `num_computed == n - 1` means decoding: only the last token, the anchor, has no KV yet. Less
    means prefilling (or recomputing after a preemption); there is no other phase. `pages` are int32, in the order of
    the tokens they hold. While it runs, `batch_slot` is its place in arrays of max_num_seqs; -1 while it waits.
    `num_cached` says how many tokens of the prompt were in the cache when it was first admitted, None before that, and
    `num_found` how many tokens stand on pages that were found there this time. Its pages may be found in the cache, and
    enter it, while it is `cacheable`. `is_sound` while the logits of its last rows are known to be finite: then so is
    all KV on its pages.
    """

    request: Request
    arrival: int
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    batch_slot: int = -1
    pages: "array[int]" = field(default_factory=lambda: array("i"))
    num_cached: int | None = None
    num_found: int = 0
    cacheable: bool = True
    is_sound: bool = False
    _digests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.token_ids)
        self._digests = [hashlib.sha256(self.request.cache_salt.encode()).digest()]

    @property
    def key(self) -> tuple[str, int]:
        """Return what tells this sequence from all others of its scheduler."""
        return self.request.request_id, self.arrival

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """How many tokens the request may still emit."""
        return self.request.max_tokens - (len(self.token_ids) - len(self.request.token_ids))

    @property
    def is_decoding(self) -> bool:
        return self.num_computed == len(self.token_ids) - 1

    def digest(self, page: int, page_size: int) -> bytes:
        """What page number `page` of this sequence is found by, once its tokens are known: a hash of all that its KV
        depends on, which is every token up to its end, and of the salt. 32 bytes; each page is hashed once."""
        for done in range(len(self._digests) - 1, page + 1):
            tokens = array("i", self.token_ids[done * page_size : (done + 1) * page_size])
            self._digests.append(hashlib.sha256(self._digests[-1] + tokens.tobytes()).digest())
        return self._digests[page + 1]
