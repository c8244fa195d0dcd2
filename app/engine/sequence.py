"""One sequence: tokens, pages, and for how many tokens KV is valid."""

import hashlib
from array import array
from dataclasses import dataclass, field

from app.messages import Request

NOT_FINITE = -1
"""In place of a token whose logits are not finite."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine.

    With n tokens, `num_computed == n - 1` means decoding: only the last token, the anchor, has no KV yet. Less means
    prefilling, or recomputing after a preemption. A run ends when its memory is freed, and a preempted sequence begins
    another.
    """

    request: Request
    arrival: int
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens with KV
    batch_slot: int = -1  # row in arrays of max_num_seqs while it runs
    pages: "array[int]" = field(default_factory=lambda: array("i"))  # int32, in the order of tokens
    draft_pages: "array[int]" = field(default_factory=lambda: array("i"))  # of a draft with separate pages
    first_draft_page: int = 0  # index, in a sequence's pages, of the first of `draft_pages`
    num_cached: int | None = None  # prompt tokens on cached pages at the first admission
    num_reused: int = 0  # tokens on cached pages at the last admission
    state_slot: int = 0  # slot of its recurrent state; 0 is none, here and below
    next_state_slot: int = 0  # gets the state after the rows that run now
    split_slot: int = 0  # gets the state in the middle of these rows
    replaceable: bytes | None = None  # digest of the checkpoint that its next one replaces
    cacheable: bool = True  # uses and publishes cached pages
    is_sound: bool = False  # all KV on its pages is known to be finite
    num_ended_runs: int = 0
    _digests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.token_ids)
        self._digests = [hashlib.sha256(self.request.cache_salt.encode()).digest()]

    @property
    def key(self) -> tuple[str, int, int]:
        """An identity that no other sequence has, nor this one in another run."""
        return self.request.request_id, self.arrival, self.num_ended_runs

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that the request may still emit."""
        return self.request.max_tokens - (len(self.token_ids) - len(self.request.token_ids))

    @property
    def is_decoding(self) -> bool:
        return self.num_computed == len(self.token_ids) - 1

    def digest(self, page: int, page_size: int) -> bytes:
        """Return the digest of a full page: SHA-256 of the salt and all tokens up to its end. Memoized."""
        for done in range(len(self._digests) - 1, page + 1):
            tokens = array("i", self.token_ids[done * page_size : (done + 1) * page_size])
            self._digests.append(hashlib.sha256(self._digests[-1] + tokens.tobytes()).digest())
        return self._digests[page + 1]
