"""Backend in plain PyTorch, on the memory of the host. It is the reference for every other backend."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.comm.comm import Comm, Meeting
from app.engine.comm.process_group import GlooComm
from app.engine.device import gated_delta
from app.engine.device.base import AttentionMask, AttentionMetadata, Backend, Defaults, Graph, LayerKv
from app.engine.device.host_memory import host_memory, zeros_on_host
from app.engine.device.moe import ExpertWeights, MoeConfig, mixture

MAX_SCORES = 1 << 24
"""Scores of one padded attention call per KV head (its query heads x rows x tokens): 16 MiB of mask."""
MAX_GATHERED_TOKENS = 1 << 18
"""Tokens whose K and V one attention call gathers out of the pages, unless a backend wants fewer."""
SMALL_CALL = 1 << 18
"""Scores of padding that cost less than another call."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, first + q_len) of a batch, of sequence `seq`, at positions up to `last`. They see its tokens
    [kv_start, kv_end) at most, from the first token of a page on."""

    seq: int
    first: int
    q_len: int
    kv_start: int
    kv_end: int
    last: int

    @property
    def kv_len(self) -> int:
        return self.kv_end - self.kv_start


@dataclass(frozen=True, slots=True)
class Call:
    """One padded attention call: S pieces by Q query rows by L tokens, with G query heads to a KV head.

    `pages` is `[S * P]`. `rows` `[n]` are rows of the batch, and `places` `[n]` their places among the S * Q padded
    rows. Consecutive rows of equal length are a slice, with None for `places`. `mask` `[S, 1, G * Q, L]` is true for
    tokens that a row sees, or 0 for these and -inf for others. It is None if all rows see all tokens.
    """

    num_pieces: int
    max_q: int
    max_kv: int
    pages: Tensor
    rows: Tensor | slice
    places: Tensor | None
    mask: Tensor | None


class RerunGraph(Graph):
    """Graph on a device without captures, which reruns the code over the tensors and metas of the capture, and copies
    the results to the first outputs. So a test on a CPU finds a length that a graph would bake in."""

    def __init__(self, run: Callable[[], tuple[Tensor, ...]]) -> None:
        self._run = run
        self.outputs = run()

    def replay(self) -> None:
        for place, result in zip(self.outputs, self._run(), strict=True):
            place.copy_(result)


class TorchBackend(Backend):
    """Backend with PyTorch's operators. Attention gathers K and V out of the pages, for a few padded calls a step."""

    defaults = Defaults(dtype=torch.float32, page_size=16, max_num_seqs=32)
    allows_empty_sequences = True
    memory_is_host = True
    max_gathered_tokens = MAX_GATHERED_TOKENS

    def join(self, meeting: Meeting) -> Comm:
        return GlooComm(meeting)

    def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> Any:
        """Return few padded calls, none of them mostly padding and none over the memory bounds above."""
        pieces = _pieces(meta, mask, MAX_SCORES // group)
        by_size = sorted(pieces, key=lambda piece: (piece.q_len, piece.kv_len))
        # In order, rows of equal length need no copy.
        bins = min((_filled(some, group, self.max_gathered_tokens) for some in (pieces, by_size)), key=len)
        return [self._call(meta, mask, pieces, group) for pieces in bins]

    def attention(
        self, q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        calls: list[Call] = meta.plans[mask]
        if len(calls) == 1 and calls[0].places is None:
            return self._attend(q_thd, kv, calls[0], sinks)
        o = torch.empty_like(q_thd)
        for call in calls:
            if call.places is None:
                o[call.rows] = self._attend(q_thd[call.rows], kv, call, sinks)
                continue
            padded = q_thd.new_zeros(call.num_pieces * call.max_q, *q_thd.shape[1:])
            padded[call.places] = q_thd[call.rows]
            o[call.rows] = self._attend(padded, kv, call, sinks)[call.places]
        return o

    def moe(self, x: Tensor, weights: ExpertWeights, config: MoeConfig) -> Tensor:
        return mixture(x, weights, config)

    def commit_and_verify(self, step: gated_delta.GatedDeltaStep) -> Tensor:
        return gated_delta.commit_and_verify(step)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return `Backend.zeros`. The host's memory is taken as it is written."""
        return zeros_on_host(shape, dtype) if self.memory_is_host else super().zeros(shape, dtype)

    def capture(self, run: Callable[[], tuple[Tensor, ...]], metas: list[AttentionMetadata]) -> Graph:
        return RerunGraph(run)

    def upload(self, host: Tensor, to: Tensor) -> None:
        to.copy_(host)

    def start_download(self, x: Tensor) -> Callable[[], Tensor]:
        kept = x.clone()  # a graph's next replay writes to the same place
        return lambda: kept

    def memory(self) -> tuple[int, int]:
        return host_memory()

    def peak_memory(self, run: Callable[[], object]) -> int:
        return 0  # the host's allocator counts no peak

    def _attend(self, q_thd: Tensor, kv: LayerKv, call: Call, sinks: Tensor | None) -> Tensor:
        """Return o for padded q, both `[S * Q, heads, D]`."""
        heads, dim, kv_heads = q_thd.shape[1], q_thd.shape[2], kv.k.shape[2]
        group = heads // kv_heads
        k, v = (_gather(pool, call) for pool in (kv.k, kv.v))
        # The query heads of a KV head become rows of one matrix, so K and V are not repeated.
        q = q_thd.reshape(call.num_pieces, call.max_q, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(call.num_pieces, kv_heads, group * call.max_q, dim)
        if sinks is None:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=call.mask)
        else:
            o = _attention_with_sinks(q, k, v, call.mask, sinks.view(kv_heads, group).repeat_interleave(call.max_q, 1))
        o = o.view(call.num_pieces, kv_heads, group, call.max_q, dim)
        return o.permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)

    def _call(self, meta: AttentionMetadata, mask: AttentionMask, pieces: list[Piece], group: int) -> Call:
        q_lens, kv_lens = [piece.q_len for piece in pieces], [piece.kv_len for piece in pieces]
        max_q, max_kv, is_even = max(q_lens), max(kv_lens), len(set(q_lens)) == 1
        num_pages = -(-max_kv // meta.page_size)
        if any(piece.kv_start for piece in pieces):
            firsts = self._uploaded([(piece.seq, piece.kv_start // meta.page_size) for piece in pieces])
            columns = firsts[:, 1:] + torch.arange(num_pages, device=self.device)
            pages = meta.page_table[firsts[:, :1], columns.clamp_(max=meta.page_table.shape[1] - 1)]
        else:
            pages, seqs = meta.page_table[:, :num_pages], [piece.seq for piece in pieces]
            pages = pages if seqs == list(range(len(meta.query_lens))) else pages[self._uploaded(seqs)]
        rows: Tensor | slice = slice(pieces[0].first, pieces[0].first + len(pieces) * max_q)
        places = None
        if any(piece.first != pieces[0].first + i * max_q for i, piece in enumerate(pieces)) or not is_even:
            ranges = [(piece.first, i * max_q, piece.q_len) for i, piece in enumerate(pieces)]
            rows = self._uploaded([first + j for first, _, n in ranges for j in range(n)])
            places = self._uploaded([place + j for _, place, n in ranges for j in range(n)])
        seen = None
        past_window = mask.window is not None and max_kv > mask.window
        if not is_even or min(kv_lens) != max_kv or (mask.causal and max_q > 1) or past_window:
            seen = self._mask(pieces, max_q, max_kv, mask).repeat(1, group, 1).unsqueeze(1)
        return Call(len(pieces), max_q, max_kv, pages.reshape(-1), rows, places, seen)

    def _mask(self, pieces: list[Piece], max_q: int, max_kv: int, mask: AttentionMask) -> Tensor:
        """Return the mask `[S, Q, L]`. A padding row sees the tokens of the last row, so no softmax is empty."""
        lengths = self._uploaded([(p.q_len, p.kv_len, p.last - p.kv_start) for p in pieces])
        q_len, kv_len, last = lengths[:, :, None, None].unbind(1)
        token = torch.arange(max_kv, device=self.device)
        row = torch.arange(max_q, device=self.device)[:, None]
        seen = visible(torch.minimum(last - q_len + 1 + row, last), token, kv_len, mask)
        return seen.expand(-1, max_q, -1)

    def _uploaded(self, values: Sequence[int | tuple[int, ...]]) -> Tensor:
        """Return `values` as int64 on the device, without a wait for the copy."""
        host = torch.tensor(values)
        to = torch.empty_like(host, device=self.device)
        self.upload(host, to)
        return to


def _attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor) -> Tensor:
    """Return attention [S, kv_heads, G * Q, D] with one more logit in each row's softmax, `sinks` [kv_heads, G * Q],
    in fp32, whose share is dropped (gpt-oss, arXiv 2508.10925). Groups of KV heads have at most MAX_SCORES scores."""
    outputs, size = [], max(1, MAX_SCORES // (q.shape[0] * q.shape[2] * k.shape[2]))
    for qh, kh, vh, sink in zip(*(x.split(size, dim=1) for x in (q, k, v, sinks[None])), strict=True):
        scores = (qh @ kh.transpose(2, 3)).float() * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        scores = torch.cat((scores, sink.expand(len(q), -1, -1).unsqueeze(3)), dim=3)
        outputs.append(scores.softmax(dim=3)[..., :-1].to(v.dtype) @ vh)
    return torch.cat(outputs, dim=1)


def _gather(pool: Tensor, call: Call) -> Tensor:
    """Return `[S, kv_heads, L, D]` out of `[pages, page_size, kv_heads, D]`."""
    pages = pool.index_select(0, call.pages)
    return pages.view(call.num_pieces, -1, *pool.shape[2:])[:, : call.max_kv].transpose(1, 2)


def visible(row: Tensor, token: Tensor, seq_len: Tensor, mask: AttentionMask) -> Tensor:
    """Return True where a row at position `row` sees a token of a sequence of `seq_len`. The tensors broadcast."""
    seen = token <= row if mask.causal else token < seq_len
    if mask.window is None:
        return seen
    return seen & (token > row - mask.window) & (token < row + mask.window)


def _pieces(meta: AttentionMetadata, mask: AttentionMask, max_scores: int) -> list[Piece]:
    """Return one piece a sequence, or several if its rows by its tokens exceed `max_scores`."""
    pieces, size = [], meta.page_size
    firsts = accumulate(meta.query_lens, initial=0)
    for seq, (first, q_len, kv_len) in enumerate(zip(firsts, meta.query_lens, meta.host_seq_lens, strict=False)):
        step = max(1, max_scores // max(1, kv_len))
        for offset in range(0, q_len, step):
            rows = min(step, q_len - offset)
            last = kv_len - (q_len - offset - rows) - 1
            hidden = 0 if mask.window is None else max(0, last - rows - mask.window + 2)
            kv_end = last + 1 if mask.causal else kv_len
            pieces.append(Piece(seq, first + offset, rows, hidden // size * size, kv_end, last))
    return pieces


def _filled(pieces: Iterable[Piece], group: int, max_gathered: int) -> list[list[Piece]]:
    """Return the pieces of each call, in order. A call takes the next pieces as long as it stays within the bounds and
    half of its scores are not padding."""
    bins: list[list[Piece]] = []
    max_q = max_kv = useful = 0
    for piece in pieces:
        max_q, max_kv = max(max_q, piece.q_len), max(max_kv, piece.kv_len)
        useful += piece.q_len * piece.kv_len
        num_tokens = (len(bins[-1]) + 1 if bins else 1) * max_kv
        pads_little = group * max_q * num_tokens <= max(SMALL_CALL, min(2 * group * useful, MAX_SCORES))
        if not bins or not pads_little or num_tokens > max(max_kv, max_gathered):
            bins.append([])
            max_q, max_kv, useful = piece.q_len, piece.kv_len, piece.q_len * piece.kv_len
        bins[-1].append(piece)
    return bins
