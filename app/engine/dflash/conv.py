"""DFlash2's layers: a convolution over two rows of a block stands before and after attention and MLP."""

from collections.abc import Callable

from torch import Tensor, nn

from app.engine.device.base import LayerKv
from app.engine.models.layers import DecoderLayer, StepRows, frozen
from app.engine.models.weights import LayerSource
from app.engine.quantised import Rows, plain


class BlockConv(nn.Module):
    """Convolution whose kernels depend on the row, with one for each channel and a change for each group of them.

    Output p of side s is (b[s, 0] + c_p[s, 0]) z_p + (b[s, 1] + c_p[s, 1]) z_{p-1}. For both sides c is a projection of
    the row's normed input. Nothing crosses a block, and context never passes.
    """

    def __init__(self, layer: LayerSource, name: str, group: int) -> None:
        super().__init__()
        hidden, self._backend = layer.config.hidden_size, layer.backend
        self.base = frozen(layer.get(f"{name}.base_kernel", 2, 2, hidden).unflatten(-1, (-1, group)))
        rows = layer.get(f"{name}.kernel_projection.weight", 4 * hidden // group, hidden)
        self.projection = frozen(self._backend.pack_weight(rows))

    def around(self, part: Callable[[Tensor], Tensor], normed: Tensor, width: int) -> Tensor:
        """Return side 1 of `part` of side 0 of normed rows [T, H], in blocks of `width` rows."""
        change = self._backend.linear(normed, self.projection).view(-1, width, 2, 2, self.base.shape[2], 1)
        return self._backend.convolve(part, normed, self.base, change)


class ConvolvedLayer(DecoderLayer):
    """Decoder layer of a draft whose rows are blocks of one width."""

    def __init__(self, layer: LayerSource, group: int) -> None:
        super().__init__(layer)
        self.input_readers, self.mlp_readers = (), ()  # the convolution reads plain rows
        self.attention_conv = BlockConv(layer, "attention_conv", group)
        self.mlp_conv = BlockConv(layer, "mlp_conv", group)

    def forward(self, normed: Rows, residual: Tensor, rows: StepRows, kv: LayerKv) -> tuple[Tensor, Tensor]:
        width = rows.groups[0].query_lens[0]
        hidden = self.attention_conv.around(lambda x: self.attention.forward(x, rows, kv), plain(normed), width)
        normed, residual = self._backend.add_rms_norm(hidden, residual, self.post_attention_norm, self._eps)
        return self.mlp_conv.around(self._summed_feed_forward, normed, width), residual
