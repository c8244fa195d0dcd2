"""One kernel in Triton for a layer's work between its QKV projection and attention, by triton-ascend.

Every core takes some rows, one behind the other, because a program that is no core of its own waits for one. All
addresses of a tile are a number and steps of one size, because single addresses are copied number by number.

Interpreted on a CPU; not compiled for and not run on an Ascend device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.device.base import LayerKv, Rotation
from app.engine.device.halves import norm_of_halves, rope_of_halves

TILE_NUMBERS = 2048
"""Numbers of a tile of heads, 8 KiB in fp32. A core's buffer has 192 KiB, and twice the tiles if copies run ahead. Ten
tiles are alive at most, so they take less than the 85 KiB that vllm-ascend's kernel of this job counts with."""


def vector_cores(device: torch.device) -> int:
    """Return the number of vector cores. Raises what triton-ascend raises without a device or without its driver."""
    cores: int = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["num_vectorcore"]
    return cores


def qkv_into_kv(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rotation: Rotation,
    kv: LayerKv,
    slot_mapping: Tensor,
    *,
    cores: int,
) -> Tensor:
    """Return `Backend.qkv_into_kv` in one launch. `rotation` is cos and sin, each [T, 1, D]."""
    num_rows, all_heads, dim = qkv.shape
    kv_heads = kv.k.shape[2]
    heads = all_heads - 2 * kv_heads
    q = torch.empty(num_rows, heads, dim, dtype=qkv.dtype, device=qkv.device)
    most = TILE_NUMBERS // dim
    norm_rope_and_write[min(num_rows, cores),](
        qkv.contiguous(),
        q_norm,
        k_norm,
        *(x.contiguous() for x in rotation),
        slot_mapping.contiguous(),
        q,
        kv.k,
        kv.v,
        num_rows,
        eps,
        NORMS=q_norm is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        TILE=min(most, triton.next_power_of_2(heads)),
        KV_TILE=min(most, triton.next_power_of_2(kv_heads)),
    )
    return q


@triton.jit(do_not_specialize=["num_rows"])
def norm_rope_and_write(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    num_rows,
    eps,
    NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
):
    """Normalise (with NORMS) and rotate heads of q and k of some rows. K and the unchanged V go to the row's slot."""
    dims = tl.arange(0, HALF)[None, :]
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        from_q = qkv_ptr + row * ((HEADS + 2 * KV_HEADS) * 2 * HALF)
        from_k = from_q + HEADS * 2 * HALF
        from_v = from_k + KV_HEADS * 2 * HALF
        cos = tl.load(cos_ptr + row * (2 * HALF) + dims)
        sin = tl.load(sin_ptr + row * (2 * HALF) + dims)
        slot = tl.load(slot_ptr + row).to(tl.int64) * (KV_HEADS * 2 * HALF)
        norm_and_rope(from_q, q_norm_ptr, q_ptr + row * (HEADS * 2 * HALF), cos, sin, eps, NORMS, HEADS, HALF, TILE)
        norm_and_rope(from_k, k_norm_ptr, k_ptr + slot, cos, sin, eps, NORMS, KV_HEADS, HALF, KV_TILE)
        for first in range(0, KV_HEADS, KV_TILE):
            head = first + tl.arange(0, KV_TILE)[:, None]
            at = head * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
            tl.store(v_ptr + slot + at, tl.load(from_v + at, mask=head < KV_HEADS, other=0.0), mask=head < KV_HEADS)


@triton.jit
def norm_and_rope(
    from_ptr,
    weight_ptr,
    to_ptr,
    cos,
    sin,
    eps,
    NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write HEADS heads of one row after RMSNorm (with NORMS) and RoPE, TILE heads at a time."""
    dims = tl.arange(0, HALF)[None, :]
    for first in range(0, HEADS, TILE):
        head = first + tl.arange(0, TILE)[:, None]
        at, inside = head * (2 * HALF) + dims, head < HEADS
        a = tl.load(from_ptr + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(from_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            a, b = norm_of_halves(a, b, tl.load(weight_ptr + dims), tl.load(weight_ptr + HALF + dims), eps, HALF)
        a, b = rope_of_halves(a, b, cos, sin)
        tl.store(to_ptr + at, a.to(to_ptr.dtype.element_ty), mask=inside)
        tl.store(to_ptr + at + HALF, b.to(to_ptr.dtype.element_ty), mask=inside)
