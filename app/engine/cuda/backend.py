"""Backend on CUDA GPUs: kernels in Triton and cuBLAS, and graphs. docs/cuda.md describes each kernel."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.comm.comm import Comm, Meeting
from app.engine.comm.device import DeviceComm
from app.engine.cuda import eight_bits, experts, fp4, gated_delta, gated_delta_prompts, integers, products, rows
from app.engine.cuda.attention import TILE_ROWS, Geometry, Heads, geometry, paged_attention
from app.engine.device import accelerator
from app.engine.device.base import AttentionMask, AttentionMetadata, Graph, LayerKv
from app.engine.device.moe import ExpertWeights, MoeConfig, mixture
from app.engine.device.torch import TorchBackend
from app.engine.errors import UnsupportedError
from app.engine.quantised import PackedFp4, QuantisedWeight, Rows, Weight, plain

DEVICE_ERRORS = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS")
"""Parts of messages after which no other call of the process can use the device."""
HOPPER = (9, 0)
HEAD_DIMS = (16, 32, 64, 128, 256)
GROUPED_ROWS = 16
"""Average rows of an expert up to which our kernel is used: the rows of its tile, so each weight is read about once."""


class CudaBackend(TorchBackend):
    """Backend with kernels in Triton, whose attention reads all lengths on the device. On a CPU the kernels run in
    Triton's interpreter."""

    quantised_dtypes = ("I8", "F8_E4M3")
    captures = True
    lengths_on_host = False
    memory_is_host = False
    defaults = replace(TorchBackend.defaults, draft_kind=torch.float8_e4m3fn)

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            torch.cuda.set_device(device)
            self.defaults = replace(self.defaults, dtype=torch.bfloat16, max_num_seqs=256, max_blocks=64, is_slow=False)
        # On a CPU the backend answers like an H200.
        self.capability = torch.cuda.get_device_capability(device) if self.on_gpu else (9, 0)
        self.has_scaled_mm = self.on_gpu and self.capability == HOPPER and eight_bits.has_scaled_mm()
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if self.on_gpu else 4
        self._graph_pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        # PyTorch's default stream for captures is shared, and the end of another engine's graph frees the cuBLAS
        # workspace of that stream. Streams are handed out in turn from 32 of each priority, and timings take others.
        self._capture_stream = torch.cuda.Stream(device, priority=-1) if self.on_gpu else None

    def check(self, decoder: DecoderConfig, block_size: int, page_size: int, dtype: torch.dtype) -> None:
        head_dim, delta = decoder.head_dim, decoder.gated_delta
        if head_dim not in HEAD_DIMS:
            raise UnsupportedError(f"head_dim {head_dim}: attention on a GPU takes {', '.join(map(str, HEAD_DIMS))}")
        if delta and delta.k_head_dim > gated_delta.MAX_K_HEAD_DIM:
            most = f"a GPU takes {gated_delta.MAX_K_HEAD_DIM} at most"
            raise UnsupportedError(f"linear_key_head_dim {delta.k_head_dim}: {most}")
        if block_size > TILE_ROWS:
            most = f"a GPU verifies {TILE_ROWS} at most; give --num-speculative-tokens {TILE_ROWS - 1}"
            raise UnsupportedError(f"a block of {block_size} rows: {most}")

    def check_ranks(self, size: int) -> None:
        if self.on_gpu:
            accelerator.check_ranks(self.device, size, torch.cuda, "CUDA_VISIBLE_DEVICES")

    def join(self, meeting: Meeting) -> Comm:
        return DeviceComm(meeting, "cpu:gloo,cuda:nccl")

    def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> Any:
        """Return None, because the kernel reads lengths on the device."""
        return None

    def attention(
        self, q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        return paged_attention(q_thd, kv, meta, mask, self.geometry(q_thd, kv, meta), sinks)

    def geometry(self, q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata) -> Geometry:
        """Return the shape of the launch, which a graph fixes at its capture."""
        heads = Heads(q_thd.shape[1], *kv.k.shape[2:])
        return geometry(meta.query_lens, heads, kv.k.dtype, self.multiprocessors, fixed=self.batch_invariant)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rows.add_rms_norm(x, None, weight, eps)[0]

    def multiplies(self, weight: QuantisedWeight | PackedFp4) -> bool:
        """Return True for what `eight_bits` and `fp4` multiply by, from Hopper on, whose instructions they have."""
        kernels = fp4 if isinstance(weight, PackedFp4) else eight_bits
        return kernels.multiplies(weight) and self.capability >= HOPPER

    def pack_quantised(self, weight: QuantisedWeight) -> QuantisedWeight:
        """Return the weight with a scale for each 128 numbers, and those of neighbouring rows side by side."""
        scales = weight.scales.repeat_interleave(weight.group // eight_bits.GROUP.value, -1)
        return replace(weight, scales=scales.mT.contiguous().mT)

    def norm_for(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, readers: Sequence[Weight]
    ) -> tuple[Rows, Tensor]:
        """Return `Backend.norm_for`, in 8 bits of the first quantised reader's kind. Others take plain rows."""
        kinds = [_kind(reader) for reader in readers]
        if (kind := next(filter(None, kinds), None)) is None:
            return super().norm_for(x, residual, weight, eps, readers)
        return rows.norm_in_8_bits(x, residual, weight, eps, kind, keep_plain=set(kinds) != {kind})

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """Return `Backend.linear`: of few rows by our product where that is faster, else by cuBLAS. With a quantised
        weight rows are in 8 bits too, however many."""
        if isinstance(weight, QuantisedWeight):
            return self._linear_8_bits(x, weight, bias)
        x = plain(x)
        if self.capability == HOPPER and (launch := products.few_rows(weight, len(x), self.multiprocessors)):
            return products.linear(x, weight, bias, self.multiprocessors, launch)
        return F.linear(x, weight, bias)

    def _linear_8_bits(self, x: Rows, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
        kind = weight.data.dtype
        if isinstance(x, Tensor) or x.data.dtype != kind:
            x = eight_bits.quantised(plain(x), kind)
        by_cublas = self.has_scaled_mm and not self.batch_invariant
        if by_cublas and eight_bits.scaled_mm_is_faster(weight, len(x.data)):
            return eight_bits.scaled_mm(x, weight, bias)
        return eight_bits.linear(x, weight, bias, self.multiprocessors, fixed=self.batch_invariant)

    def gated_mlp(self, x: Rows, gate_up: Weight, down: Weight) -> Tensor:
        return self.linear(rows.silu_mul(self.linear(x, gate_up), _kind(down)), down)

    def gated_norm(self, o: Tensor, z: Tensor, weight: Tensor, eps: float, reader: Weight) -> Rows:
        return rows.gated_norm(o, z, weight, eps, _kind(reader))

    def sigmoid_mul(self, x: Tensor, gate: Tensor, reader: Weight) -> Rows:
        return rows.sigmoid_mul(x, gate, _kind(reader))

    def moe(self, x: Rows, weights: ExpertWeights, config: MoeConfig) -> Tensor:
        """Return `Backend.moe`. PyTorch's grouped product takes only bfloat16, and serves many rows of an expert."""
        both = weights.gate_up, weights.down
        if any(isinstance(weight, PackedFp4) for weight in both):
            return experts.mixture(plain(x), weights, config, fp4.multiply)
        many = x.shape[0] * config.num_experts_per_tok > GROUPED_ROWS * config.num_experts
        if many and all(isinstance(weight, Tensor) for weight in both) and plain(x).dtype == torch.bfloat16:
            return mixture(plain(x), weights, config, route_rows=experts.routed)
        return experts.mixture(x, weights, config)

    add_shared_expert = staticmethod(experts.add_shared_expert)
    commit_and_verify = staticmethod(gated_delta.commit_and_verify)
    commit_prompts = staticmethod(gated_delta_prompts.commit_prompts)
    add_rms_norm = staticmethod(rows.add_rms_norm)
    convolve = staticmethod(rows.convolve)
    qkv_into_kv = staticmethod(rows.qkv_into_kv)
    context_into_kv = staticmethod(rows.context_into_kv)
    embed_blocks = staticmethod(integers.embed_blocks)
    positions_and_slots = staticmethod(integers.positions_and_slots)
    verify = staticmethod(integers.verify)
    advance_by_accepted = staticmethod(integers.advance_by_accepted)

    def capture(self, run: Callable[[], tuple[Tensor, ...]], metas: list[AttentionMetadata]) -> Graph:
        if not self.on_gpu:
            return super().capture(run, metas)
        run()
        return CudaGraph(run, self._graph_pool, self._capture_stream)

    def upload(self, host: Tensor, to: Tensor) -> None:
        """Queue `Backend.upload`. The host waits unless the copy is pinned and non-blocking, both."""
        to.copy_(host.pin_memory() if self.on_gpu else host, non_blocking=self.on_gpu)

    def start_download(self, x: Tensor) -> Callable[[], Tensor]:
        return accelerator.start_download(x, torch.cuda) if self.on_gpu else super().start_download(x)

    def is_fatal(self, error: BaseException) -> bool:
        """Return `Backend.is_fatal`. Triton and cuBLAS raise RuntimeError where PyTorch raises AcceleratorError."""
        is_device_error = isinstance(error, RuntimeError) and any(name in str(error) for name in DEVICE_ERRORS)
        return is_device_error or super().is_fatal(error)

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.device) if self.on_gpu else super().memory()

    def peak_memory(self, run: Callable[[], object]) -> int:
        return accelerator.peak_memory(run, torch.cuda) if self.on_gpu else super().peak_memory(run)


class InvariantCudaBackend(CudaBackend):
    """Backend that gives a row the same bits in every batch (`--batch-invariant`).

    Each product has tiles of one size and one split of K for a weight. Attention has tiles of one size for all rows,
    including those of prompts, and adds chunks of a fixed size of a sequence's tokens, from the first one on. Tokens
    that a row does not see add exact zeros. Norms and rotations are by row. The draft has the same operators, although
    only the target's bits decide a token.
    """

    batch_invariant = True

    def pack_weight(self, *parts: Tensor) -> Tensor:
        """Return `Backend.pack_weight`. Raises UnsupportedError unless the weight's columns are whole tiles."""
        weight = super().pack_weight(*parts)
        products.product_of(weight, self.multiprocessors)
        return weight

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, QuantisedWeight):
            return self._linear_8_bits(x, weight, bias)
        return products.linear(plain(x), weight, bias, self.multiprocessors)


def _kind(reader: Weight) -> torch.dtype | None:
    """Return the 8 bits in which rows meet a weight, or None for a plain one."""
    return reader.data.dtype if isinstance(reader, QuantisedWeight) else None


class CudaGraph(Graph):
    """Capture of `run` on `stream`, in the memory of `pool`; None makes a new pool.

    `run` must have run before, because a capture cannot compile a kernel or open a library's handle. Graphs that share
    a pool overwrite one another's memory, `outputs` too. So every read of `outputs` is queued before another replay. A
    pool ends with its last graph, because cuBLAS keeps memory there and no later capture can use the pool.
    """

    def __init__(self, run: Callable[[], tuple[Tensor, ...]], pool: Any, stream: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device during the capture.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.outputs = run()

    def replay(self) -> None:
        """Launch the graph. Kernels read lengths and tables on the device, so nothing else changes."""
        self._graph.replay()
