"""Quantised weights on disk: Qwen's FP8 in blocks, FP8 and int8 by row of compressed-tensors, msModelSlim's W8A8, and
gpt-oss's mxfp4.

A linear X has `X.weight` in int8 or float8_e4m3fn, and its scales in one of SCALES. These tensors decide whether it is
quantised, and no list of names does.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.engine.checkpoint.fields import MOST, Raw, fields, file_below, only
from app.engine.errors import UnsupportedError

DTYPES = ("I8", "F8_E4M3")
"""Dtypes of numbers that have scales, as safetensors names them."""
SCALES = ("weight_scale_inv", "weight_scale", "deq_scale")
COMPANIONS = (*SCALES, "weight_offset", "input_scale", "input_offset")
"""Tensors of a quantised linear next to its weight and biases. All scales are factors, `weight_scale_inv` too."""
MXFP4_PARTS = ("blocks", "scales")
"""Ends of the names of a weight's two tensors in mxfp4."""
BLOCK = (128, 128)
"""Rows and columns of a scale of FP8 in blocks, unless config.json says otherwise."""
_TYPES = ("FLOAT", "W8A8", "W8A8_DYNAMIC", "W8A8_MIX", "W8A16")
"""Types of msModelSlim's description. Activations of W8A8 are always quantised by row here."""
_REFUSED = {
    "g_idx": "GPTQ",
    "qweight|qzeros|scales": "AWQ or GPTQ",
    "weight_packed|weight_shape|weight_g_idx|weight_zero_point": "compressed-tensors of 4 bits",
    r"(nested_)?(absmax|quant_map)|quant_state\.\w+|SCB": "bitsandbytes",
    "weight_scale_2|weight_global_scale|input_global_scale": "NVFP4",
    "div.mul_scale|left_trans|right_trans|clip_ratio|heads_rotation|kronecker_rotation_[mn]": "online transforms",
    "kv_cache_(scale|offset)": "a quantised KV cache",
    r"(input|post_attention)_layernorm\.bias": "msModelSlim with biases of norms",
}
"""Ends of tensors' names that tell a format that is not read, the surest first."""
OTHER_PARTS = ("visual.", "mtp.")
"""Tensors of the vision tower and of the checkpoint's MTP layers, which text does not need."""


def refuse_formats(folder: Path, dtypes: Mapping[str, str], description: Raw) -> None:
    """Raise UnsupportedError for weights of another format, or whose scale is missing, by tensors' names and dtypes."""
    dtypes = {name: dtype for name, dtype in dtypes.items() if not name.startswith(OTHER_PARTS)}
    for ends, quantisation in _REFUSED.items():
        if found := min(filter(re.compile(rf"(.+\.)?({ends})").fullmatch, dtypes), default=None):
            which = f"tensor {found} is of weights that are quantised ({quantisation})"
            raise UnsupportedError(f"{folder}: {which}, which are not supported yet; give the model in bfloat16 or FP8")
    for name, kind in description.items():
        if "layers." in name and isinstance(kind, str) and kind not in _TYPES and "mtp." not in name:
            what = f"the description says {kind} of {name}, which is not supported yet"
            raise UnsupportedError(f"{folder}: {what}; supported: {', '.join(_TYPES)}")
    for name, dtype in dtypes.items():
        stem, _, end = name.rpartition(".")
        wanted = ["weight", "deq_scale", "input_offset"] if end == "quant_bias" else []
        tensor, _, part = end.rpartition("_")
        if dtype == "U8" and part in MXFP4_PARTS:
            wanted = [f"{tensor}_{other}" for other in MXFP4_PARTS]
        if dtype in DTYPES and end == "weight":
            scale = next((scale for scale in SCALES if f"{stem}.{scale}" in dtypes), "weight_scale")
            wanted = [scale, "input_scale"] if scale == "deq_scale" else [scale]
        elif dtype in DTYPES and end not in COMPANIONS:
            raise UnsupportedError(
                f"{folder}: {name} is {dtype}, and only weights of single linears are read in 8 bits"
            )
        if missing := next((kind for kind in wanted if f"{stem}.{kind}" not in dtypes), None):
            raise UnsupportedError(f"{folder}: {stem}.{missing} is missing, and {name} is {dtype}; download it again")


def check_method(raw: Any, known: tuple[str, ...]) -> None:
    """Raise UnsupportedError for a config.json's `quantization_config` of another method or format."""
    method = raw.get("quant_method") if isinstance(raw, Mapping) else raw
    if method not in known:
        raise UnsupportedError(f"quantization_config.quant_method = {method!r} is not supported yet")
    if method == "fp8":
        only(raw, fmt=("e4m3",))
    if method != "compressed-tensors":
        return
    only(raw, format=("float-quantized", "int-quantized", "naive-quantized"), kv_cache_scheme=())
    for name, group in fields(raw, "config_groups").items():
        weights = fields(group, "weights") if isinstance(group, Mapping) else {}
        try:
            only(weights, num_bits=(8,), symmetric=(True,), strategy=("channel", "tensor", "block"))
        except UnsupportedError as error:
            raise UnsupportedError(f"quantization_config.config_groups.{name}: {error}") from None


def block_size(raw: Raw) -> tuple[int, int]:
    """Return the rows and columns of a scale, by a config.json."""
    method = fields(fields(raw, "text_config"), "quantization_config") or fields(raw, "quantization_config")
    sizes = [method.get("weight_block_size")]
    for group in fields(method, "config_groups").values():
        sizes.append(fields(group, "weights").get("block_structure"))
    for size in filter(None, sizes):
        if not isinstance(size, list) or len(size) != 2 or any(type(n) is not int or not 1 <= n <= MOST for n in size):
            raise UnsupportedError(f"quantization_config: a block has two sizes, at most {MOST}, found {size!r:.200}")
        return size[0], size[1]
    return BLOCK


def rotation_file(folder: Path, description: Raw) -> Path | None:
    """Return the file of the rotation of QuaRot (arXiv 2404.00456) that the target's residual stream has, or None.
    Raises UnsupportedError if it is rotated and the file is missing, or outside of the folder."""
    rotation = fields(fields(fields(description, "optional"), "quarot"), "rotation_map").get("global_rotation")
    if file := file_below(folder, rotation):
        return file
    if rotation or description.get("is_rot_used"):
        raise UnsupportedError(
            f"{folder}: its weights are rotated (QuaRot), and the file of the rotation is missing. No draft can read "
            "its features without it: decode plainly with --no-speculation, or export it with export_extra_info"
        )
    return None
