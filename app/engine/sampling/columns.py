"""Rows that are sampled otherwise than by plain argmax, as one table of NumPy columns. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray


class CountedTokens(NamedTuple):
    """Tokens of a sequence with penalties. `key` tells it from other sequences that had its batch slot."""

    key: tuple[str, int]
    batch_slot: int
    num_prompt_tokens: int
    token_ids: Sequence[int]


@dataclass(slots=True)
class SamplingRows:
    """N logit rows, ascending, whose requests want the same kinds of operators.

    Columns [N] int32: `rows` (numbers of the logit rows), `state` (of the noise), `batch_slot`, `place` (drafts before
    the row) and `draft_index` (row of the drafts). Columns [N] fp32: PARAMETERS of `step/sampling_rows.py`.
    Columns [M]: the logit of row `bias_row` and token `bias_token` gets `bias` on top.
    """

    columns: dict[str, NDArray[Any]]
    counted: list[CountedTokens]
    is_filtered: bool
