"""Experts of one layer, read into their fused place one tensor after the other."""

from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from app.engine.checkpoint.shapes import MoeConfig
from app.engine.device.base import ExpertWeights
from app.engine.models.weights import LayerSource, Part, local_part
from app.engine.quantised import FP4_BLOCK, ExpertWeight, PackedFp4, QuantisedWeight, Weight, packed_fp4


def load_experts(layer: LayerSource, moe: MoeConfig) -> ExpertWeights:
    """Return a layer's router and experts, stored one by one, all in `experts.gate_up_proj`, or in mxfp4.

    Each tensor is copied and dropped before the next is read. So a load takes at most one tensor more than its result.
    Each rank has a slice of each expert: rows of its gate and up, and columns of its down. The router is whole.
    """
    count, inner, hidden, layout = moe.num_experts, moe.intermediate_size, layer.config.hidden_size, layer.experts
    router = layer.get(f"mlp.{layout.router}.weight", count, hidden)
    gate_up_blocks = (2 * inner,) if layout.interleaved else (inner, inner)
    fused_names = [layer.name(f"mlp.experts.gate_up_proj{end}") for end in ("_blocks", "")]
    if not any(name in layer.weights for name in fused_names):
        gate_up = _one_by_one(layer, count, ("gate", "up"), inner, hidden, 0, router)
        return ExpertWeights(router.float(), gate_up, _one_by_one(layer, count, ("down",), hidden, inner, 1, router))
    gate_up_shape, down_shape = (count, 2 * inner, hidden), (count, hidden, inner)
    gate_up: ExpertWeight
    down: ExpertWeight
    if fused_names[0] in layer.weights:
        gate_up = _mxfp4(layer, "gate_up_proj", router, gate_up_shape, 1, gate_up_blocks)
        down = _mxfp4(layer, "down_proj", router, down_shape, 2)
    else:
        gate_up = layer.backend.empty_experts(router, *gate_up_shape)
        down = layer.backend.empty_experts(router, *down_shape)
        _copy_rows(gate_up, _fused(layer, "gate_up_proj", gate_up_shape, 1, gate_up_blocks), gate_up_blocks)
        down.copy_(_fused(layer, "down_proj", down_shape, 2))
    router = router.float()
    if not moe.has_bias:
        return ExpertWeights(router, gate_up, down)
    stored = layer.get("mlp.experts.gate_up_proj_bias", count, 2 * inner, split=1, blocks=gate_up_blocks)
    gate_up_bias = torch.empty_like(stored)
    _copy_rows(gate_up_bias, stored, gate_up_blocks)
    return ExpertWeights(
        router,
        gate_up,
        down,
        layer.get(f"mlp.{layout.router}.bias", count).float(),
        gate_up_bias.float(),
        layer.get_summed("mlp.experts.down_proj_bias", count, hidden).float(),
    )


def _one_by_one(
    layer: LayerSource, count: int, names: tuple[str, ...], rows: int, columns: int, split: int, like: Tensor
) -> Weight:
    """Return experts [E, out, in] with the rows of `names` one after the other, quantised if all are in one format that
    the device multiplies by."""
    backend, shape = layer.backend, (count, len(names) * rows, columns)

    def read(expert: int, name: str) -> Weight:
        return layer.linear(f"mlp.experts.{expert}.{name}_proj.weight", rows, columns, split=split)

    first = read(0, names[0])
    is_quantised = isinstance(first, QuantisedWeight)
    if isinstance(first, QuantisedWeight) and backend.multiplies(first):
        scales = first.scales.new_empty(*shape[:2], first.scales.shape[1])
        whole: Weight = QuantisedWeight(backend.empty_experts(first.data, *shape), scales, first.dtype)
    else:
        whole = backend.empty_experts(like, *shape)
    del first
    for expert, (i, name) in product(range(count), enumerate(names)):
        one = read(expert, name)
        at = expert, slice(i * rows, (i + 1) * rows)
        if isinstance(whole, QuantisedWeight):
            if isinstance(one, QuantisedWeight) and (one.data.dtype, one.group) == (whole.data.dtype, whole.group):
                whole.data[at], whole.scales[at] = one.data, one.scales
                continue
            whole = backend.empty_experts(like, *shape).copy_(whole.dequantised())
        whole[at] = one if isinstance(one, Tensor) else one.dequantised()
    if isinstance(whole, QuantisedWeight):
        return backend.pack_gate_up(whole) if len(names) == 2 else backend.pack_linear(whole)
    if is_quantised:
        backend.count_widened(whole)
    return whole


def _fused(layer: LayerSource, name: str, shape: tuple[int, ...], split: int, blocks: tuple[int, ...] = ()) -> Tensor:
    """Return the tensor of all experts as [E, out, in], which is `shape`."""
    name = f"mlp.experts.{name}"
    if not layer.experts.input_first:
        return layer.get(name, *shape, split=split, blocks=blocks)
    count, out_features, in_features = shape
    return layer.get(name, count, in_features, out_features, split=3 - split, blocks=blocks).transpose(1, 2)


def _mxfp4(
    layer: LayerSource, name: str, like: Tensor, shape: tuple[int, ...], split: int, blocks: tuple[int, ...] = ()
) -> ExpertWeight:
    """Return experts [E, out, in], which is `shape`, of blocks in that order: packed if the device multiplies by them
    so, and else widened to the dtype of `like`.

    A rank's columns may begin or end inside of a block, which is then read whole.
    """
    count, out_features, in_features = shape
    comm, backend = layer.comm, layer.backend
    columns = range(in_features) if split == 1 else comm.part(in_features * comm.size)
    local_blocks = range(columns.start // FP4_BLOCK, -(-columns.stop // FP4_BLOCK))

    def read(kind: str, *rest: int) -> Tensor:
        stored, in_bytes = layer.name(f"mlp.experts.{name}_{kind}"), partial(layer.weights.get, dtype=torch.uint8)
        if split == 1 or comm.size == 1:
            return local_part(in_bytes, stored, (count, out_features, len(local_blocks), *rest), comm, split, blocks)
        whole = -(-in_features * comm.size // FP4_BLOCK)
        return in_bytes(stored, count, out_features, whole, *rest, part=Part(2, (local_blocks,)))

    numbers, stored_scales = read("blocks", FP4_BLOCK // 2), read("scales")
    data = torch.empty_like(numbers).flatten(2)
    scales = torch.empty_like(stored_scales.mT, memory_format=torch.contiguous_format)  # as kernels read them
    _copy_rows(scales.mT, stored_scales, blocks)
    for expert in range(count):
        at = slice(expert, expert + 1)
        _copy_rows(data[at], packed_fp4(numbers[at]), blocks)
    del numbers
    whole = PackedFp4(data, scales, like.dtype, columns.start - local_blocks.start * FP4_BLOCK, in_features)
    if backend.multiplies(whole):
        backend.quantised_bytes += whole.nbytes
        return whole
    wide = backend.empty_experts(like, *shape)
    for expert in range(count):
        at = slice(expert, expert + 1)
        wide[at] = replace(whole, data=data[at], scales=scales[at]).dequantised()
    backend.count_widened(wide)
    return wide


def _copy_rows(to: Tensor, stored: Tensor, blocks: tuple[int, ...]) -> None:
    """Copy [E, out, ...]. If gate and up are one block, its even rows are the gate's and its odd ones up's."""
    if len(blocks) != 1:
        to.copy_(stored)
        return
    gate, up = to.chunk(2, dim=1)
    gate.copy_(stored[:, ::2])
    up.copy_(stored[:, 1::2])
