"""A checkpoint's folder again with its linears quantised, and its dense twin, dequantised in fp64."""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from app.engine.device.base import ExpertWeights
from app.engine.device.recurrent import GatedDeltaWeights
from app.engine.quantised import PackedFp4, QuantisedWeight

Tensors = dict[str, Tensor]
E4M3 = torch.float8_e4m3fn
LINEARS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj in_proj_qkv in_proj_z in_proj_qkvz out_proj".split()
BLOCK = (48, 20)
"""Rows and columns of a block, neither of which divides any size of the pairs."""


def per_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 and fp64 scales [out, 1]."""
    scales = (weight.abs().amax(1, keepdim=True) / 127).float().double()
    return (weight / scales).round().clamp(-127, 127).to(torch.int8), scales


def fp8_blocks(stem: str, weight: Tensor, scale_dtype: torch.dtype, name: str) -> tuple[Tensors, Tensor]:
    out, size = weight.shape
    rows, columns = (-(-n // block) for n, block in zip(weight.shape, BLOCK, strict=True))
    scales = torch.rand(rows, columns, dtype=torch.float64) * 0.01 + 0.002
    scales = scales.to(scale_dtype)
    wide = scales.double().repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[:out, :size]
    data = (weight / wide).clamp(-448, 448).to(E4M3)
    return {f"{stem}.weight": data, f"{stem}.{name}": scales}, data.double() * wide


def fp8_rows(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    data = (weight / scales.double()).to(E4M3)
    return {f"{stem}.weight": data, f"{stem}.weight_scale": scales}, data.double() * scales.double()


def fp8_tensor(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = (weight.abs().amax() / 448).float()
    data = (weight / scale.double()).to(E4M3)
    stored = {f"{stem}.weight": data, f"{stem}.weight_scale": scale, f"{stem}.input_scale": torch.tensor(0.5)}
    return stored, data.double() * scale.double()


def int8_rows(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    data, scales = per_row(weight)
    return {f"{stem}.weight": data, f"{stem}.weight_scale": scales.float()}, data.double() * scales


def dynamic(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    stored, dense = int8_rows(stem, weight)
    return stored | {f"{stem}.weight_offset": torch.zeros(len(weight), 1)}, dense


def static(stem: str, weight: Tensor, bias: Tensor | None, as_bits: bool) -> tuple[Tensors, Tensor]:
    """`deq_scale` in fp32, or its bits in int64. With a bias, `quant_bias` holds it."""
    data, scales = per_row(weight)
    input_scale, input_offset = torch.tensor([0.03125]), torch.tensor([-7.0])
    deq_scale = (scales.flatten().float() * input_scale).float()
    held = torch.zeros(len(weight)) if bias is None else bias.double() / deq_scale.double()
    quant_bias = held.round() - input_offset.double() * data.double().sum(1)
    stored = {
        f"{stem}.weight": data,
        f"{stem}.deq_scale": deq_scale.view(torch.int32).to(torch.int64) if as_bits else deq_scale,
        f"{stem}.quant_bias": quant_bias.to(torch.int32),
        f"{stem}.input_scale": input_scale,
        f"{stem}.input_offset": input_offset,
    }
    return stored, data.double() * (deq_scale.double() / input_scale.double())[:, None]


def mixed(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """Query and down in plain numbers, k and v quantised."""
    if stem.endswith(("q_proj", "down_proj")):
        return {f"{stem}.weight": weight.float()}, weight
    return dynamic(stem, weight)


Quantise = Callable[[str, Tensor], tuple[Tensors, Tensor]]
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
GROUP = {"weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}, "targets": ["Linear"]}
COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}
FORMATS: dict[str, tuple[Quantise, dict[str, Any] | None]] = {
    "fp8 in blocks": (lambda s, w: fp8_blocks(s, w, torch.bfloat16, "weight_scale_inv"), FP8),
    "fp8 in blocks, fp32 scales": (lambda s, w: fp8_blocks(s, w, torch.float32, "weight_scale_inv"), FP8),
    "fp8 by row": (fp8_rows, COMPRESSED | {"format": "float-quantized"}),
    "fp8 by tensor": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "int8 by row": (int8_rows, COMPRESSED | {"format": "int-quantized"}),
    "W8A8 dynamic": (dynamic, None),
    "W8A8 static": (lambda s, w: static(s, w, None, as_bits=False), None),
    "W8A8 static, int64": (lambda s, w: static(s, w, None, as_bits=True), None),
    "W8A8 mix": (lambda s, w: (dynamic(s, w)[0] | static(s, w, None, as_bits=False)[0], dynamic(s, w)[1]), None),
    "some layers plain": (mixed, None),
}


def is_linear(name: str) -> bool:
    return name.endswith(tuple(f".{linear}.weight" for linear in LINEARS)) and "visual" not in name


def quantise(folder: Path, to: Path, how: str) -> tuple[Path, Path]:
    """Return the folder quantised, and its dense twin."""
    (one, method), stored = FORMATS[how], {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    torch.manual_seed(1)
    quantised: Tensors = {}
    dense: Tensors = {}
    for name, tensor in sorted(stored.items()):
        quantised[name] = dense[name] = tensor
        if is_linear(name) and tensor.ndim == 2:
            parts, twin = one(name.removesuffix(".weight"), tensor.double())
            quantised.pop(name)
            quantised |= parts
            dense[name] = twin.float()
    return _written(folder, to / "quantised", quantised, method), _written(folder, to / "dense", dense, None)


def _written(folder: Path, to: Path, tensors: Tensors, method: dict[str, Any] | None) -> Path:
    to.mkdir(parents=True)
    for file in folder.iterdir():
        if "safetensors" not in file.name:
            shutil.copy(file, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | ({"quantization_config": method} if method else {})))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, to / "model.safetensors")
    return to


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of all weights that a model holds, each counted once. What a recurrent layer makes of its own
    (`GatedDeltaWeights.of`) is left out: 165 kB a layer of a 27B, of 1.1 GB."""
    found: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found[value.data_ptr()] = value.nbytes
        elif isinstance(value, GatedDeltaWeights):
            add(value[:3])
        elif isinstance(value, tuple | dict):
            for part in value.values() if isinstance(value, dict) else value:
                add(part)
        elif isinstance(value, QuantisedWeight | PackedFp4 | ExpertWeights):
            add(tuple(getattr(value, field.name) for field in fields(value)))

    for module in model.modules():
        add(vars(module))
    return sum(found.values())
