"""One sequence: tokens, pages, and for how many tokens KV is valid."""

import hashlib
from array import array
from dataclasses import dataclass, field

from app.messages import Request

NOT_FINITE = -1
"""In the place of a token whose logits are not finite."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine.

    With n tokens, `num_computed == n - 1` means decoding: only the last token, the anchor, has no KV yet. Less means
    prefilling, or recomputing after a preemption. `pages` are int32, in the order of the tokens they hold. `batch_slot`
    is its row in arrays of max_num_seqs while it runs, else -1. `num_cached` counts the prompt tokens that were cached
    at its first admission, and `num_found` the tokens on pages found at its last one. A `cacheable` sequence finds and
    publishes pages. It `is_sound` if all KV on its pages is known to be finite. `draft_pages` are those of a draft that
    has its own (`dflash/draft_pages.py`). `state_slot` has its recurrent state, `next_state_slot` gets that of the rows
    that run now, and `split_slot` that in the middle of them. They are 0 if there is none. `replaceable` is the digest
    of a checkpoint that the sequence's next one replaces. A run ends when its memory is freed, and a preempted sequence
    begins another.
    """

    request: Request
    arrival: int
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    batch_slot: int = -1
    pages: "array[int]" = field(default_factory=lambda: array("i"))
    draft_pages: "array[int]" = field(default_factory=lambda: array("i"))
    first_draft_page: int = 0
    num_cached: int | None = None
    num_found: int = 0
    state_slot: int = 0
    next_state_slot: int = 0
    split_slot: int = 0
    replaceable: bytes | None = None
    cacheable: bool = True
    is_sound: bool = False
    num_ended_runs: int = 0
    _digests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.token_ids)
        self._digests = [hashlib.sha256(self.request.cache_salt.encode()).digest()]

    @property
    def key(self) -> tuple[str, int, int]:
        """Return an identity that no other sequence of the scheduler has, nor this one once it is recomputed."""
        return self.request.request_id, self.arrival, self.num_ended_runs

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """Return how many tokens the request may still emit."""
        return self.request.max_tokens - (len(self.token_ids) - len(self.request.token_ids))

    @property
    def is_decoding(self) -> bool:
        return self.num_computed == len(self.token_ids) - 1

    def digest(self, page: int, page_size: int) -> bytes:
        """Return the digest of a full page: SHA-256 of the salt and all tokens up to its end. Each is made once."""
        for done in range(len(self._digests) - 1, page + 1):
            tokens = array("i", self.token_ids[done * page_size : (done + 1) * page_size])
            self._digests.append(hashlib.sha256(self._digests[-1] + tokens.tobytes()).digest())
        return self._digests[page + 1]
