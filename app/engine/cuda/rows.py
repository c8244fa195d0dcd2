"""Work on every row between matrix products, each in one launch of Triton.

Sums are in fp32, and a result is rounded once. A *line* is the unit of a reduction: a row, or one head of a row. A
program takes a number of lines.

Checked in Triton's interpreter and compiled for sm_90; not run on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda.halves import norm_of_halves, rope_of_halves
from app.engine.cuda.launch import chain, items_per_program, wait_if_chained
from app.engine.device.base import ContextRows, ProjectedRows

HEADS_OF_A_PROGRAM = 8
SILU_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, chained: bool = False) -> Tensor:
    """Return RMSNorm over the last axis."""
    rows = x.contiguous()
    out = torch.empty_like(rows)
    _norm(rows, rows, weight, out, out, eps, has_residual=False, chained=chained)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, chained: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual). The norm is of the rounded sum."""
    rows = x.contiguous()
    out, total = torch.empty_like(rows), torch.empty_like(rows)
    _norm(rows, residual.contiguous(), weight, out, total, eps, has_residual=True, chained=chained)
    return out, total


def _norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    total: Tensor,
    eps: float,
    *,
    has_residual: bool,
    chained: bool,
) -> None:
    size = x.shape[-1]
    num_lines, block = x.numel() // size, triton.next_power_of_2(size)
    lines = items_per_program(num_lines, on_gpu=1)
    norm[triton.cdiv(num_lines, lines),](
        x,
        residual,
        weight,
        out,
        total,
        num_lines,
        eps,
        SIZE=size,
        LINES=lines,
        BLOCK=block,
        HAS_RESIDUAL=has_residual,
        num_warps=min(16, max(1, block // 512)),
        **chain(on=chained),
    )


@triton.jit(do_not_specialize=["num_lines"])
def norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    num_lines,
    eps,
    SIZE: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Normalise LINES lines of SIZE numbers."""
    wait_if_chained(CHAINED)
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (line < num_lines)[:, None] & (columns < SIZE)
    at = line.to(tl.int64)[:, None] * SIZE + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, total, mask=inside)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None] * weight
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, *, chained: bool = False) -> Tensor:
    """Return silu(gate) * up `[T, I]` of `[T, 2I]`, gate first."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    lines = items_per_program(num_rows, on_gpu=1)
    gated[triton.cdiv(num_rows, lines), triton.cdiv(size, SILU_BLOCK)](
        gate_up.contiguous(), out, num_rows, SIZE=size, LINES=lines, BLOCK=SILU_BLOCK, num_warps=4, **chain(on=chained)
    )
    return out


@triton.jit(do_not_specialize=["num_lines"])
def gated(
    x_ptr,
    out_ptr,
    num_lines,
    SIZE: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Compute BLOCK columns of LINES rows."""
    wait_if_chained(CHAINED)
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (line < num_lines)[:, None] & (columns < SIZE)
    row = line.to(tl.int64)[:, None]
    gate = tl.load(x_ptr + row * (2 * SIZE) + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * SIZE) + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * SIZE + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def qkv_into_kv(projected: ProjectedRows, *, chained: bool = False) -> Tensor:
    """Return `Backend.qkv_into_kv`."""
    qkv, q_norm, k_norm, eps, rotation, kv, slot_mapping = projected
    num_rows, all_heads, dim = qkv.shape
    kv_heads = kv.k.shape[2]
    heads = all_heads - 2 * kv_heads
    q = torch.empty(num_rows, heads, dim, dtype=qkv.dtype, device=qkv.device)
    lines = items_per_program(num_rows * all_heads, HEADS_OF_A_PROGRAM)
    rope_and_write[triton.cdiv(num_rows * all_heads, lines),](
        qkv.contiguous(),
        q_norm,
        k_norm,
        *(x.contiguous() for x in rotation),
        slot_mapping,
        q,
        kv.k,
        kv.v,
        num_rows * all_heads,
        eps,
        NORMS=q_norm is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        LINES=lines,
        num_warps=_warps(dim),
        **chain(on=chained),
    )
    return q


def _warps(dim: int) -> int:
    return min(4, max(1, HEADS_OF_A_PROGRAM * dim // 256))


@triton.jit(do_not_specialize=["num_lines"])
def rope_and_write(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    num_lines,
    eps,
    NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    LINES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Normalise (with NORMS) and rotate LINES heads of q and k. K and the unchanged V go to the row's slot."""
    wait_if_chained(CHAINED)
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = line < num_lines
    row = (line // (HEADS + 2 * KV_HEADS)).to(tl.int64)
    head = line % (HEADS + 2 * KV_HEADS)
    is_q, is_v = inside & (head < HEADS), inside & (head >= HEADS + KV_HEADS)
    is_k = inside & (head >= HEADS) & (head < HEADS + KV_HEADS)
    dims = tl.arange(0, HALF)[None, :]
    at = line.to(tl.int64)[:, None] * (2 * HALF) + dims
    low = tl.load(qkv_ptr + at, mask=inside[:, None], other=0.0)
    high = tl.load(qkv_ptr + at + HALF, mask=inside[:, None], other=0.0)

    turn, turns = row[:, None] * (2 * HALF) + dims, (is_q | is_k)[:, None]
    cos = tl.load(cos_ptr + turn, mask=turns, other=0.0)
    sin = tl.load(sin_ptr + turn, mask=turns, other=0.0)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if NORMS:
        weight_low = tl.where(is_q[:, None], tl.load(q_norm_ptr + dims), tl.load(k_norm_ptr + dims))
        weight_high = tl.where(is_q[:, None], tl.load(q_norm_ptr + HALF + dims), tl.load(k_norm_ptr + HALF + dims))
        a, b = norm_of_halves(a, b, weight_low, weight_high, eps, HALF)
    turned_low, turned_high = rope_of_halves(a, b, cos, sin)
    turned_low, turned_high = turned_low.to(q_ptr.dtype.element_ty), turned_high.to(q_ptr.dtype.element_ty)

    to_q = q_ptr + (row * HEADS + head)[:, None] * (2 * HALF) + dims
    tl.store(to_q, turned_low, mask=is_q[:, None])
    tl.store(to_q + HALF, turned_high, mask=is_q[:, None])
    slot = tl.load(slot_ptr + row, mask=is_k | is_v, other=0).to(tl.int64)
    to_k = k_ptr + (slot * KV_HEADS + head - HEADS)[:, None] * (2 * HALF) + dims
    tl.store(to_k, turned_low, mask=is_k[:, None])
    tl.store(to_k + HALF, turned_high, mask=is_k[:, None])
    to_v = v_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS)[:, None] * (2 * HALF) + dims
    tl.store(to_v, low, mask=is_v[:, None])
    tl.store(to_v + HALF, high, mask=is_v[:, None])


def context_into_kv(context: ContextRows) -> None:
    """Apply `Backend.context_into_kv`."""
    kv_tl2hd, k_norm, _, eps, rotation, kv, slot_mapping = context
    num_rows, layers, _, kv_heads, dim = kv_tl2hd.shape
    num_lines = num_rows * layers * kv_heads
    lines = items_per_program(num_lines, HEADS_OF_A_PROGRAM)
    context_rope_and_write[triton.cdiv(num_lines, lines),](
        kv_tl2hd.contiguous(),
        k_norm.contiguous(),
        *(x.contiguous() for x in rotation),
        slot_mapping,
        kv.k,
        kv.v,
        num_lines,
        eps,
        LAYERS=layers,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        LINES=lines,
        num_warps=_warps(dim),
    )


@triton.jit(do_not_specialize=["num_lines"])
def context_rope_and_write(
    kv_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    k_ptr,
    v_ptr,
    num_lines,
    eps,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    LINES: tl.constexpr,
):
    """Write LINES KV heads into the row's slot of the layer: K after RMSNorm and RoPE, V unchanged."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = (line < num_lines)[:, None]
    place, head = (line // KV_HEADS).to(tl.int64), line % KV_HEADS
    dims = tl.arange(0, HALF)[None, :]
    k_at = (place * (2 * KV_HEADS) + head)[:, None] * (2 * HALF) + dims
    v_at = k_at + KV_HEADS * (2 * HALF)
    slot = tl.load(slot_ptr + place, mask=line < num_lines, other=0).to(tl.int64)
    to = (slot * KV_HEADS + head)[:, None] * (2 * HALF) + dims
    tl.store(v_ptr + to, tl.load(kv_ptr + v_at, mask=inside, other=0.0), mask=inside)
    tl.store(v_ptr + to + HALF, tl.load(kv_ptr + v_at + HALF, mask=inside, other=0.0), mask=inside)
    low = tl.load(kv_ptr + k_at, mask=inside, other=0.0)
    high = tl.load(kv_ptr + k_at + HALF, mask=inside, other=0.0)
    own = (place % LAYERS)[:, None] * (2 * HALF) + dims
    weight_low = tl.load(k_norm_ptr + own, mask=inside, other=0.0)
    weight_high = tl.load(k_norm_ptr + own + HALF, mask=inside, other=0.0)
    turn = (place // LAYERS)[:, None] * (2 * HALF) + dims
    cos = tl.load(cos_ptr + turn, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + turn, mask=inside, other=0.0)
    a, b = norm_of_halves(low.to(tl.float32), high.to(tl.float32), weight_low, weight_high, eps, HALF)
    turned_low, turned_high = rope_of_halves(a, b, cos, sin)
    tl.store(k_ptr + to, turned_low.to(k_ptr.dtype.element_ty), mask=inside)
    tl.store(k_ptr + to + HALF, turned_high.to(k_ptr.dtype.element_ty), mask=inside)
