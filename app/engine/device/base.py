"""The interface of a device, with the maths of its simple operators. models/ and dflash/ name no device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.checkpoint.shapes import AttentionMask, DecoderConfig, GatedDeltaConfig, MoeConfig
from app.engine.comm.comm import Comm, Meeting
from app.engine.device.recurrent import GatedDeltaPrompts, GatedDeltaStep
from app.engine.errors import UnsupportedError
from app.engine.quantised import ExpertWeight, PackedFp4, QuantisedWeight, Rows, Weight, joined, plain
from app.engine.verify import verify


@dataclass(frozen=True, slots=True)
class LayerKv:
    """Paged K and V of one layer, each [pages, page_size, kv_heads, D]."""

    k: Tensor
    v: Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """Lengths and pages of S sequences whose rows are consecutive. Sequence lengths include the rows themselves."""

    query_start_loc: Tensor  # [S + 1] int32, on the device
    seq_lens: Tensor  # [S] int32, on the device
    page_table: Tensor  # [S, P] int32, on the device
    query_lens: list[int]  # the same lengths on the host, exact if the backend has `lengths_on_host`
    host_seq_lens: list[int]
    page_size: int
    plans: dict[AttentionMask, Any] = field(default_factory=dict)  # of `Backend.plan_attention`, one for each mask


Rotation = tuple[Tensor, ...]
"""RoPE at T positions: cos and sin, each [T, 1, D] with both halves alike, or rows of tables in a backend's layout."""


class ProjectedRows(NamedTuple):
    """T rows of a layer after its QKV projection, and where K and V go.

    The draft's context has T * L rows without q, of L layers, with slots as of `KvPool.slots_in_all_layers`. There
    `k_norm` is [L, D], and `q_norm` ones.
    """

    qkv: Tensor  # [T, heads + 2 * kv_heads, D]
    q_norm: Tensor | None  # [D], or None for a model without it
    k_norm: Tensor | None
    eps: float
    rotation: Rotation
    kv: LayerKv
    slot_mapping: Tensor

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of q, k and v."""
        kv_heads = self.kv.k.shape[-2]
        q, k, v = self.qkv.split_with_sizes([self.qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        return q, k, v


Decode = Callable[..., tuple[Tensor, Tensor | None] | None]
"""Returns what `Target.forward` does, or None if the layers are faster, from embedded rows [T, H], their rotation and
slots, the attention groups, and the KV of all layers."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Experts of a layer: `router` [E, H] fp32, `gate_up` [E, 2I, H] with the gate first, `down` [E, H, I], and their
    biases [E], [E, 2I], [E, H], all of them fp32."""

    router: Tensor
    gate_up: ExpertWeight
    down: ExpertWeight
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Defaults:
    """What works well on a device when the user gives nothing. `max_blocks` is the most sequences with a draft."""

    dtype: torch.dtype
    page_size: int
    max_num_seqs: int
    max_blocks: int = 256
    draft_kind: torch.dtype | None = None
    """The 8 bits that a draft in bfloat16 is rounded to, because its steps gain more than its acceptance loses."""
    is_slow: bool = False
    """Prompts are cut by time, because streams would stand still for seconds behind one of thousands of rows."""


class Graph(ABC):
    """Captured device work. `outputs` keep their memory, and hold the values of the last replay."""

    outputs: tuple[Tensor, ...]

    @abstractmethod
    def replay(self) -> None:
        """Launch the work with the current values of its input tensors and the current plans of its metas."""

    def try_replay(self) -> None:
        """`replay` with plans that were not tried. If the device refuses them, raises RuntimeError, and other plans may
        follow."""
        self.replay()


class Backend(ABC):
    """Operators of one device. T is rows, H hidden size, D head size; `_thd` is [T, heads, D]. Hidden states have the
    engine's dtype, and indices are int32, unless a method says otherwise."""

    defaults: Defaults

    # RoPE rotates dims (2i, 2i + 1) of a head together. The loader puts rows of q and k in that order.
    interleaved_rope = False

    # Prompts get a separate attention call in a step in which others decode.
    separate_prefill = True

    # Graphs are faster on this device. `capture` works on every device.
    captures = False

    # Attention has another kernel for few rows of a single long request, which shares its tokens among the cores.
    splits_long_requests = False

    # If not, a graph's attention reads lengths on the device: a step can be launched before the last is read.
    lengths_on_host = True

    # Attention takes sequences without rows, so a step that fills a graph needs no padding.
    allows_empty_sequences = False

    # The host computes: other processes share its memory, no peak is measured, and a read costs nothing.
    memory_is_host = False

    # Tensors of a step without graphs may be the host's arrays.
    reads_arrays = False

    # Dtypes of stored weights, as safetensors names them, that mostly stay as they are.
    quantised_dtypes: tuple[str, ...] = ()

    # No bit of a row of the target depends on the other rows of a step, or on its position among them.
    batch_invariant = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.quantised_bytes = self.widened_bytes = 0
        """Bytes of packed weights that stay quantised, and of others that do not."""

    def why_not(self, dtype: torch.dtype, layer_numbers: int | None = None) -> str:
        """Return why `--dtype auto` does not keep weights of `dtype`, but takes the dtype of `defaults`, or "" if it
        does. A layer of the target has `layer_numbers` in gate and up; None is for a large one."""
        default = self.defaults.dtype
        if dtype.itemsize == default.itemsize:
            return ""
        return f"{str(default).removeprefix('torch.')} is the device's default"

    def check(self, decoder: DecoderConfig, block_size: int, page_size: int, dtype: torch.dtype) -> None:
        """Raise UnsupportedError, which names the setting or size, if an operator of this device cannot do it."""
        return

    def check_states(self, config: GatedDeltaConfig, block_size: int, dtype: torch.dtype) -> None:
        """Raise UnsupportedError unless recurrent states may have this dtype, and blocks of so many rows with it."""
        if dtype != torch.float32:
            name = str(dtype).removeprefix("torch.")
            raise UnsupportedError(f"--mamba-ssm-cache-dtype {name}: it is for an NPU; leave it out")

    def check_ranks(self, size: int) -> None:
        """Raise UnsupportedError unless there are `size` devices from this one on, one for each rank."""
        return

    @abstractmethod
    def join(self, meeting: Meeting) -> Comm:
        """Return the collectives of this rank, once all have joined."""

    def max_graphs(self, size: int) -> int | None:
        """Return the number of graphs with collectives of `size` ranks that the device holds, or None if unknown.

        Raises UnsupportedError, which names what to change, if this process can capture none.
        """
        return None

    def graph_bytes(self, decoders: Sequence[DecoderConfig]) -> int:
        """Return the bytes that graphs of a rank's `decoders` take and that no peak of a step shows, because only
        graphs take them, or the device's libraries take them from another allocator."""
        return 0

    def rotary_tables(self, angles: Tensor, dtype: torch.dtype, scales: Tensor | float = 1.0) -> Rotation:
        """Return tables whose rows are a `Rotation`, for `angles` [positions, D / 2] fp32 and `scales` of pairs."""
        halves = (scales * angles.cos(), scales * angles.sin())
        cos, sin = (torch.cat((half, half), dim=-1).to(self.device, dtype) for half in halves)
        return cos, sin

    def rotation_at(self, tables: Rotation, positions: Tensor) -> Rotation:
        """Return the rows of `rotary_tables` at positions [T], each [T, 1, ...]."""
        # An index by brackets would become int64 first, which takes another launch on a GPU.
        return tuple(table.index_select(0, positions).unsqueeze(1) for table in tables)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def pack_weight(self, *parts: Tensor) -> Tensor:
        """Return one weight [out, in] of the rows of `parts`, in the memory order that `linear` reads fastest."""
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def pack_linear(self, *parts: Weight) -> Weight:
        """Return one weight of the rows of `parts`, quantised if all are, and this device multiplies by them so."""
        alike = [part for part in parts if isinstance(part, QuantisedWeight) and part.data.dtype == parts[0].data.dtype]
        if len(alike) == len(parts) and self.multiplies(whole := joined(alike) if len(alike) > 1 else alike[0]):
            self.quantised_bytes += whole.nbytes
            return self.pack_quantised(whole)
        plain = [part if isinstance(part, Tensor) else part.dequantised() for part in parts]
        if alike:
            self.count_widened(*plain)
        return self.pack_weight(*plain)

    def count_widened(self, *weights: Tensor) -> None:
        """Count weights that were stored quantised, and are not on this device."""
        self.widened_bytes += sum(weight.nbytes for weight in weights)

    def multiplies(self, weight: QuantisedWeight | PackedFp4) -> bool:
        """Return True if `linear` takes this quantised weight, and `moe` experts that are quantised like it. One on the
        meta device asks for its kind."""
        return False

    def pack_quantised(self, weight: QuantisedWeight) -> QuantisedWeight:
        """Return the weight [out, in], or experts [E, out, in], in the memory order that products read fastest."""
        return weight

    def pack_gate_up(self, weight: QuantisedWeight) -> Weight:
        """Return `pack_linear` of experts' gate and up [E, 2I, H], whose product a device may fuse with SwiGLU."""
        return self.pack_linear(weight)

    def pack_sinks(self, sinks: Tensor) -> Tensor:
        """Return sinks [heads] of the engine's dtype in the dtype that `attention` reads."""
        return sinks.float()

    def step(self, num_rows: int) -> AbstractContextManager[None]:
        """Return a context for the launch of a step with `num_rows` rows of the target."""
        return nullcontext()

    def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> Any:
        """Return `meta.plans[mask]` for `group` query heads to a KV head, before the forward and outside of graphs."""
        return None

    @abstractmethod
    def attention(
        self, q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        """Return softmax(q k^T / sqrt(D)) v [T, heads, D] over paged K and V, with grouped-query heads. `mask` is one
        of `meta.plans`. `sinks` [heads], packed, are logits without a value, one more in each row's softmax. Slots past
        `seq_lens` may hold any finite number, which must not show in the result."""

    def write_kv(self, k_thd: Tensor, v_thd: Tensor, kv: LayerKv, slot_mapping: Tensor) -> None:
        """Write row t of K and V [T, kv_heads, D], which may be strided views, to slot `slot_mapping[t]` = page id *
        page_size + offset. The slots [T] are unique in a call."""
        kv.k.view(-1, *k_thd.shape[1:])[slot_mapping] = k_thd
        kv.v.view(-1, *v_thd.shape[1:])[slot_mapping] = v_thd

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return RMSNorm (arXiv 1910.07467) of x [..., H] over the last axis: x / sqrt(mean(x^2) + eps) * weight."""
        if weight.dtype != x.dtype:  # a hybrid target's norms of 1 + weight, which are in float32
            return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual), each [T, H]."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def norm_for(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, readers: Sequence[Weight]
    ) -> tuple[Rows, Tensor]:
        """Return (rms_norm(x + residual) as the products by the weights `readers` take it, x + residual), each [T, H].
        None is a residual of zeros. A device that multiplies rows in 8 bits quantises them here, once for all."""
        if residual is None:
            return self.rms_norm(x, weight, eps), x
        return self.add_rms_norm(x, residual, weight, eps)

    def rope(self, x_thd: Tensor, rotation: Rotation) -> Tensor:
        """Return RoPE (arXiv 2104.09864) of each head. Dims (i, D/2 + i) rotate together without `interleaved_rope`."""
        cos, sin = rotation
        first, second = x_thd.chunk(2, dim=-1)
        return x_thd * cos + torch.cat((-second, first), dim=-1) * sin

    def gated_mlp(self, x: Rows, gate_up: Weight, down: Weight) -> Tensor:
        """Return down(silu(gate(x)) * up(x)) [T, H]; `gate_up` is [2I, H] with the gate first, `down` [H, I]."""
        gate, up = self.linear(x, gate_up).chunk(2, dim=-1)
        return self.linear(F.silu(gate).mul_(up), down)

    def convolve(self, part: Callable[[Tensor], Tensor], rows: Tensor, base: Tensor, change: Tensor) -> Tensor:
        """Return DFlash2's convolution, side 1, of `part` of side 0 of rows [T, H]. Kernels are `base` [2, 2, G, H / G]
        plus `change` [D, w, 2, 2, G, 1] of the rows of D blocks, by side and tap: the row and the previous one."""
        for side, (current, previous) in enumerate(base[:, :, None, None] + change.movedim((2, 3), (0, 1))):
            blocks = (part(rows) if side else rows).view_as(current)
            rows = (current * blocks).view_as(rows)
            rows.view_as(current)[:, 1:].addcmul_(previous[:, 1:], blocks[:, :-1])
        return rows

    def empty_experts(self, like: Tensor, num_experts: int, out_features: int, in_features: int) -> Tensor:
        """Return memory [E, out, in] of the dtype and device of `like`, in the order that `moe` reads fastest."""
        return like.new_empty(num_experts, out_features, in_features)

    @abstractmethod
    def moe(self, x: Rows, weights: ExpertWeights, config: MoeConfig) -> Tensor:
        """Return the mixture of experts [T, H] of rows [T, H], as `moe.mixture`."""

    def add_shared_expert(self, out: Tensor, shared: Tensor, x: Rows, gate: Tensor) -> Tensor:
        """Return out + sigmoid(x gate^T) * shared [T, H] for the expert of all rows, whose gate [1, H] is packed."""
        return out + torch.sigmoid(self.linear(x, gate)) * shared

    @abstractmethod
    def commit_and_verify(self, step: GatedDeltaStep) -> Tensor:
        """Commit accepted rows, and return outputs [R, Nv, Dv] fp32 of a step's rows: of padding any finite ones."""

    @abstractmethod
    def commit_prompts(self, step: GatedDeltaPrompts) -> Tensor:
        """Return outputs [R, Nv, Dv] fp32 of a step's prompt rows, and write the states after them. The rows of a
        prompt follow those that its slot has pending, as far as these were accepted. No slot that a chunk reads past
        position 0 may be written in the step."""

    def gated_norm(self, o: Tensor, z: Tensor, weight: Tensor, eps: float, reader: Weight) -> Rows:
        """Return rms_norm(o) * silu(z) [T, Nv * Dv] in z's dtype, or as the product by `reader` takes it, of heads o
        [T, Nv, Dv] and z [T, Nv * Dv] with strided rows. It is rounded once."""
        return (self.rms_norm(o, weight, eps).flatten(1) * F.silu(z.float())).to(z.dtype)

    def sigmoid_mul(self, x: Tensor, gate: Tensor, reader: Weight) -> Rows:
        """Return x * sigmoid(gate) [T, heads * D], or as the product by `reader` takes it."""
        return x * torch.sigmoid(gate)

    def qkv_into_kv(self, rows: ProjectedRows) -> Tensor:
        """Apply RMSNorm and RoPE to each head of q and k, write K and V, and return q [T, heads, D]."""
        q, k, v = rows.split()
        q = self.rope(q if rows.q_norm is None else self.rms_norm(q, rows.q_norm, rows.eps), rows.rotation)
        k = self.rope(k if rows.k_norm is None else self.rms_norm(k, rows.k_norm, rows.eps), rows.rotation)
        self.write_kv(k, v, rows.kv, rows.slot_mapping)
        return q

    def decoder(self, layers: list[Any], norm: Tensor, config: DecoderConfig, taps: tuple[int, ...]) -> Decode | None:
        """Return one operator for `layers` and the final norm, or None. Its features are the
        residual stream after layers `taps`. A layer is a list: input norm, qkv, its bias, norms of q and k, sinks, o,
        its bias, post-attention norm, gate_up and down. Any of them may be None."""
        return None

    def write_context(self, features: Tensor, *weights: Any) -> bool:
        """Return True if one operator did what `ContextKv.write` does with features [T, in] and its weights."""
        return False

    def choose(self, hidden: Tensor, lm_head: Weight) -> Tensor | None:
        """Return the argmax [R] int64 of logits of hidden states [R, H], NOT_FINITE where the best is NaN or infinite,
        by one operator, or None without one."""
        return None

    def context_into_kv(self, rows: ProjectedRows) -> None:
        """Apply RMSNorm and RoPE to each head of K of the draft's context, and write K and V of all layers at once."""
        assert rows.q_norm is not None and rows.k_norm is not None
        _, k, v = rows.split()
        k = self.rms_norm(k, rows.q_norm, rows.eps).unflatten(0, (-1, len(rows.k_norm))) * rows.k_norm[:, None]
        self.write_kv(self.rope(k.flatten(1, 2), rows.rotation).view_as(v), v, rows.kv, rows.slot_mapping)

    def embed_blocks(self, anchors: Tensor, mask_token_id: int, block_size: int, embedding: Tensor) -> Tensor:
        """Return rows [D * b, H] of the embedding [V, H]: each anchor [D], and b - 1 masks after it."""
        blocks = F.pad(anchors[:, None], (0, block_size - 1), value=mask_token_id)
        return F.embedding(blocks.flatten(), embedding)

    def positions_and_slots(
        self, seq_ids: Tensor, position_offsets: Tensor, row_numbers: Tensor, page_table: Tensor, page_size: int
    ) -> tuple[Tensor, Tensor]:
        """Return (positions, slots) [R] int32 of rows `row_numbers` 0 .. R - 1, which belong to `seq_ids` [R]. A row's
        position is its number plus `position_offsets` [S] of its sequence. Page p is in column p % P of its [S, P]."""
        positions = position_offsets[seq_ids] + row_numbers
        page = positions // page_size
        in_page = positions - page * page_size
        return positions, torch.add(in_page, page_table[seq_ids, page % page_table.shape[1]], alpha=page_size)

    verify = staticmethod(verify)

    def advance_by_accepted(
        self, verified: Tensor, prev_row: Tensor, tokens: Tensor, anchor_rows: Tensor, offsets: Tensor, seq_lens: Tensor
    ) -> None:
        """Advance S sequences, in place, by the result `verified` [L, w + 1] of the step in flight. `prev_row` [S] is a
        sequence's row in it, or -1 to leave it. Its position `offsets` and `seq_lens` [S] grow by the accepted drafts,
        and its anchor, at `anchor_rows` [S] of `tokens`, becomes the bonus token."""
        in_flight = prev_row >= 0
        results = verified[prev_row.clamp(min=0)]
        accepted = results[:, -1:]
        bonus = results.gather(1, accepted).flatten().clamp(min=0)  # NOT_FINITE ends its request
        # A sequence without rows may have no anchor row. It writes past all tokens.
        targets = torch.where(in_flight, anchor_rows, len(tokens)).long()
        tokens.copy_(torch.cat((tokens, tokens[:1])).scatter(0, targets, bonus.to(torch.int32))[:-1])
        num_accepted = torch.where(in_flight, accepted.flatten(), 0).to(torch.int32)
        offsets += num_accepted
        seq_lens += num_accepted

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias, [T, out] for x [T, in], a packed weight [out, in] and a bias [out]."""
        return F.linear(plain(x), weight if isinstance(weight, Tensor) else weight.dequantised(), bias)

    def logits(self, hidden: Tensor, lm_head: Weight) -> Tensor:
        """Return logits [R, V] of hidden states [R, H], in fp32 if the device can, else in the engine's dtype."""
        return self.linear(hidden, lm_head)

    def make_operators(self, on_progress: Callable[[int, int], None]) -> None:
        """Compile this package's operators for the device unless that is done, and report (compiled, total) sources."""
        return

    def end_of_load(self, *, tune: bool) -> None:
        """Prepare for steps. With `tune`, time products by the packed weights in several ways, and use the quickest."""
        return

    @abstractmethod
    def capture(self, run: Callable[[], tuple[Tensor, ...]], metas: list[AttentionMetadata]) -> Graph:
        """Return the recorded launches of `run`, whose attention reads the planned `metas`, before the first replay.
        `run` runs once before, for lazy initialisation. The tensors that it reads must keep their memory.
        Raises GraphsRefusedError if no graph can hold this model's operators."""

    def explain(self, error: BaseException) -> str | None:
        """Return what an error code of this device in the message of `error` means, or None."""
        return None

    def annotate(self, error: BaseException) -> None:
        """Add the meaning of an error code of this device to `error`, as a note."""
        if meaning := self.explain(error):
            error.add_note(meaning)

    def is_fatal(self, error: BaseException) -> bool:
        """Return True if the state of the device is unknown after `error`, so the engine must be restarted."""
        out_of_memory = (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError)
        return isinstance(error, out_of_memory) or self.explain(error) is not None

    @abstractmethod
    def upload(self, host: Tensor, to: Tensor) -> None:
        """Queue the copy of a host tensor to a device tensor of the same shape, without waiting for either."""

    @abstractmethod
    def start_download(self, x: Tensor) -> Callable[[], Tensor]:
        """Queue the copy of x to the host after the work queued so far. The result waits for that copy only."""

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes of the device."""

    @abstractmethod
    def peak_memory(self, run: Callable[[], object]) -> int:
        """Return the bytes of the device that `run` takes at its peak, and free unused memory afterwards."""
