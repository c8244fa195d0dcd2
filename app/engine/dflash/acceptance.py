"""One warning about a draft of which hardly any token is accepted."""

import logging
from collections.abc import Iterable

from app.messages import TokenDelta

logger = logging.getLogger(__name__)

WINDOW = 2000
"""Draft tokens that are judged together."""
FEW = 0.1
_WARNING = (
    "draft: %.1f %% of %d draft tokens were accepted. Texts are right all the same, and slow. The usual causes, most "
    "frequent first: the draft of another revision or size of the target; thinking on where it was trained without, or "
    "off; a quantised or rotated target; float16; a config.json of the draft with wrong taps, block or window; prompts "
    "of random tokens"
)


class Acceptance:
    """Drafts of an engine since the last WINDOW of them was judged. It warns once, if less than FEW were accepted."""

    def __init__(self) -> None:
        self._verified = self._accepted = 0
        self._has_warned = False

    def add(self, deltas: Iterable[TokenDelta]) -> None:
        """Count the drafts of a step."""
        for delta in deltas:
            for step in delta.steps:
                self._verified += step.n_verified
                self._accepted += step.n_accepted
        if self._verified < WINDOW or self._has_warned:
            return
        if self._accepted < FEW * self._verified:
            logger.warning(_WARNING, 100 * self._accepted / self._verified, self._verified)
            self._has_warned = True
        self._verified = self._accepted = 0
