"""Requests from flat keyword arguments, for tests that draw some of them at random."""

from collections.abc import Collection, Sequence
from typing import Any

from app.messages import Request, SamplingParams


def flat_request(
    request_id: str,
    token_ids: Sequence[int],
    max_tokens: int,
    *,
    stop_token_ids: Collection[int] = (),
    speculate: bool | int = True,
    cache_salt: str = "",
    **sampling: Any,
) -> Request:
    """Return a Request whose other arguments are those of SamplingParams."""
    return Request(request_id, token_ids, max_tokens, SamplingParams(**sampling), stop_token_ids, speculate, cache_salt)
