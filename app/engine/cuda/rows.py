"""Work on every row between matrix products, each in one launch of Triton.

Sums are in fp32, and a result is rounded once. A *vector* is the unit of a reduction: a row, or one head of a row.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda.eight_bits import GROUP, empty_rows, store_in_8_bits
from app.engine.cuda.launch import items_per_program
from app.engine.device.base import ProjectedRows
from app.engine.quantised import QuantisedRows, Rows

VECTORS_PER_PROGRAM = 8
SILU_BLOCK = tl.constexpr(1024)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm of x + residual over the last axis, x + residual). The norm is of the rounded sum.

    Without a residual both results are the norm of x.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = out if residual is None else torch.empty_like(out)
    _norm(x, residual, weight, eps, total, out)
    return out, total


def norm_in_8_bits(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, kind: torch.dtype, *, keep_plain: bool
) -> tuple[QuantisedRows, Tensor]:
    """Return (RMSNorm of x + residual [T, H] in 8 bits of `kind`, x + residual). The norm is rounded to the engine's
    dtype first, so that rows are the same whether one launch makes them or two."""
    plain = torch.empty_like(x) if keep_plain else None
    total = x if residual is None else torch.empty_like(x)
    out = replace(empty_rows(x, kind), plain=plain)
    _norm(x, residual, weight, eps, total, out)
    return out, total


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, total: Tensor, out: Rows) -> None:
    size = x.shape[-1]
    num_vectors, block = x.numel() // size, triton.next_power_of_2(size)
    vectors = items_per_program(num_vectors, on_gpu=1)
    norm[triton.cdiv(num_vectors, vectors),](
        x.contiguous(),
        None if residual is None else residual.contiguous(),
        weight,
        *_memory(out),
        total,
        num_vectors,
        eps,
        SIZE=size,
        VECTORS=vectors,
        num_warps=min(16, max(1, block // 512)),
    )


def _memory(rows: Rows) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """Return where rows go: as they are, and in 8 bits with their scales, and the stride of these between groups."""
    if isinstance(rows, Tensor):
        return rows, None, None, 0
    return rows.plain, rows.data, rows.scales, rows.scales.stride(0)


@triton.jit(do_not_specialize=["num_vectors", "scale_stride"])
def norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    bits_ptr,
    scale_ptr,
    scale_stride,
    total_ptr,
    num_vectors,
    eps,
    SIZE: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Normalise VECTORS vectors of SIZE numbers, and store them as they are, in 8 bits, or both."""
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    columns = tl.arange(0, triton.next_power_of_2(SIZE))[None, :]
    inside = (vector < num_vectors)[:, None] & (columns < SIZE)
    offset = vector.to(tl.int64)[:, None] * SIZE + columns
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offset, total, mask=inside)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None] * weight).to(x_ptr.dtype.element_ty)
    if out_ptr is not None:
        tl.store(out_ptr + offset, x, mask=inside)
    if bits_ptr is not None:
        store_in_8_bits(x.to(tl.float32), vector, 0, bits_ptr, scale_ptr, num_vectors, scale_stride, SIZE)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, kind: torch.dtype | None = None) -> Rows:
    """Return `Backend.gated_norm`, in 8 bits of `kind` unless it is None, if heads have whole groups."""
    num_rows, heads, size = o.shape
    kind = None if size % GROUP.value else kind
    out = empty_rows(z, kind) if kind else z.new_empty(num_rows, heads * size)
    vectors = items_per_program(num_rows * heads, VECTORS_PER_PROGRAM)
    gate_heads[triton.cdiv(num_rows * heads, vectors),](
        o.contiguous(),
        z,
        z.stride(0),
        weight,
        *_memory(out),
        num_rows,
        eps,
        HEADS=heads,
        SIZE=size,
        VECTORS=vectors,
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def gate_heads(
    o_ptr,
    z_ptr,
    z_stride,
    weight_ptr,
    out_ptr,
    bits_ptr,
    scale_ptr,
    scale_stride,
    num_rows,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Normalise VECTORS heads of SIZE numbers, multiply them by silu(z), and store them as they are or in 8 bits."""
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    columns = tl.arange(0, triton.next_power_of_2(SIZE))[None, :]
    row, first = vector // HEADS, vector % HEADS * SIZE
    inside = (row < num_rows)[:, None] & (columns < SIZE)
    offset = vector.to(tl.int64)[:, None] * SIZE + columns
    x = tl.load(o_ptr + offset, mask=inside, other=0.0)
    z_at = row.to(tl.int64)[:, None] * z_stride + first[:, None] + columns
    z = tl.load(z_ptr + z_at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None] * weight * (z / (1.0 + tl.exp(-z)))
    x = x.to(z_ptr.dtype.element_ty)
    if bits_ptr is None:
        tl.store(out_ptr + offset, x, mask=inside)
    else:
        store_in_8_bits(x.to(tl.float32), row, first, bits_ptr, scale_ptr, num_rows, scale_stride, HEADS * SIZE)


def convolve(part: Callable[[Tensor], Tensor], rows: Tensor, base: Tensor, change: Tensor) -> Tensor:
    """Return `Backend.convolve`. Its sums are in fp32."""
    (num_rows, size), groups, per_program = rows.shape, base.shape[2], items_per_program(len(rows), on_gpu=1)
    for side in (0, 1):
        x, rows = (part(rows) if side else rows).contiguous(), rows.new_empty(rows.shape)
        convolved[triton.cdiv(num_rows, per_program), triton.cdiv(size, SILU_BLOCK.value)](
            x,
            base[side],
            change.contiguous(),
            rows,
            num_rows,
            change.shape[1],
            2 * side * groups,
            GROUPS=groups,
            SIZE=size,
            ROWS=per_program,
        )
    return rows


@triton.jit(do_not_specialize=["num_rows", "width", "first_group"])
def convolved(
    x_ptr,
    base_ptr,
    change_ptr,
    out_ptr,
    num_rows,
    width,
    first_group,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute SILU_BLOCK columns of ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * SILU_BLOCK + tl.arange(0, SILU_BLOCK)[None, :]
    inside = (row < num_rows)[:, None] & (columns < SIZE)
    has_before = inside & (row % width > 0)[:, None]
    row = row.to(tl.int64)[:, None]
    change = change_ptr + row * (4 * GROUPS) + first_group + columns // (SIZE // GROUPS)
    current = tl.load(base_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    current += tl.load(change, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(base_ptr + SIZE + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    before += tl.load(change + GROUPS, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    x_before = tl.load(x_ptr + (row - 1) * SIZE + columns, mask=has_before, other=0.0).to(tl.float32)
    out = current * x + before * x_before
    tl.store(out_ptr + row * SIZE + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, kind: torch.dtype | None = None) -> Rows:
    """Return silu(gate) * up `[T, I]` of `[T, 2I]`, gate first, in 8 bits of `kind` unless it is None."""
    gate, up = gate_up.chunk(2, dim=1)
    return _gated(gate, up, kind, is_silu=True)


def sigmoid_mul(x: Tensor, gate: Tensor, kind: torch.dtype | None = None) -> Rows:
    """Return x * sigmoid(gate) `[T, I]`, in 8 bits of `kind` unless it is None."""
    return _gated(gate, x, kind, is_silu=False)


def _gated(gate: Tensor, x: Tensor, kind: torch.dtype | None, *, is_silu: bool) -> Rows:
    num_rows, size = gate.shape
    out = empty_rows(gate, kind) if kind else gate.new_empty(num_rows, size)
    rows = items_per_program(num_rows, on_gpu=1)
    grid = triton.cdiv(num_rows, rows), triton.cdiv(size, SILU_BLOCK.value)
    strides = gate.stride(0), x.stride(0)
    gated[grid](gate, x, *strides, *_memory(out), num_rows, SIZE=size, IS_SILU=is_silu, ROWS=rows)
    return out


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def gated(
    gate_ptr,
    x_ptr,
    gate_stride,
    x_stride,
    out_ptr,
    bits_ptr,
    scale_ptr,
    scale_stride,
    num_rows,
    SIZE: tl.constexpr,
    IS_SILU: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute SILU_BLOCK columns of x * silu(gate), or of x * sigmoid(gate), as they are or in 8 bits, of ROWS rows."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * SILU_BLOCK
    columns = first + tl.arange(0, SILU_BLOCK)[None, :]
    inside = (index < num_rows)[:, None] & (columns < SIZE)
    row = index.to(tl.int64)[:, None]
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    out = (gate if IS_SILU else 1.0) / (1.0 + tl.exp(-gate)) * x
    out = out.to(x_ptr.dtype.element_ty)
    if bits_ptr is None:
        tl.store(out_ptr + row * SIZE + columns, out, mask=inside)
    else:
        store_in_8_bits(out.to(tl.float32), index, first, bits_ptr, scale_ptr, num_rows, scale_stride, SIZE)


def qkv_into_kv(rows: ProjectedRows) -> Tensor:
    """Return `Backend.qkv_into_kv`."""
    num_rows, all_heads, dim = rows.qkv.shape
    q = rows.qkv.new_empty(num_rows, all_heads - 2 * rows.kv.k.shape[2], dim)
    _rope_and_write(rows, q, layers=1)
    return q


def context_into_kv(rows: ProjectedRows) -> None:
    """Apply `Backend.context_into_kv`."""
    assert rows.k_norm is not None
    _rope_and_write(rows._replace(q_norm=None), None, layers=len(rows.k_norm))


def _rope_and_write(projected: ProjectedRows, q: Tensor | None, *, layers: int) -> None:
    qkv, q_norm, k_norm, eps, rotation, kv, slot_mapping = projected
    num_vectors, dim = qkv.shape[0] * qkv.shape[1], qkv.shape[2]
    vectors = items_per_program(num_vectors, VECTORS_PER_PROGRAM)
    rope_and_write[triton.cdiv(num_vectors, vectors),](
        qkv.contiguous(),
        q_norm,
        k_norm,
        *(x.contiguous() for x in rotation),
        slot_mapping,
        q,
        kv.k,
        kv.v,
        num_vectors,
        eps,
        HEADS=0 if q is None else q.shape[1],
        KV_HEADS=kv.k.shape[2],
        LAYERS=layers,
        HALF=dim // 2,
        VECTORS=vectors,
        num_warps=min(4, max(1, VECTORS_PER_PROGRAM * dim // 256)),
    )


@triton.jit(do_not_specialize=["num_vectors"])
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
    num_vectors,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LAYERS: tl.constexpr,
    HALF: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Normalise (with norms) and rotate VECTORS heads of q and k. K and the unchanged V go to the row's slot.

    A row belongs to one of LAYERS layers, each with a separate norm of k. Rows of one token share its rotation.
    """
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    inside = vector < num_vectors
    row = (vector // (HEADS + 2 * KV_HEADS)).to(tl.int64)
    head = vector % (HEADS + 2 * KV_HEADS)
    is_q, is_v = inside & (head < HEADS), inside & (head >= HEADS + KV_HEADS)
    is_k = inside & (head >= HEADS) & (head < HEADS + KV_HEADS)
    dims = tl.arange(0, HALF)[None, :]
    source = qkv_ptr + vector.to(tl.int64)[:, None] * (2 * HALF) + dims
    low = tl.load(source, mask=inside[:, None], other=0.0)
    high = tl.load(source + HALF, mask=inside[:, None], other=0.0)

    turned, angle = (is_q | is_k)[:, None], (row // LAYERS)[:, None] * (2 * HALF) + dims
    cos = tl.load(cos_ptr + angle, mask=turned, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=turned, other=0.0).to(tl.float32)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if k_norm_ptr is not None:
        k_norm = k_norm_ptr + ((row % LAYERS)[:, None] * (2 * HALF) if LAYERS > 1 else 0) + dims
        weight_low, weight_high = tl.load(k_norm), tl.load(k_norm + HALF)
        if HEADS > 0:
            weight_low = tl.where(is_q[:, None], tl.load(q_norm_ptr + dims), weight_low)
            weight_high = tl.where(is_q[:, None], tl.load(q_norm_ptr + HALF + dims), weight_high)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a, b = a * scale * weight_low.to(tl.float32), b * scale * weight_high.to(tl.float32)
    turned_low, turned_high = a * cos - b * sin, b * cos + a * sin

    if HEADS > 0:
        to_q = q_ptr + (row * HEADS + head)[:, None] * (2 * HALF) + dims
        tl.store(to_q, turned_low.to(q_ptr.dtype.element_ty), mask=is_q[:, None])
        tl.store(to_q + HALF, turned_high.to(q_ptr.dtype.element_ty), mask=is_q[:, None])
    slot = tl.load(slot_ptr + row, mask=is_k | is_v, other=0).to(tl.int64)
    to_k = k_ptr + (slot * KV_HEADS + head - HEADS)[:, None] * (2 * HALF) + dims
    tl.store(to_k, turned_low.to(k_ptr.dtype.element_ty), mask=is_k[:, None])
    tl.store(to_k + HALF, turned_high.to(k_ptr.dtype.element_ty), mask=is_k[:, None])
    to_v = v_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS)[:, None] * (2 * HALF) + dims
    tl.store(to_v, low, mask=is_v[:, None])
    tl.store(to_v + HALF, high, mask=is_v[:, None])
