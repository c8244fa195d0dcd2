"""One request as the engine sees it."""

from array import array
from dataclasses import dataclass, field

MIN_TEMPERATURE = 1e-5
"""Below this the noise is lost in the rounding of logits / T, so the request is greedy."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for. `token_ids` is the prompt, never empty; `max_tokens` >= 1 fits the context with it.

    `seed` is unsigned 64-bit and is read only when the request is not greedy. `speculate=False` decodes it plainly.
    Names and meanings of the filters and penalties are vLLM's; the defaults change nothing. `top_k` 0 is off;
    `logit_bias` is (token, bias) pairs. Requests share cached KV only where they have the same `cache_salt`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    speculate: bool = True
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    cache_salt: str = ""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way: its tokens, its pages, and for how many of its tokens KV is valid.

    With n tokens, `num_computed == n - 1` means decoding: only the last token, the anchor, has no KV yet. Less
    means prefilling (or recomputing after a preemption); there is no other phase. `pages` are int32, in the order of
    the tokens they hold. While it runs, `seat` is its place in arrays of max_num_seqs; -1 while it waits.
    """

    request: Request
    arrival: int
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    seat: int = -1
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
