"""Backend on CUDA GPUs that gives a row the same bits in every batch (`--batch-invariant`).

Each product has tiles of one size and one split of K for a weight. Attention has tiles of one size for all rows, also
for those of prompts, and adds chunks of a fixed size of a sequence's tokens, from the first one on. Tokens that a row
does not see add exact zeros. Norms and rotations are by row. The draft has the same operators, although only the
target's bits decide a token.
"""

from torch import Tensor

from app.engine.cuda import products
from app.engine.cuda.backend import CudaBackend
from app.engine.quantised import Weight


class InvariantCudaBackend(CudaBackend):
    """Backend whose launches follow from a weight or from the heads, never from the rows."""

    batch_invariant = True

    def pack_weight(self, *parts: Tensor) -> Tensor:
        """Return `Backend.pack_weight`. Raises UnsupportedError for a weight whose columns are no whole tiles."""
        weight = super().pack_weight(*parts)
        products.product_of(weight, self.multiprocessors)
        return weight

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return products.linear(x, weight, bias, self.multiprocessors)
