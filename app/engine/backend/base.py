"""What a device must offer. The models and dflash/ are written against this and know no device."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.backend.graph import Graph, RerunGraph


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's paged K and V, each [pages, page_size, kv_heads, head_dim]."""

    k: Tensor
    v: Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """What attention reads for the rows of S sequences lying back to back.

    `query_start_loc` [S + 1], `seq_lens` [S] and `page_table` [S, P] are int32 on the device; `query_lens` and
    `host_seq_lens` are the same
    lengths on the host, exact unless the backend has `device_side_lengths`. `host_seq_lens` include the rows
    themselves. Causal
    rows see the tokens up to themselves, others all `seq_lens` tokens. `plan` is what `Backend.plan_attention` derived,
    once for all layers.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    page_table: Tensor
    query_lens: list[int]
    host_seq_lens: list[int]
    page_size: int
    causal: bool
    plan: Any = None


Rotation = tuple[Tensor, ...]
"""RoPE at T positions: cos and sin, each [T, 1, D] with both halves alike, or what a backend's own tables hold."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sizes a device works well with when the user gives none."""

    dtype: torch.dtype
    page_size: int
    max_num_seqs: int


class Backend(ABC):
    """The operators of one device. T is rows, H hidden size, D head size; `_thd` is [T, heads, D]."""

    defaults: Defaults
    interleaved_rope = False
    """Whether RoPE turns dims (2i, 2i + 1) of a head together: q and k weights are put in that order when loaded."""
    separate_prefill = True
    """Whether rows of prompts go through an attention call of their own in a step in which others decode."""
    captures = False
    """Whether graphs are the faster way here; `capture` works everywhere."""
    allows_empty_sequences = False
    """Whether attention takes sequences without rows, so that a step that fills a graph needs no padding."""
    device_side_lengths = False
    """Whether attention takes lengths from the device when it runs, where a decode step is replayed from graphs. Then
    those on the host may be less than the true ones, and a step is launched before the one before it is read."""

    fused_places: Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]] | None = None
    """`forward.places` in one launch, given owners, offsets, numbers, page table and page size; None composes it."""
    fused_verify: Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], Tensor] | None = None
    """`dflash.verify` in one launch; None composes it."""
    fused_follow: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None] | None = None
    """`forward.follow` in one launch; None composes it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def check(self, head_dim: int, block_size: int, page_size: int, dtype: torch.dtype) -> None:
        """Raises UnsupportedError, naming the setting, for what this device's operators are known not to do."""
        return

    def rotary_tables(self, angles: Tensor, dtype: torch.dtype) -> Rotation:
        """The tables on the device that a `Rotation` is taken from row by row, for `angles` [positions, D / 2] fp32."""
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(self.device, dtype), angles.sin().to(self.device, dtype)

    def pack_weight(self, weight: Tensor) -> Tensor:
        """A weight that `linear` reads, with the same shape and values, laid out in memory as it reads it fastest."""
        return weight

    def plan_attention(self, meta: AttentionMetadata, group: int) -> Any:
        """What `attention` needs of `meta` beyond itself, with `group` query heads to a KV head.

        Called once a step, before the forward, so that `attention` itself can be captured in a graph.
        """
        return None

    @abstractmethod
    def attention(self, q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata) -> Tensor:
        """softmax(q k^T / sqrt(D)) v over paged K/V, grouped-query heads. Returns o [T, heads, D].

        Slots past `seq_lens` may hold anything finite; nothing of them may show in o.
        """

    @abstractmethod
    def write_kv(self, k_thd: Tensor, v_thd: Tensor, kv: LayerKv, slot_mapping: Tensor) -> None:
        """Put row t at slot `slot_mapping[t]` = page id * page_size + offset; int32, unique in a call.

        The rows may be strided views of a wider tensor.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last axis."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""

    @abstractmethod
    def rope(self, x_thd: Tensor, rotation: Rotation) -> Tensor:
        """RoPE of each head: dims (i, D/2 + i) turn together, or (2i, 2i + 1) where `interleaved_rope`."""

    @abstractmethod
    def gated_mlp(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x)); `gate_up` is [2I, H], gate first."""

    def qkv_into_kv(
        self,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        rotation: Rotation,
        kv: LayerKv,
        slot_mapping: Tensor,
    ) -> Tensor:
        """`qkv` [T, heads + 2 * kv_heads, D]: RMSNorm and RoPE on each head of q and k, then `write_kv`. Returns q."""
        kv_heads = kv.k.shape[-2]
        q, k, v = qkv.split_with_sizes([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        q = self.rope(self.rms_norm(q, q_norm, eps), rotation)
        k = self.rope(self.rms_norm(k, k_norm, eps), rotation)
        self.write_kv(k, v, kv, slot_mapping)
        return q

    def context_into_kv(
        self,
        kv_tl2hd: Tensor,
        k_norm: Tensor,
        ones: Tensor,
        eps: float,
        rotation: Rotation,
        kv: LayerKv,
        slot_mapping: Tensor,
    ) -> None:
        """`kv_tl2hd` [T, layers, 2, kv_heads, D], K before V, of all layers at once: RMSNorm with the weights `k_norm`
        [layers, D] and RoPE on each head of K, then `write_kv` at `slot_mapping` [T * layers]. `ones` are D of them."""
        k, v = kv_tl2hd.unbind(2)
        k = self.rms_norm(k, ones, eps) * k_norm[:, None]
        k = self.rope(k.flatten(1, 2), rotation).view(-1, *k.shape[2:])
        self.write_kv(k, v.flatten(0, 1), kv, slot_mapping)

    def embed_blocks(self, anchors: Tensor, mask_token_id: int, block_size: int, embedding: Tensor) -> Tensor:
        """Rows [D * b, H] of the embedding: of each anchor [D], and of b - 1 masks behind it."""
        blocks = anchors.new_full((anchors.shape[0], block_size), mask_token_id)
        blocks[:, 0] = anchors
        return F.embedding(blocks.flatten(), embedding)

    def high_half(self, x: Tensor) -> Tensor:
        """The upper 16 bits of int32, as numbers 0 to 65535."""
        return (x >> 16) & 0xFFFF

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight.T"""

    def capture(self, run: Callable[[], tuple[Tensor, ...]], metas: list[AttentionMetadata]) -> Graph:
        """Record what `run` launches, whose attention reads `metas`, planned. It is also run, so that nothing lazy is
        left; the tensors it reads must keep their place."""
        return RerunGraph(run)

    def explain(self, error: BaseException) -> str | None:
        """Return what an error code of this device in the message of `error` means, or None."""
        return None

    def is_fatal(self, error: BaseException) -> bool:
        """Return True if the state of the device is unknown after `error`, so the engine has to be started again."""
        out_of_memory = (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError)
        return isinstance(error, out_of_memory) or self.explain(error) is not None

    @abstractmethod
    def upload(self, host: Tensor, to: Tensor) -> None:
        """Queue the copy of a host tensor to one of the device, without waiting for either."""

    @abstractmethod
    def start_download(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin the copy of x to the host behind the work queued so far; calling the result waits for that alone."""

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""

    def retain_allocator_memory(self) -> None:
        """All that stays is allocated: from now on memory that a step gives back may be kept for the next one."""
        return

    @abstractmethod
    def peak_memory(self, run: Callable[[], object]) -> int:
        """Bytes of the device that `run` takes at its peak; all that is not in use afterwards is given back."""


def download_behind(x: Tensor, event: Any) -> Callable[[], Tensor]:
    """`start_download` through pinned memory; `event` is a new one of the device's stream."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    event.record()

    def wait() -> Tensor:
        event.synchronize()
        return host

    return wait


def peak_memory(memory: Any, run: Callable[[], object]) -> int:
    """`Backend.peak_memory` by a device's own allocator; `memory` is torch.cuda or torch.npu."""
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    run()
    peak = memory.max_memory_allocated() - before
    memory.empty_cache()
    return int(peak)
