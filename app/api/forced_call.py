"""A tool call that an answer must begin with. Its prefix is a part of the prompt, and the rest is the target's own.

With thinking on, the call begins once the reasoning has ended. A first request of the engine makes the reasoning. A
second one goes on behind the prompt, the reasoning and the prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from app.messages import FinishReason, Request
from app.text.parsers import THINK


@dataclass(frozen=True, slots=True)
class Prefix:
    """Beginning of a call. It is a part of the prompt, unless the model may reason before it.

    Then `token_ids` are for a model that does not reason after all, and `behind_reasoning` those of the template's
    wording behind reasoning.
    """

    text: str
    token_ids: Sequence[int] = ()
    behind_reasoning: Sequence[int] = ()

    @property
    def follows_reasoning(self) -> bool:
        return bool(self.behind_reasoning)


@dataclass(slots=True)
class ForcedCall:
    """Reader of the reasoning before a forced call. `request` makes the reasoning, which the prompt may have opened."""

    request: Request
    prefix: Prefix
    is_reasoning: bool
    _token_ids: list[int] = field(default_factory=list)
    _opening: str = ""

    def read(self, token_ids: list[int], text: str, finish_reason: FinishReason | None) -> str | None:
        """Return the certain text of the reasoning, or None if the model does not reason."""
        self._token_ids += token_ids
        if self.is_reasoning:
            return text
        self._opening += text
        first = self._opening.lstrip()
        self.is_reasoning = first.startswith(THINK)
        if self.is_reasoning:
            return self._opening
        return "" if finish_reason is None and THINK.startswith(first) else None

    @property
    def num_used(self) -> int:
        """The number of tokens of the reasoning. What a model says instead of it does not count."""
        return len(self._token_ids) if self.is_reasoning else 0

    def next_request(self) -> Request | None:
        """Return the request that goes on with the call, or None if the reasoning has taken all tokens."""
        first, num_used = self.request, self.num_used
        if num_used >= first.max_tokens:
            return None
        reasoning = [*self._token_ids, *self.prefix.behind_reasoning] if self.is_reasoning else self.prefix.token_ids
        return replace(
            first,
            request_id=f"{first.request_id}-call",
            token_ids=[*first.token_ids, *reasoning],
            max_tokens=first.max_tokens - num_used,
            sampling=replace(first.sampling, min_tokens=max(0, first.sampling.min_tokens - num_used)),
        )
