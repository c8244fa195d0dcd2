"""One request as the engine sees it."""

from array import array
from dataclasses import dataclass, field

MIN_TEMPERATURE = 1e-5
"""Below this the noise is lost in the rounding of logits / T, so the request is greedy."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for. `token_ids` is the prompt, never empty; `max_tokens` >= 1 fits the context with it.

    `seed` is unsigned 64-bit and is read only when the request is not greedy. `speculate=False` decodes it plainly.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    speculate: bool = True

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way: its tokens, its pages, and for how many of its tokens KV is valid.

    With n tokens, `num_computed == n - 1` means decoding: only the last token, the anchor, has no KV yet. Less
    means prefilling (or recomputing after a preemption); there is no other phase. `pages` are int32, in the order of
    the tokens they hold.
    """

    request: Request
    arrival: int
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    pages: "array[int]" = field(default_factory=lambda: array("i"))

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
