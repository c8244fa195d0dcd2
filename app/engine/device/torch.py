"""Backend in plain PyTorch, on the memory of the host. It is the reference for every other backend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.comm.comm import Comm, Meeting
from app.engine.comm.process_group import GlooComm
from app.engine.device.base import AttentionMask, AttentionMetadata, Backend, Defaults, Graph, LayerKv
from app.engine.device.gated_delta import commit_and_verify, commit_prompts
from app.engine.device.host_memory import host_memory, zeros_on_host
from app.engine.device.moe import ExpertWeights, MoeConfig, grouped, mixture
from app.engine.device.recurrent import GatedDeltaPrompts, GatedDeltaStep
from app.engine.quantised import Rows, plain

MAX_SCORES = 1 << 24
"""Scores of one padded attention call per KV head (its query heads x rows x tokens): 16 MiB of mask."""
SMALL_CALL = 1 << 18
"""Scores of padding that cost less than another call."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one sequence, and the tokens that they may see."""

    seq: int
    first: int  # row of the batch
    q_len: int  # number of rows
    kv_start: int  # first token, which is the first of a page
    kv_len: int  # number of tokens
    last: int  # position of the last row


@dataclass(frozen=True, slots=True)
class Call:
    """One padded attention call: S pieces by Q query rows by L tokens, with G query heads to a KV head."""

    max_q: int  # Q
    max_kv: int  # L
    pages: Tensor  # [S, P]
    rows: Tensor  # [n] int64, rows of the batch
    padded_rows: Tensor  # [n] int64, their indices among the S * Q padded rows
    mask: Tensor  # [S, 1, G * Q, L], true for tokens that a row sees


class RerunGraph(Graph):
    """Graph on a device without captures: a replay reruns the code over the tensors and metas of the capture and copies
    the results to the first outputs. So tests on a CPU show a length that a graph would bake in."""

    def __init__(self, run: Callable[[], tuple[Tensor, ...]]) -> None:
        self._run = run
        self.outputs = run()

    def replay(self) -> None:
        for output, result in zip(self.outputs, self._run(), strict=True):
            output.copy_(result)


class TorchBackend(Backend):
    """Backend with PyTorch's operators. Attention gathers K and V from the pages, in a few padded calls a step."""

    defaults = Defaults(dtype=torch.float32, page_size=16, max_num_seqs=32, draft_kind=torch.int8, is_slow=True)
    allows_empty_sequences = True
    memory_is_host = True
    max_gathered_tokens = 1 << 18
    """Tokens whose K and V one attention call gathers out of the pages."""

    def join(self, meeting: Meeting) -> Comm:
        return GlooComm(meeting)

    def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> Any:
        """Return a few padded calls, none of them mostly padding or over the memory bounds above."""
        bins = _filled(_pieces(meta, mask, MAX_SCORES // group), group, self.max_gathered_tokens)
        return [self._call(meta, mask, pieces, group) for pieces in bins]

    def attention(
        self, q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        o = torch.empty_like(q_thd)
        for call in meta.plans[mask]:
            padded = q_thd.new_zeros(len(call.pages) * call.max_q, *q_thd.shape[1:])
            padded[call.padded_rows] = q_thd[call.rows]
            o[call.rows] = self._attend(padded, kv, call, sinks)[call.padded_rows]
        return o

    def moe(self, x: Rows, weights: ExpertWeights, config: MoeConfig) -> Tensor:
        return mixture(plain(x), weights, config, self.grouped)

    grouped = staticmethod(grouped)

    def commit_and_verify(self, step: GatedDeltaStep) -> Tensor:
        return commit_and_verify(step)

    def commit_prompts(self, step: GatedDeltaPrompts) -> Tensor:
        return commit_prompts(step)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return `Backend.zeros`. The host maps memory when it is written."""
        return zeros_on_host(shape, dtype) if self.memory_is_host else super().zeros(shape, dtype)

    def capture(self, run: Callable[[], tuple[Tensor, ...]], metas: list[AttentionMetadata]) -> Graph:
        return RerunGraph(run)

    def upload(self, host: Tensor, to: Tensor) -> None:
        to.copy_(host)

    def start_download(self, x: Tensor) -> Callable[[], Tensor]:
        kept = x.clone()  # a graph's next replay overwrites it
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
        q = q_thd.view(-1, call.max_q, kv_heads, group, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        if sinks is None:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=call.mask)
        else:
            o = _attention_with_sinks(q, k, v, call.mask, sinks.view(kv_heads, group).repeat_interleave(call.max_q, 1))
        return o.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)

    def _call(self, meta: AttentionMetadata, mask: AttentionMask, pieces: list[Piece], group: int) -> Call:
        max_q, max_kv = max(piece.q_len for piece in pieces), max(piece.kv_len for piece in pieces)
        lengths = [(p.seq, p.kv_start // meta.page_size, p.q_len, p.kv_len, p.last - p.kv_start) for p in pieces]
        seq, first_page, q_len, kv_len, last = self._uploaded(lengths)[:, :, None].unbind(1)
        page, row, token = (torch.arange(n, device=self.device) for n in (-(-max_kv // meta.page_size), max_q, max_kv))
        pages = meta.page_table[seq, (first_page + page).clamp_(max=meta.page_table.shape[1] - 1)]
        rows = self._uploaded([piece.first + j for piece in pieces for j in range(piece.q_len)])
        padded_rows = self._uploaded([i * max_q + j for i, piece in enumerate(pieces) for j in range(piece.q_len)])
        # A padding row sees the tokens of the last row, so no softmax is empty.
        position = torch.minimum(last - q_len + 1 + row, last)
        seen = visible(position[..., None], token, kv_len[..., None], mask).expand(-1, max_q, -1)
        return Call(max_q, max_kv, pages, rows, padded_rows, seen.repeat(1, group, 1).unsqueeze(1))

    def _uploaded(self, values: Sequence[int | tuple[int, ...]]) -> Tensor:
        """Return `values` as int64 on the device, without a wait for the copy."""
        host = torch.tensor(values)
        to = torch.empty_like(host, device=self.device)
        self.upload(host, to)
        return to


def _attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    """Return attention [S, kv_heads, G * Q, D] with one more logit in each row's softmax, `sinks` [kv_heads, G * Q],
    in fp32, whose weight is dropped (gpt-oss, arXiv 2508.10925). Groups of KV heads have at most MAX_SCORES scores."""
    outputs, size = [], max(1, MAX_SCORES // (q.shape[0] * q.shape[2] * k.shape[2]))
    for qh, kh, vh, sink in zip(*(x.split(size, dim=1) for x in (q, k, v, sinks[None])), strict=True):
        scores = (qh @ kh.transpose(2, 3)).float() * q.shape[-1] ** -0.5
        scores = torch.cat((scores.masked_fill(~mask, -torch.inf), sink.expand(len(q), -1, -1).unsqueeze(3)), dim=3)
        outputs.append(scores.softmax(dim=3)[..., :-1].to(v.dtype) @ vh)
    return torch.cat(outputs, dim=1)


def _gather(pool: Tensor, call: Call) -> Tensor:
    """Return `[S, kv_heads, L, D]` out of `[pages, page_size, kv_heads, D]`."""
    pages = pool.index_select(0, call.pages.flatten())
    return pages.view(len(call.pages), -1, *pool.shape[2:])[:, : call.max_kv].transpose(1, 2)


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
            start, end = hidden // size * size, last + 1 if mask.causal else kv_len
            pieces.append(Piece(seq, first + offset, rows, start, end - start, last))
    return pieces


def _filled(pieces: list[Piece], group: int, max_gathered: int) -> list[list[Piece]]:
    """Return the pieces of each call, by their size. A call takes the next pieces as long as it stays within the bounds
    and half of its scores are not padding."""
    bins: list[list[Piece]] = []
    max_kv = useful = 0
    for piece in sorted(pieces, key=lambda piece: (piece.q_len, piece.kv_len)):
        max_kv, useful = max(max_kv, piece.kv_len), useful + piece.q_len * piece.kv_len
        num_tokens = (len(bins[-1]) + 1 if bins else 1) * max_kv
        pads_little = group * piece.q_len * num_tokens <= max(SMALL_CALL, min(2 * group * useful, MAX_SCORES))
        if not bins or not pads_little or num_tokens > max(max_kv, max_gathered):
            bins.append([])
            max_kv, useful = piece.kv_len, piece.q_len * piece.kv_len
        bins[-1].append(piece)
    return bins
