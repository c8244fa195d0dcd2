"""The tables of `columns` on the device: what the sampler is told about rows that need more than argmax."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from app.engine.device.base import Backend
from app.engine.device.transfer import Packed
from app.engine.sampling.columns import SamplingRows
from app.engine.sampling.filters import SHORTLIST, Filters
from app.engine.sampling.penalties import Penalties, TokenCounts


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Values [M] fp32 that are added to the logits of `rows` [M] and `tokens` [M], both int64.

    `host_rows` are the same rows on the host, ascending.
    """

    host_rows: list[int]
    rows: Tensor
    tokens: Tensor
    values: Tensor

    def within(self, start: int, stop: int) -> "LogitBias":
        part = slice(bisect_left(self.host_rows, start), bisect_left(self.host_rows, stop))
        rows = self.rows[part] - start
        return LogitBias([row - start for row in self.host_rows[part]], rows, self.tokens[part], self.values[part])


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """N logit rows that need the same kinds of work beyond argmax: `host_rows` ascending, and `rows` [N] on the device.

    `temperature` [N] fp32 is 1 for greedy rows, and `state` [N] int32 seeds the noise. `drawn` [N] bool is false for
    greedy rows, and None if there are none. `additions` count these N rows from 0. A field is None if no row needs it.
    """

    host_rows: list[int]
    rows: Tensor
    temperature: Tensor
    state: Tensor
    drawn: Tensor | None = None
    filters: Filters | None = None
    additions: LogitBias | None = None
    penalties: Penalties | None = None

    def within(self, start: int, stop: int) -> "SamplingMetadata | None":
        """Return the part for logit rows [start, stop), counted from `start`; None if it is empty."""
        part = slice(bisect_left(self.host_rows, start), bisect_left(self.host_rows, stop))
        if part.start == part.stop:
            return None
        if part.stop - part.start == len(self.host_rows) and not start:
            return self
        return SamplingMetadata(
            [row - start for row in self.host_rows[part]],
            self.rows[part] - start,
            self.temperature[part],
            self.state[part],
            None if self.drawn is None else self.drawn[part],
            self.filters and self.filters.within(part),
            self.additions and self.additions.within(part.start, part.stop),
            self.penalties and self.penalties.within(part),
        )


def sampling_metadata(
    kinds: Sequence[SamplingRows], drafts: Tensor | None, counts: TokenCounts, backend: Backend
) -> list[SamplingMetadata]:
    """Return tables of rows on the device, after one copy. `drafts` [D, columns] are those that the rows stand on."""
    columns = {f"{n}.{name}": column for n, rows in enumerate(kinds) for name, column in rows.columns.items()}
    found = Packed(columns, backend).tensors
    on_device = [{name: found[f"{n}.{name}"] for name in rows.columns} for n, rows in enumerate(kinds)]
    return [_metadata(rows, own, drafts, counts) for rows, own in zip(kinds, on_device, strict=True)]


def _metadata(
    rows: SamplingRows, on_device: dict[str, Tensor], drafts: Tensor | None, counts: TokenCounts
) -> SamplingMetadata:
    host = rows.columns
    filters = additions = penalties = None
    if rows.is_filtered:
        short = bool(host["top_k"].max() <= SHORTLIST)
        filters = Filters(on_device["top_k"], on_device["top_p"], on_device["min_p"], short)
    if len(host["bias"]):
        bias_row, bias_token = on_device["bias_row"].long(), on_device["bias_token"].long()
        additions = LogitBias(host["bias_row"].tolist(), bias_row, bias_token, on_device["bias"])
    if rows.counted:
        emitted, prompted = counts.of(rows.counted)
        own_drafts = None if drafts is None else drafts[on_device["draft_index"]]
        names = ("presence", "frequency", "repetition", "batch_slot", "place")
        columns = {name: on_device[name] for name in names}
        penalties = Penalties(**columns, drafts=own_drafts, emitted=emitted, prompted=prompted)
    return SamplingMetadata(
        host["rows"].tolist(),
        on_device["rows"],
        on_device["temperature"],
        on_device["state"],
        drawn=None if host["is_drawn"].all() else on_device["is_drawn"].bool(),
        filters=filters,
        additions=additions,
        penalties=penalties,
    )
