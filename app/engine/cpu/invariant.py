"""Backend on CPUs that gives a row the same bits in every batch (`--batch-invariant`).

Libraries choose the order of a sum by the number of rows. So products and norms are made in blocks of ROWS rows, padded
with zeros, and see one shape. A vectorised function and its scalar tail may differ in the last bit, so SiLU is computed
row by row. Attention has tiles of ROWS positions: a row at position p has place p % ROWS of tile p // ROWS, and a tile
reads the tokens up to its own end. So a row's call has one shape in every batch.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.cpu.backend import CpuBackend, keep_freed_memory
from app.engine.device.base import AttentionMask, AttentionMetadata
from app.engine.device.torch import Call, TorchBackend, visible
from app.engine.errors import UnsupportedError

ROWS = 16


class InvariantCpuBackend(TorchBackend):
    """Backend whose weights are row by row in memory: column by column, a small product depends on a row's place."""

    batch_invariant = True
    verify = CpuBackend.verify

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        keep_freed_memory()
        self._proved: set[tuple[torch.Size, torch.dtype]] = set()

    def pack_weight(self, *parts: Tensor) -> Tensor:
        """Return `Backend.pack_weight`. Raises UnsupportedError if a row's place in a block changes its product."""
        weight = super().pack_weight(*parts)
        if (weight.shape, weight.dtype) not in self._proved:
            self._prove(weight)
            self._proved.add((weight.shape, weight.dtype))
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return in_blocks(lambda rows: F.linear(rows, weight, bias), x)

    def gated_mlp(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = self.linear(x, gate_up).chunk(2, dim=-1)
        return self.linear(torch.cat([F.silu(row) for row in gate.split(1)]) * up, down)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = super().rms_norm
        return in_blocks(lambda rows: norm(rows, weight, eps), x)

    def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> Any:
        """Return a call for each tile of a causal mask. Only the draft has rows that see their whole sequence."""
        if not mask.causal:
            return super().plan_attention(meta, mask, group)
        calls, firsts = [], accumulate(meta.query_lens, initial=0)
        for seq, (first, q_len, end) in enumerate(zip(firsts, meta.query_lens, meta.host_seq_lens, strict=False)):
            start = end - q_len
            for tile in range(start // ROWS * ROWS, end if q_len else 0, ROWS):
                own = range(max(start, tile), min(end, tile + ROWS))
                rows = slice(first + own.start - start, first + own.stop - start)
                calls.append(self._tile(meta, mask, group, seq, tile, rows, torch.tensor(own) - tile))
        return calls

    def _tile(
        self, meta: AttentionMetadata, mask: AttentionMask, group: int, seq: int, tile: int, rows: slice, places: Tensor
    ) -> Call:
        """Return the call for `rows` of the batch at `places` of the tile that begins at position `tile`.

        Past its own pages a sequence gets its last one again, because masked tokens must be finite.
        """
        size, max_kv = meta.page_size, tile + ROWS
        own_pages = -(-meta.host_seq_lens[seq] // size)
        pages = meta.page_table[seq, torch.arange(-(-max_kv // size)).clamp_(max=own_pages - 1)]
        position, token = torch.arange(tile, max_kv)[:, None], torch.arange(max_kv)
        seen = visible(position, token, position + 1, mask).repeat(group, 1)[None, None]
        return Call(ROWS, max_kv, pages[None], rows, places, seen)

    def _prove(self, weight: Tensor) -> None:
        """Multiply a row at the first place, at the last, and at every place at once."""
        noise = torch.Generator().manual_seed(0)
        others = torch.randn(ROWS, weight.shape[1], generator=noise).to(weight.dtype)
        expected = F.linear(others, weight)[0]
        alike = F.linear(others[:1].repeat(ROWS, 1), weight)
        last = F.linear(others.roll(-1, 0), weight)[-1]
        if not (torch.equal(alike, expected.expand_as(alike)) and torch.equal(last, expected)):
            out, into = weight.shape
            raise UnsupportedError(
                f"--batch-invariant: this processor's product of {ROWS} rows by a weight of {out} x {into} "
                f"({str(weight.dtype).removeprefix('torch.')}) gives a row other bits in another place; "
                "another --dtype may not"
            )


def in_blocks(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `run` of x [T, ...], made for ROWS rows at a time."""
    blocks = [*x.contiguous().split(ROWS)]
    if missing := -len(x) % ROWS:
        blocks[-1] = torch.cat((blocks[-1], x.new_zeros(missing, *x.shape[1:])))
    done = [run(block) for block in blocks]
    return (done[0] if len(done) == 1 else torch.cat(done))[: len(x)]
