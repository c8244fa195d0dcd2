"""Backend on CUDA GPUs that gives a row the same bits in every batch (`--batch-invariant`).

Each product has tiles of one size and one split of K for a weight. Attention has tiles of one size for all rows, also
for those of prompts. It adds parts of one size of a sequence's tokens, from the first on. Tokens that a row does not
see add exact zeros. Norms and rotations are by row. The draft has the same operators, although only the target's bits
decide a token.

Interpreted and compiled for sm_90; not run on a GPU.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from app.engine.cuda import products, rows
from app.engine.cuda.backend import CudaBackend
from app.engine.cuda.products import Product
from app.engine.cuda.timed_launches import Questions, of_fixed_engine
from app.engine.device.base import AttentionMask, AttentionMetadata, Heads


class InvariantCudaBackend(CudaBackend):
    """Backend whose launches follow from a weight or from the heads, never from the rows."""

    batch_invariant = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._fixed: dict[torch.Size, Product] = {}

    def pack_weight(self, *parts: Tensor) -> Tensor:
        """Return `Backend.pack_weight`. Raises UnsupportedError for a weight that has no fixed way."""
        weight = super().pack_weight(*parts)
        self._way(weight)
        return weight

    def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> Any:
        """Return None, which is our attention."""
        return None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return products.fixed_linear(x, weight, bias, self._way(weight), self._multiprocessors)

    def choose(self, hidden: Tensor, lm_head: Tensor, lost: int) -> Tensor:
        return products.fixed_choose(hidden, lm_head, self._way(lm_head), lost, self._multiprocessors)

    def gated_mlp(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return self.linear(rows.silu_mul(self.linear(x, gate_up), chained=self._chained_rows), down)

    def questions(
        self, decoders: Sequence[Heads], weights: Mapping[str, Sequence[Tensor]], max_num_seqs: int, page_size: int
    ) -> Questions:
        """Return one question for each shape of a weight, and one for each shape of heads, whatever the rows."""
        return of_fixed_engine(decoders, weights, max_num_seqs, page_size, self._multiprocessors)

    def _way(self, weight: Tensor) -> Product:
        timed = self._products.get((*weight.shape, False, products.FIXED_ROWS))
        if timed is None and weight.shape not in self._fixed:
            self._fixed[weight.shape] = products.fixed_way(weight, self._multiprocessors)
        return timed or self._fixed[weight.shape]
