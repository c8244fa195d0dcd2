"""A whole forward of a dense decoder by one operator (decoder.cpp)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.cpu import linear
from app.engine.cpu.library import operators
from app.engine.device.base import AttentionMetadata, LayerKv, Rotation
from app.engine.quantised import QuantisedWeight, Weight

_UNBOUNDED = (1 << 31) - 1
"""A window of a layer without one."""
_NORMS = (0, 3, 4, 8)
"""Indices of the norms in a layer, which the operator reads in fp32."""
_WEIGHTS = (1, 6, 9, 10)
"""Indices of the products' weights, which may be quantised."""
Layer = tuple[Weight | None, ...]


class Decoder:
    """`device.base.Decode` of layers whose weights are row by row in memory."""

    def __init__(self, layers: Sequence[Layer], norm: Tensor, config: DecoderConfig, taps: tuple[int, ...]) -> None:
        self._kept = [_parts(layer) for layer in layers]
        table = []
        for i, (layer, mask) in enumerate(zip(self._kept, config.masks, strict=True)):
            addresses = [0 if part is None else part.data_ptr() for part in layer]
            table.append([*addresses, mask.window or _UNBOUNDED, mask.causal, taps.index(i) if i in taps else -1])
        self._layers, self._norm = torch.tensor(table), norm.float()
        self._sizes = config.num_heads, config.intermediate_size, config.rms_norm_eps
        self._features = len(taps) * config.hidden_size

    def __call__(
        self, embedded: Tensor, rotation: Rotation, slots: Tensor, groups: list[AttentionMetadata], kv: LayerKv
    ) -> tuple[Tensor, Tensor | None]:
        (meta,) = groups
        hidden = torch.empty_like(embedded)
        features = embedded.new_empty(len(embedded), self._features) if self._features else None
        lengths = meta.query_start_loc, meta.seq_lens, meta.page_table
        turns = torch.view_as_real(rotation[0])
        inputs = embedded, self._layers, *self._sizes, self._norm, turns, slots, *lengths, kv.k, kv.v
        operators(embedded.dtype).decoder(*inputs, hidden, features)
        return hidden, features


def _parts(layer: Layer) -> list[Tensor | None]:
    """Return the tensors of a layer in the operator's order: norms in fp32, then the scales of weights in int8."""
    parts = [weight.data if isinstance(weight, QuantisedWeight) else weight for weight in layer]
    weights = (layer[i] for i in _WEIGHTS)
    scales = (weight.scales if isinstance(weight, QuantisedWeight) else None for weight in weights)
    return [part.float() if part is not None and i in _NORMS else part for i, part in enumerate(parts)] + list(scales)


def is_quantised(layers: Sequence[Layer]) -> bool:
    """Return True if PyTorch multiplies by no weight of the layers, however many rows there are."""
    return all(isinstance(layer[i], QuantisedWeight) for layer in layers for i in _WEIGHTS)


def can_run(layers: Sequence[Layer]) -> bool:
    """Return True if the operator computes the layers' dtype, and their weights lie row by row."""
    dense = [weight for layer in layers for i in _WEIGHTS if isinstance(weight := layer[i], Tensor)]
    return all(linear.operator_for(weight.dtype) and weight.is_contiguous() for weight in dense)
