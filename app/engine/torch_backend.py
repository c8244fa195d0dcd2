"""The backend in plain PyTorch: what the CPU runs, and the reference on CUDA."""

import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.backend import AttnMeta, Backend, Defaults, LayerKv


@dataclass(frozen=True, slots=True)
class _Plan:
    """One padded attention call: S sequences by Q query rows by L tokens, with G query heads to a KV head.

    `pages` [S * P]; `q_index` [T] is each row's place among S * Q padded ones, None when nothing is padded; `mask`
    [S, 1, G * Q, L] is true where a row may look, None when it may look everywhere.
    """

    num_seqs: int
    max_q: int
    max_kv: int
    pages: Tensor
    q_index: Tensor | None
    mask: Tensor | None


class TorchBackend(Backend):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        on_cpu = device.type == "cpu"
        self.defaults = Defaults(
            dtype=torch.float32 if on_cpu else torch.bfloat16, page_size=16, max_num_seqs=32 if on_cpu else 256
        )

    def attention(self, q_thd: Tensor, kv: LayerKv, meta: AttnMeta) -> Tensor:
        heads, dim, kv_heads = q_thd.shape[1], q_thd.shape[2], kv.k.shape[2]
        group = heads // kv_heads
        plan = meta.plan or self._plan(meta, group)
        meta.plan = plan
        k, v = (self._gather(pool, plan) for pool in (kv.k, kv.v))
        # The query heads of a KV head become rows of one matrix, so K and V are not repeated.
        padded = q_thd if plan.q_index is None else _scatter(q_thd, plan.q_index, plan.num_seqs * plan.max_q)
        q = padded.reshape(plan.num_seqs, plan.max_q, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(plan.num_seqs, kv_heads, group * plan.max_q, dim)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=plan.mask)
        o = o.view(plan.num_seqs, kv_heads, group, plan.max_q, dim).permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)
        return o if plan.q_index is None else o[plan.q_index]

    def write_kv(self, k_thd: Tensor, v_thd: Tensor, kv: LayerKv, slots: Tensor) -> None:
        kv.k.view(-1, *k_thd.shape[1:]).index_copy_(0, slots, k_thd)
        kv.v.view(-1, *v_thd.shape[1:]).index_copy_(0, slots, v_thd)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rope(self, x_thd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x_thd.chunk(2, dim=-1)
        return x_thd * cos + torch.cat((-second, first), dim=-1) * sin

    def gated_mlp(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def memory(self) -> tuple[int, int]:
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def _gather(self, pool: Tensor, plan: _Plan) -> Tensor:
        """[S, kv_heads, L, D] out of [pages, page_size, kv_heads, D]."""
        pages = pool.index_select(0, plan.pages)
        return pages.view(plan.num_seqs, -1, *pool.shape[2:])[:, : plan.max_kv].transpose(1, 2)

    def _plan(self, meta: AttnMeta, group: int) -> _Plan:
        num_seqs, max_q, max_kv = len(meta.q_lens), max(meta.q_lens), max(meta.kv_lens)
        ragged = min(meta.q_lens) != max_q
        q_index = None
        if ragged:
            q_lens = (meta.cu_q[1:] - meta.cu_q[:-1]).long()
            rows = torch.arange(int(sum(meta.q_lens)), device=self.device)
            starts = torch.arange(num_seqs, device=self.device) * max_q - meta.cu_q[:-1]
            q_index = rows + torch.repeat_interleave(starts, q_lens, output_size=rows.shape[0])
        mask = None
        if ragged or min(meta.kv_lens) != max_kv or (meta.causal and max_q > 1):
            mask = self._mask(meta, max_q, max_kv).repeat(1, group, 1).unsqueeze(1)
        return _Plan(num_seqs, max_q, max_kv, meta.page_table.reshape(-1), q_index, mask)

    def _mask(self, meta: AttnMeta, max_q: int, max_kv: int) -> Tensor:
        """[S, Q, L]; a padding row looks at token 0 at least, so that no softmax is over nothing."""
        kv_len, q_len = meta.kv_len[:, None, None], (meta.cu_q[1:] - meta.cu_q[:-1])[:, None, None]
        token = torch.arange(max_kv, device=self.device)
        if not meta.causal:
            return (token < kv_len).expand(-1, max_q, -1)
        row = torch.arange(max_q, device=self.device)[:, None]
        return token <= torch.minimum(kv_len - q_len + row, kv_len - 1)


def _scatter(x: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, index, x)
