"""A mixture of experts, read from a config.json in Qwen3's names."""

from collections.abc import Mapping
from typing import Any

from app.engine.device.moe import MoeConfig
from app.engine.errors import UnsupportedError
from app.engine.load.fields import positive

ALIGNMENT = 8
"""Numbers that a row of an expert's weights is a multiple of: 16 bytes in 16 bits, for PyTorch's grouped product."""


def num_experts(raw: Mapping[str, Any], where: str) -> Any:
    """Return the number of experts, or None. Transformers 5 writes it as `num_local_experts`."""
    found = {name: raw[name] for name in ("num_experts", "num_local_experts") if raw.get(name)}
    if len(set(map(repr, found.values()))) > 1:
        told = " and ".join(f"{name} = {value!r}" for name, value in found.items())
        raise UnsupportedError(f"{where}: {told} disagree")
    return next(iter(found.values()), None)


def moe_config(raw: Mapping[str, Any], where: str) -> MoeConfig | None:
    """Return the mixture of experts, or None without one. Raises UnsupportedError for sizes that do not fit."""
    if num_experts(raw, where) is None:
        return None
    count = positive({"num_experts": num_experts(raw, where)}, "num_experts", where)
    num_layers, every = positive(raw, "num_hidden_layers", where), positive(raw, "decoder_sparse_step", where, 1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise UnsupportedError(f"{where}: mlp_only_layers must be a list of numbers, found {dense!r}")
    normed = raw.get("norm_topk_prob", False)
    if type(normed) is not bool:
        raise UnsupportedError(f"{where}: norm_topk_prob must be true or false, found {normed!r}")
    size_field = "moe_intermediate_size" if "moe_intermediate_size" in raw else "intermediate_size"
    moe = MoeConfig(
        num_experts=count,
        num_experts_per_tok=positive(raw, "num_experts_per_tok", where),
        intermediate_size=positive(raw, size_field, where),
        norm_topk_prob=normed,
        dense_layers=tuple(i for i in range(num_layers) if i in dense or (i + 1) % every),
    )
    if moe.num_experts_per_tok > count:
        raise UnsupportedError(f"{where}: num_experts_per_tok {moe.num_experts_per_tok} of {count} experts")
    for field in ("hidden_size", size_field):
        if raw[field] % ALIGNMENT:
            raise UnsupportedError(f"{where}: {field} {raw[field]} is no multiple of {ALIGNMENT}")
    return moe
