"""Backend on Ascend NPUs, with torch_npu's fused operators. docs/npu-contract.md has the rules."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch_npu
from torch import Tensor

from app.engine.checkpoint.shapes import DecoderConfig, GatedDeltaConfig
from app.engine.comm.comm import Comm, Meeting
from app.engine.comm.device import DeviceComm
from app.engine.device import accelerator
from app.engine.device.base import AttentionMask, AttentionMetadata, Backend, Defaults, LayerKv, ProjectedRows, Rotation
from app.engine.device.gated_delta import commit_and_verify, commit_prompts
from app.engine.device.moe import SWIGLU_ALPHA, ExpertWeights, MoeConfig, router_logits
from app.engine.device.recurrent import GatedDeltaPrompts, GatedDeltaStep
from app.engine.errors import GraphsRefusedError, UnsupportedError
from app.engine.npu import gated_delta, int8_rows, nz, rules
from app.engine.npu.attention import AttentionPlan, graph_workspace
from app.engine.npu.error_codes import TILING, codes_in, explain
from app.engine.npu.graph import Attended, NpuGraph
from app.engine.quantised import ExpertWeight, PackedFp4, QuantisedWeight, Rows, Weight, plain

logger = logging.getLogger(__name__)

_LACKING = "GetWorkspaceSize not in "
"""Part of torch_npu's error for an operator that the installed CANN does not have."""
_ROW, _PAGE = (1, 1, rules.HEAD_DIMS[1]), (1, rules.PAGE_SIZE, 1, rules.HEAD_DIMS[1])


class NpuBackend(Backend):
    """Backend with torch_npu's operators.

    `dtypes` are what every version of the attention operator takes. Raises UnsupportedError if the NPU does not
    exist.
    """

    quantised_dtypes = ("I8",)
    dtypes = (torch.bfloat16,)
    captures = True
    separate_prefill = False
    splits_long_requests = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        count = torch_npu.npu.device_count()
        if (device.index or 0) >= count:
            raise UnsupportedError(f"--device {device}: torch_npu {torch_npu.__version__} sees {count} NPUs")
        torch_npu.npu.set_device(device)
        self.defaults = Defaults(dtype=torch.bfloat16, page_size=rules.PAGE_SIZE, max_num_seqs=256)
        self._mask = torch.ones(rules.MASK_SIZE, rules.MASK_SIZE, dtype=torch.int8).triu_(1).to(device)
        self._writes_pages = self._can_write_pages()
        self._reads_nz: dict[int, bool] = {}
        """Axes of a weight -> what the trial of its product found, at the first such weight."""
        self._rows_in_int8: dict[int, bool] = {}
        """Axes of a weight -> what the trial of the operator before its product found, at the first such weight."""
        self._fuses_swiglu: bool | None = None
        """What the trial of the experts' product with SwiGLU found, at the first such weight."""
        self._attended: list[Attended] | None = None
        self._graph_pool: tuple[int, int] | None = None

    def check_ranks(self, size: int) -> None:
        accelerator.check_ranks(self.device, size, torch_npu.npu, "ASCEND_RT_VISIBLE_DEVICES")

    def join(self, meeting: Meeting) -> Comm:
        """Return `Backend.join`. A rank whose graphs hold AIV's collectives needs the fewest streams."""
        mode = os.environ.setdefault(rules.EXPANSION_MODE, rules.AIV)
        if meeting.rank == 0:
            logger.info("collectives by HCCL with %s=%s", rules.EXPANSION_MODE, mode)
        return DeviceComm(meeting, "cpu:gloo,npu:hccl")

    def max_graphs(self, size: int) -> int:
        """Return how many graphs streams suffice for: one each, and more for draws or HCCL's unrolled collectives.

        Raises UnsupportedError if the environment forbids graphs.
        """
        for name, value in rules.NO_GRAPHS.items():
            if os.environ.get(name) == value:
                raise UnsupportedError(f"{name}={value} allows no graphs: unset it, or give --enforce-eager")
        if size == 1:
            return rules.GRAPH_STREAMS // (1 + rules.DRAW_GRAPHS)
        unrolled = min(size, rules.MAX_UNROLLED) - 1
        if os.environ.get(rules.EXPANSION_MODE, rules.AIV) == rules.AIV:
            unrolled = 1
        return rules.GRAPH_STREAMS // (1 + unrolled)

    def graph_bytes(self, decoders: Sequence[DecoderConfig]) -> int:
        """Return `Backend.graph_bytes`. All graphs share one pool, and calls of attention one workspace in it."""
        return rules.OTHER_GRAPH_BYTES + max(graph_workspace(each.num_heads, each.head_dim) for each in decoders)

    def check(self, decoder: DecoderConfig, block_size: int, page_size: int, dtype: torch.dtype) -> None:
        if dtype not in self.dtypes:
            name = str(dtype).removeprefix("torch.")
            raise UnsupportedError(f"--dtype {name}: attention on an NPU is done in bfloat16")
        if block_size > rules.MAX_BLOCK_ROWS:
            most = f"an NPU verifies {rules.MAX_BLOCK_ROWS} at most"
            fewer = f"give --num-speculative-tokens {rules.MAX_BLOCK_ROWS - 1}"
            raise UnsupportedError(f"a block of {block_size} rows: {most}; {fewer}")
        if page_size % rules.PAGE_SIZE:
            raise UnsupportedError(f"--page-size {page_size}: an NPU wants a multiple of {rules.PAGE_SIZE}")
        if decoder.head_dim not in rules.HEAD_DIMS:
            taken = ", ".join(map(str, rules.HEAD_DIMS))
            raise UnsupportedError(f"head_dim {decoder.head_dim}: an NPU's attention takes {taken}")
        if decoder.moe:
            self._check_experts(decoder.moe, decoder.hidden_size)

    def check_states(self, config: GatedDeltaConfig, block_size: int, dtype: torch.dtype) -> None:
        """Return after a trial of the operator for states in bfloat16, at the sizes of a layer."""
        if dtype == torch.float32:
            return
        flag, rows, size = "--mamba-ssm-cache-dtype bfloat16", rules.MAX_DELTA_ROWS, rules.MAX_DELTA_SIZE
        if block_size > rows:
            taken = f"a block has {block_size} rows, and its operator takes {rows} (N46)"
            raise UnsupportedError(f"{flag}: {taken}; give --num-speculative-tokens {rows - 1}")
        if max(config.num_v_heads, config.k_head_dim, config.v_head_dim) > size:
            raise UnsupportedError(f"{flag}: its operator takes at most {size} heads of {size} (N46); leave it out")
        if why := gated_delta.fault(config, block_size, self.device):
            raise UnsupportedError(f"{flag}: npu_recurrent_gated_delta_rule is not right here: {why}; leave it out")

    def _check_experts(self, config: MoeConfig, hidden_size: int) -> None:
        if config.num_experts < rules.MIN_EXPERTS:
            least = f"an NPU's grouped product takes at least {rules.MIN_EXPERTS} (N35)"
            raise UnsupportedError(f"target: num_experts {config.num_experts}: {least}")
        sizes = {
            "num_experts_per_tok": (config.num_experts_per_tok, rules.MAX_TOP_K),
            "hidden_size": (hidden_size, rules.MAX_AXIS),
            "twice the experts' intermediate_size": (2 * config.intermediate_size, rules.MAX_AXIS),
        }
        for name, (size, most) in sizes.items():
            if size > most:
                raise UnsupportedError(f"target: {name} {size}: an NPU's operators take at most {most} (N33, N35)")

    def pack_sinks(self, sinks: Tensor) -> Tensor:
        """Return `sinks` unchanged: the operator takes the dtype of queries (N38)."""
        return sinks

    def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> AttentionPlan:
        lengths = list(accumulate(meta.query_lens)), list(meta.host_seq_lens)
        if mask.window is not None:
            before = mask.window - 1
            return AttentionPlan(*lengths, self._mask, 4, before, 0 if mask.causal else before)
        return AttentionPlan(*lengths, self._mask, 3) if mask.causal else AttentionPlan(*lengths, None, 0)

    def attention(
        self, q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        plan: AttentionPlan = meta.plans[mask]
        if self._attended is not None:
            self._attended.append(Attended(meta, mask, sinks is not None))
        return plan.attend(q_thd, kv, meta, sinks)

    def write_kv(self, k_thd: Tensor, v_thd: Tensor, kv: LayerKv, slot_mapping: Tensor) -> None:
        """Write K and V. `cache_mode` is passed because the operator's default is another layout (N15)."""
        k, v, slots = k_thd.contiguous(), v_thd.contiguous(), slot_mapping.contiguous()
        if self._writes_pages:
            torch_npu.npu_scatter_pa_kv_cache(k, v, kv.k, kv.v, slots, cache_mode="Norm")
            return
        for rows, pool in ((k, kv.k), (v, kv.v)):
            torch_npu.npu_scatter_nd_update_(pool.flatten(0, 1), slots[:, None], rows)

    def _can_write_pages(self) -> bool:
        """Return True if this CANN can write K and V into pages. With an older one K and V are scattered by row."""
        rows, pages = (torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for shape in (_ROW, _PAGE))
        slot = torch.zeros(1, dtype=torch.int32, device=self.device)
        try:
            torch_npu.npu_scatter_pa_kv_cache(rows, rows, pages, pages.clone(), slot, cache_mode="Norm")
        except RuntimeError as error:
            if _LACKING not in str(error):
                raise
            logger.warning("this CANN cannot write pages, so K and V are scattered by row: %s", error)
            return False
        return True

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch_npu.npu_rms_norm(x, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return `Backend.add_rms_norm`, by two operators for a weight in another dtype than x (N18)."""
        if weight.dtype != x.dtype:
            total = x + residual
            return self.rms_norm(total, weight, eps), total
        normed, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    def norm_for(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, readers: Sequence[Weight]
    ) -> tuple[Rows, Tensor]:
        """Return `Backend.norm_for`, by one operator with its rows in int8 if all readers multiply by int8 (N43), and a
        trial of it was right."""
        are_int8 = bool(readers) and not any(isinstance(reader, Tensor) for reader in readers)
        if residual is None or weight.dtype != x.dtype or not are_int8 or not self._rows_in_int8.get(2):
            return super().norm_for(x, residual, weight, eps, readers)
        return int8_rows.norm(x, residual, weight, eps)

    def rotary_tables(self, angles: Tensor, dtype: torch.dtype, scales: Tensor | float = 1.0) -> Rotation:
        """Return cos and sin as one table [2, positions, D], so that one lookup reads both."""
        return (torch.stack(super().rotary_tables(angles, dtype, scales)),)

    def rotation_at(self, tables: Rotation, positions: Tensor) -> Rotation:
        (table,) = tables
        return table.index_select(1, positions).unsqueeze(2).unbind(0)

    def qkv_into_kv(self, rows: ProjectedRows) -> Tensor:
        """Return `Backend.qkv_into_kv`, with q and k rotated in place by one call if it takes their head size (N21)."""
        if rows.qkv.shape[2] not in rules.ROTARY_PAIR_DIMS:
            return super().qkv_into_kv(rows)
        q, k, v = rows.split()
        q = q.contiguous() if rows.q_norm is None else self.rms_norm(q, rows.q_norm, rows.eps)
        k = k.contiguous() if rows.k_norm is None else self.rms_norm(k, rows.k_norm, rows.eps)
        q, k = torch_npu.npu_apply_rotary_pos_emb(q, k, *rows.rotation, layout="TND")
        self.write_kv(k, v, rows.kv, rows.slot_mapping)
        return q

    def rope(self, x_thd: Tensor, rotation: Rotation) -> Tensor:
        cos, sin = rotation
        return torch_npu.npu_rotary_mul(x_thd.contiguous(), cos, sin)

    def multiplies(self, weight: QuantisedWeight | PackedFp4) -> bool:
        """Return True for int8 with one scale a row, unless an axis is too long for the operator (N41)."""
        by_row = weight.data.dtype == torch.int8 and weight.scales.shape[-1] == 1
        return by_row and weight.dtype == torch.bfloat16 and max(weight.data.shape) <= rules.MAX_AXIS

    def pack_quantised(self, weight: QuantisedWeight) -> QuantisedWeight:
        """Return the weight in NZ, if products by it are right on this device (N44). The scales of experts become
        bfloat16, which the grouped product takes."""
        if (ndim := weight.data.ndim) == 3:
            weight = replace(weight, scales=weight.scales.to(weight.dtype))
        if ndim not in self._rows_in_int8:
            self._rows_in_int8[ndim] = int8_rows.are_right(ndim, self.device)
        if not nz.fits(weight):
            return weight
        if ndim not in self._reads_nz:
            self._reads_nz[ndim] = nz.is_right(self.linear if ndim == 2 else _by_two_experts, ndim, self.device)
        return replace(weight, data=nz.in_nz(weight.data)) if self._reads_nz[ndim] else weight

    def pack_gate_up(self, weight: QuantisedWeight) -> Weight:
        """Return `Backend.pack_gate_up`, with scales in float32 if `moe` may fuse this product with SwiGLU (N45)."""
        packed = super().pack_gate_up(weight)
        if isinstance(packed, Tensor) or torch_npu.get_npu_format(packed.data) != rules.NZ:
            return packed
        if packed.data.shape[1] > rules.MAX_GATED_AXIS:
            return packed
        if self._fuses_swiglu is None:
            self._fuses_swiglu = int8_rows.swiglu_is_right(_grouped, self.device)
        return replace(packed, scales=weight.scales.float()) if self._fuses_swiglu else packed

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """Return `Backend.linear`. With a quantised weight, x is in int8 with a scale for each row."""
        if isinstance(weight, Tensor):
            return super().linear(x, weight, bias)
        x = int8_rows.quantised(x)
        return torch_npu.npu_quant_matmul(
            x.data,
            weight.data.t(),
            weight.scales.flatten(),
            pertoken_scale=x.scales,
            bias=bias,
            output_dtype=weight.dtype,
        )

    def gated_mlp(self, x: Rows, gate_up: Weight, down: Weight) -> Tensor:
        return self.linear(torch_npu.npu_swiglu(self.linear(x, gate_up)), down)

    def empty_experts(self, like: Tensor, num_experts: int, out_features: int, in_features: int) -> Tensor:
        """Return memory of [E, in, out], seen as [E, out, in], because `npu_grouped_matmul` reads that order (N35)."""
        return like.new_empty(num_experts, in_features, out_features).transpose(1, 2)

    def moe(self, x: Rows, weights: ExpertWeights, config: MoeConfig) -> Tensor:
        """Return `Backend.moe`. The rows of each expert are counted on the device, so a graph can hold it.

        A row of NaN is given experts that exist, because others may fault the device (N33). Its sum is still NaN.
        """
        x = plain(x)
        weights_of_row, chosen, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(
            router_logits(x, weights).nan_to_num(), k=config.num_experts_per_tok, renorm=int(config.norm_topk_prob)
        )
        in_int8 = isinstance(weights.gate_up, QuantisedWeight) and self._rows_in_int8.get(3, False)
        rows, origins, counts = int8_rows.sort(x, chosen, config.num_experts, in_int8=in_int8)
        out = _grouped(_gated(rows, weights, config, counts), weights.down, weights.down_bias, counts)
        return torch_npu.npu_moe_token_unpermute(out, origins, probs=weights_of_row.to(out.dtype))

    def commit_and_verify(self, step: GatedDeltaStep) -> Tensor:
        if step.memory.matrix.dtype == torch.bfloat16:
            return gated_delta.commit_and_verify(step)
        return commit_and_verify(step, gated_delta.l2norm)

    def commit_prompts(self, step: GatedDeltaPrompts) -> Tensor:
        return commit_prompts(step, gated_delta.l2norm)

    def capture(self, run: Callable[[], tuple[Tensor, ...]], metas: list[AttentionMetadata]) -> NpuGraph:
        """Return `Backend.capture`, with the longest KV that the page tables have room for.

        Raises GraphsRefusedError if tiling refuses attention with sinks, which eager code runs: by published tiling a
        graph's workspace of the operator with sinks may have none.
        """
        plans: list[dict[AttentionMask, AttentionPlan]] = [meta.plans for meta in metas]
        run()
        for meta in metas:
            longest = [meta.page_table.shape[1] * meta.page_size] * len(meta.host_seq_lens)
            meta.plans = {mask: replace(plan, host_seq_lens=longest) for mask, plan in meta.plans.items()}
        self._attended = attended = list[Attended]()
        try:
            graph = NpuGraph(run, attended, self._graph_pool)
        except RuntimeError as error:
            if TILING in codes_in(str(error)) and any(call.sinks for call in attended):
                raise GraphsRefusedError(f"attention with sinks is refused in a graph: {error}") from error
            raise
        finally:
            self._attended = None
            for meta, planned in zip(metas, plans, strict=True):
                meta.plans = planned
        self._graph_pool = graph.pool
        return graph

    def explain(self, error: BaseException) -> str | None:
        return explain(str(error))

    def upload(self, host: Tensor, to: Tensor) -> None:
        """Queue `Backend.upload`. The host waits unless the copy is pinned and non-blocking, both (N24)."""
        to.copy_(host.pin_memory(), non_blocking=True)

    def start_download(self, x: Tensor) -> Callable[[], Tensor]:
        return accelerator.start_download(x, torch_npu.npu)

    def memory(self) -> tuple[int, int]:
        free, total = torch_npu.npu.mem_get_info(self.device)
        return free, total

    def peak_memory(self, run: Callable[[], object]) -> int:
        return accelerator.peak_memory(run, torch_npu.npu)


def _gated(rows: Rows, weights: ExpertWeights, config: MoeConfig, counts: Tensor) -> Rows:
    """Return SwiGLU's rows [R, I] of rows [R, H] as the product by `down` takes them, both sorted by expert."""
    gate_up, bias = weights.gate_up, weights.gate_up_bias
    may_fuse = isinstance(weights.down, QuantisedWeight) and config.swiglu_limit is None and bias is None
    if may_fuse and isinstance(gate_up, QuantisedWeight) and gate_up.scales.dtype == torch.float32:
        return int8_rows.swiglu(rows, gate_up, counts)
    product = _grouped(rows, gate_up, bias, counts)
    if config.swiglu_limit is None:
        return torch_npu.npu_swiglu(product)
    return torch_npu.npu_clipped_swiglu(
        product, alpha=SWIGLU_ALPHA, limit=config.swiglu_limit, bias=1.0, interleaved=False
    )


def _grouped(x: Rows, weight: ExpertWeight, bias: Tensor | None, counts: Tensor) -> Tensor:
    """Return rows [R, in], sorted by expert, times weight [E, out, in] of their expert. `counts` [E] int64 are rows.

    With weights in int8, rows are in int8 with a scale each.
    """
    dtype, row_scales, scales = None, None, None
    if isinstance(weight, QuantisedWeight):
        x, dtype = int8_rows.quantised(x), weight.dtype
        # They are in float32 only before a plain `down`, which SwiGLU's rows in int8 do not suit.
        rows, row_scales, scales, weight = x.data, x.scales, weight.scales.flatten(1).to(dtype), weight.data
    else:
        rows = plain(x)
    assert isinstance(weight, Tensor)
    (out,) = torch_npu.npu_grouped_matmul(
        [rows],
        [weight.transpose(1, 2)],
        bias=None if bias is None else [bias],
        group_list=counts,
        split_item=2,
        group_type=0,
        group_list_type=1,
        scale=None if scales is None else [scales],
        per_token_scale=None if row_scales is None else [row_scales],
        output_dtype=dtype,
    )
    return out


def _by_two_experts(rows: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return rows [R, in] times weight [2, out, in], plus bias [2, out]: the first row's expert is 0, the others' 1."""
    return _grouped(rows, weight, bias, torch.tensor([1, len(rows) - 1]).to(rows.device))
