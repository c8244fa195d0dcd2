"""Backend on CUDA GPUs: kernels in Triton and cuBLAS, and graphs. docs/cuda.md describes each kernel.

Checked in Triton's interpreter and compiled for sm_90; not run on a GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.cuda import experts, gated_delta, integers, prefill, products, rows, timed_launches
from app.engine.cuda import tune as tuning
from app.engine.cuda.attention import TILE_ROWS, Geometry, Tile, geometry, paged_attention
from app.engine.cuda.graph import CudaGraph
from app.engine.cuda.prefill import Ragged
from app.engine.cuda.products import Product
from app.engine.cuda.timed_launches import Questions
from app.engine.cuda.torch_backend import TorchCudaBackend
from app.engine.cuda.tune import Seconds, Way
from app.engine.device.base import (
    AttentionMask,
    AttentionMetadata,
    ContextRows,
    Heads,
    LayerKv,
    ProjectedRows,
    Rotation,
)
from app.engine.device.gated_delta import GatedDeltaStep
from app.engine.device.graph import Graph
from app.engine.device.moe import ExpertWeights, MoeConfig
from app.engine.errors import UnsupportedError

HEAD_DIMS = (16, 32, 64, 128, 256)
FEW_ROWS = 16
"""Rows an expert, on average, up to which our kernel is used: those of its tile, so each weight is read about once."""


class CudaBackend(TorchCudaBackend):
    """Backend with kernels in Triton.

    Groups of at most TILE_ROWS rows a sequence, on average, go through our attention, which reads all lengths on the
    device. Prompts go through PyTorch's, unless `tune` chose ours. On a CPU the kernels run in Triton's interpreter.
    """

    captures = True
    lengths_on_host = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if self.on_gpu else 4
        self._tiles: dict[tuple[bool, int, int], Tile] = {}
        self._products: dict[tuple[int, int, bool, int], Product] = {}
        self._choices: dict[tuple[int, int, int], Product] = {}
        self._prompts: dict[bool, Way] = {}
        self._has_sinks = False
        self._joined: dict[tuple[bool, int, int], set[int]] = {}
        self._chained_rows = False
        self._graph_pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        # PyTorch's default stream for captures is shared, and the end of another engine's graph frees the cuBLAS
        # workspace of that stream.
        self._capture_stream = torch.cuda.Stream(device) if self.on_gpu else None

    def check(self, head_dim: int, block_size: int, page_size: int, dtype: torch.dtype) -> None:
        if head_dim not in HEAD_DIMS:
            raise UnsupportedError(f"head_dim {head_dim}: attention on a GPU takes {', '.join(map(str, HEAD_DIMS))}")
        if block_size > TILE_ROWS:
            raise UnsupportedError(
                f"a block of {block_size} rows: a GPU verifies {TILE_ROWS} at most; "
                f"give --num-speculative-tokens {TILE_ROWS - 1}"
            )

    def pack_sinks(self, sinks: Tensor) -> Tensor:
        self._has_sinks = True
        return super().pack_sinks(sinks)

    def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> Any:
        """Return None for our attention, else the plan of PyTorch's."""
        if sum(meta.query_lens) <= TILE_ROWS * len(meta.query_lens):
            return None
        return self._prompt_plan(meta, mask, self._prompts.get(max(meta.host_seq_lens) > timed_launches.LONG), group)

    def _prompt_plan(self, meta: AttentionMetadata, mask: AttentionMask, way: Way | None, group: int) -> Any:
        if way == timed_launches.OURS:
            return None
        if way == timed_launches.RAGGED and mask.causal and sum(meta.host_seq_lens) <= self.max_gathered_tokens:
            return prefill.ragged(meta, mask.window)
        return super().plan_attention(meta, mask, group)

    def attention(
        self, q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        plan = meta.plans[mask]
        if isinstance(plan, Ragged):
            assert sinks is None, "no other way to read their prompts was timed"
            return prefill.attention(q_thd, kv, plan)
        if plan is not None:
            return super().attention(q_thd, kv, meta, mask, sinks)
        return paged_attention(q_thd, kv, meta, mask, self.geometry(q_thd, kv, meta), sinks)

    def geometry(self, q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata) -> Geometry:
        """Return the shape of the launch. A graph holds that of its capture."""
        kv_heads, dim = kv.k.shape[2:]
        group = q_thd.shape[1] // kv_heads
        kind = max(meta.query_lens) <= 1 and not self.batch_invariant, group, dim
        return geometry(
            meta.query_lens,
            group,
            kv_heads,
            kv.k.dtype,
            self._multiprocessors,
            dim,
            self._tiles.get(kind),
            fixed=self.batch_invariant,
            joined=self._joined.get(kind, ()),
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rows.rms_norm(x, weight, eps, chained=self._chained_rows)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return rows.add_rms_norm(x, residual, weight, eps, chained=self._chained_rows)

    def gated_mlp(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        way = self._product(x, gate_up, gated=True)
        if way is None:
            return self.linear(rows.silu_mul(F.linear(x, gate_up), chained=self._chained_rows), down)
        return self.linear(products.linear(x, gate_up, way, gated=True), down)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        way = self._product(x, weight) if bias is None else None
        return super().linear(x, weight, bias) if way is None else products.linear(x, weight, way)

    def choose(self, hidden: Tensor, lm_head: Tensor, lost: int) -> Tensor | None:
        if not self._choices or not 0 < len(hidden) <= products.MAX_ROWS:
            return None
        way = self._choices.get((*lm_head.shape, products.rows_up_to(len(hidden))))
        return None if way is None else products.choose(hidden, lm_head, way, lost)

    def _product(self, x: Tensor, weight: Tensor, *, gated: bool = False) -> Product | None:
        """Return the way that was chosen for this product, or None for PyTorch's."""
        if not self._products or len(x) > products.MAX_ROWS:
            return None
        return self._products.get((*weight.shape, gated, products.rows_up_to(len(x))))

    def tune(
        self,
        decoders: Sequence[Heads],
        weights: Mapping[str, Sequence[Tensor]],
        max_num_seqs: int,
        page_size: int,
        seconds: Seconds | None = None,
    ) -> dict[str, str]:
        """Choose how attention and products of few rows are launched, in 16 bits; `seconds` is a clock for tests."""
        if seconds is None and not self.on_gpu:
            return {}
        found = self.questions(decoders, weights, max_num_seqs, page_size)
        name = torch.cuda.get_device_name(self.device) if self.on_gpu else "CPU"
        clock = seconds or partial(tuning.seconds_in_a_graph, self.capture_apart)
        chosen = tuning.tune(list(found.values()), clock, name, is_fatal=self.is_fatal)
        shown = dict.fromkeys(chosen, "default")
        for key, question in found.items():
            way = chosen.get(question.name)
            if way is not None and isinstance(key, timed_launches.OfAttention) and key.joining:
                self._joined.setdefault(key[:3], set()).add(key.joining)
                shown[question.name] = "added by the last program"
            elif way is not None and isinstance(key, timed_launches.OfAttention):
                self._tiles[key[:3]] = Tile(*way)
                shown[question.name] = str(Tile(*way))
            elif way is not None and isinstance(key, timed_launches.OfPrompts):
                self._prompts[key.is_long], shown[question.name] = way, timed_launches.PROMPT_WAYS[way]
            elif way is not None and isinstance(key, timed_launches.OfProduct):
                self._products[key] = Product(*way)
                shown[question.name] = str(self._products[key])
            elif way is not None and isinstance(key, timed_launches.OfChoice):
                self._choices[key] = Product(*way)
                shown[question.name] = str(self._choices[key])
            elif way is not None:
                self._chained_rows, shown[question.name] = True, "chained"
        return shown

    def questions(
        self, decoders: Sequence[Heads], weights: Mapping[str, Sequence[Tensor]], max_num_seqs: int, page_size: int
    ) -> Questions:
        """Return the launches that `tune` chooses."""
        found = timed_launches.of_engine(decoders, weights, max_num_seqs, page_size, self._multiprocessors)
        if not found or self._has_sinks:  # `varlen_attn` has no sinks
            return found
        target, (some, *_) = decoders[0], next(iter(weights.values()))
        planned = partial(self._prompt_plan, group=target.num_heads // target.num_kv_heads)
        for is_long in (False, True):
            asked = timed_launches.prompts(target, some, page_size, planned, self.attention, is_long=is_long)
            found[timed_launches.OfPrompts(*target, is_long)] = asked
        return found

    def moe(self, x: Tensor, weights: ExpertWeights, config: MoeConfig) -> Tensor:
        """Return `Backend.moe`. PyTorch's grouped product takes bfloat16 alone, and serves many rows of an expert."""
        num_pairs = len(x) * config.num_experts_per_tok
        if x.dtype == torch.bfloat16 and num_pairs > FEW_ROWS * config.num_experts:
            return super().moe(x, weights, config)
        return experts.mixture(x, weights, config)

    def check_gated_delta(self, num_v_heads: int, k_head_dim: int, v_head_dim: int) -> None:
        if k_head_dim > gated_delta.MAX_K_HEAD_DIM:
            raise UnsupportedError(
                f"linear_key_head_dim {k_head_dim}: a GPU takes {gated_delta.MAX_K_HEAD_DIM} at most"
            )

    def commit_and_verify(self, step: GatedDeltaStep) -> Tensor:
        return gated_delta.commit_and_verify(step)

    def rotation_at(self, tables: Rotation, positions: Tensor) -> Rotation:
        """Return `Backend.rotation_at`. An index by brackets becomes int64 first, in a launch of its own."""
        return tuple(table.index_select(0, positions).unsqueeze(1) for table in tables)

    def qkv_into_kv(self, projected: ProjectedRows) -> Tensor:
        return rows.qkv_into_kv(projected, chained=self._chained_rows)

    def context_into_kv(self, context: ContextRows) -> None:
        rows.context_into_kv(context)

    def embed_blocks(self, anchors: Tensor, mask_token_id: int, block_size: int, embedding: Tensor) -> Tensor:
        return integers.embed_blocks(anchors, mask_token_id, block_size, embedding)

    def positions_and_slots(
        self, seq_ids: Tensor, position_offsets: Tensor, row_numbers: Tensor, page_table: Tensor, page_size: int
    ) -> tuple[Tensor, Tensor]:
        return integers.positions_and_slots(seq_ids, position_offsets, row_numbers, page_table, page_size)

    def verify(
        self,
        choices: Tensor,
        drafts: Tensor | None,
        logits_start: Tensor,
        num_drafts: Tensor,
        draft_index: Tensor,
    ) -> Tensor:
        return integers.verify(choices, drafts, logits_start, num_drafts, draft_index)

    def advance_by_accepted(
        self,
        verified: Tensor,
        prev_row: Tensor,
        token_ids: Tensor,
        anchor_rows: Tensor,
        position_offsets: Tensor,
        seq_lens: Tensor,
    ) -> None:
        integers.advance_by_accepted(verified, prev_row, token_ids, anchor_rows, position_offsets, seq_lens)

    def capture(self, run: Callable[[], tuple[Tensor, ...]], metas: list[AttentionMetadata]) -> Graph:
        if not self.on_gpu:
            return super().capture(run, metas)
        run()
        return CudaGraph(run, self._graph_pool, self._capture_stream)

    def capture_apart(self, run: Callable[[], tuple[Tensor, ...]]) -> CudaGraph:
        """Return a graph of `run` with memory and a stream of its own, for timing. It may be freed before others."""
        run()
        return CudaGraph(run, None, torch.cuda.Stream(self.device))
