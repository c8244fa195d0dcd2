"""One request as the engine sees it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for. `token_ids` is the prompt, never empty; `max_tokens` >= 1 fits the context with it.

    `seed` is unsigned 64-bit and is read only at `temperature` > 0. `speculate=False` decodes this request plainly.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    speculate: bool = True


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way: its tokens, its pages, and for how many of its tokens KV is valid.

    With n tokens, `num_computed == n - 1` means decoding: only the last token, the anchor, has no KV yet. Less
    means prefilling (or recomputing after a preemption); there is no other phase.
    """

    request: Request
    arrival: int
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.token_ids)

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
