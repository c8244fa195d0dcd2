"""The tables of `columns` on the device: what the sampler knows of rows that need more than argmax."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from app.engine.device.base import Backend
from app.engine.device.transfer import Packed
from app.engine.sampling.columns import SamplingRows
from app.engine.sampling.filters import SHORTLIST, Filters
from app.engine.sampling.penalties import Penalties, TokenCounts

Table = TypeVar("Table", Filters, Penalties, "LogitBias", "SamplingMetadata")
Numbered = TypeVar("Numbered", "LogitBias", "SamplingMetadata")


class LogitBias(NamedTuple):
    """Values [M] fp32 that are added to the logits of `rows` [M] and `tokens` [M], both int64.

    `host_rows` are the same rows on the host, ascending.
    """

    host_rows: list[int]
    rows: Tensor
    tokens: Tensor
    values: Tensor


class SamplingMetadata(NamedTuple):
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
        part = _range(self.host_rows, start, stop)
        if part.start == part.stop:
            return None
        if part.stop - part.start == len(self.host_rows) and not start:
            return self
        added = self.additions
        if added:
            added = _from(part.start, part_of(added, _range(added.host_rows, part.start, part.stop)))
        return _from(start, part_of(self, part))._replace(additions=added)


def part_of(table: Table, part: slice | Tensor) -> Table:
    """Return a part of the rows of a table: of its tensors, its `host_rows`, its filters and its penalties."""
    own: dict[str, Any] = {}
    for name, column in table._asdict().items():
        if isinstance(column, Tensor) or name == "host_rows":
            own[name] = column[part]
        elif name in ("filters", "penalties") and column:
            own[name] = part_of(column, part)
    return table._replace(**own)


def _range(host_rows: list[int], start: int, stop: int) -> slice:
    return slice(bisect_left(host_rows, start), bisect_left(host_rows, stop))


def _from(start: int, table: Numbered) -> Numbered:
    """Return a table whose rows are counted from `start`."""
    return table._replace(host_rows=[row - start for row in table.host_rows], rows=table.rows - start)


def sampling_metadata(
    kinds: Sequence[SamplingRows], drafts: Tensor | None, counts: TokenCounts, backend: Backend
) -> list[SamplingMetadata]:
    """Return tables of rows on the device, after one copy. `drafts` [D, columns] are those that the rows verify."""
    columns = {f"{n}.{name}": column for n, rows in enumerate(kinds) for name, column in rows.columns.items()}
    found = Packed(columns, backend).tensors
    on_device = [{name: found[f"{n}.{name}"] for name in rows.columns} for n, rows in enumerate(kinds)]
    return [_metadata(rows, own, drafts, counts) for rows, own in zip(kinds, on_device, strict=True)]


def _metadata(
    rows: SamplingRows, on_device: dict[str, Tensor], drafts: Tensor | None, counts: TokenCounts
) -> SamplingMetadata:
    host, filters, additions, penalties = rows.columns, None, None, None
    if rows.is_filtered:
        short = bool(host["top_k"].max() <= SHORTLIST)
        filters = Filters(on_device["top_k"], on_device["top_p"], on_device["min_p"], short)
    if len(host["bias"]):
        bias_row, bias_token = on_device["bias_row"].long(), on_device["bias_token"].long()
        additions = LogitBias(host["bias_row"].tolist(), bias_row, bias_token, on_device["bias"])
    if rows.counted:
        own_drafts = None if drafts is None else drafts[on_device["draft_index"]]
        columns = {name: on_device[name] for name in ("presence", "frequency", "repetition", "batch_slot", "place")}
        penalties = Penalties(**columns, drafts=own_drafts, counts=counts.of(rows.counted))
    drawn = None if host["is_drawn"].all() else on_device["is_drawn"].bool()
    numbers, temperature, state = (on_device[name] for name in ("rows", "temperature", "state"))
    return SamplingMetadata(host["rows"].tolist(), numbers, temperature, state, drawn, filters, additions, penalties)
