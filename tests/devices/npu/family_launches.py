"""Launches of a layer on an NPU, by family of targets. `make npu-launches` prints the table of docs/ascend.md.

A layer's launches are what two layers more add to a plain decode step. Weights are tiny and random, because sizes do
not change the number. The null device counts calls of torch_npu 2.13.0's own host code, without an NPU.
"""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from app.messages import Request
from tests.devices.npu.engines import engine
from tests.devices.npu.null_device import traced
from tests.devices.npu.numerics import Numerics
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.pairs import GPT_OSS, make_pair
from tests.fast.engine.quantised import quantise

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Qwen3, W8A8": {},
    "Llama 3": {"family": "llama"},
    "Qwen2.5": {"family": "qwen2"},
    "Qwen3-MoE": {"experts": 8},
    "Qwen3-MoE, W8A8": {"experts": 8},
    "gpt-oss": GPT_OSS,
    "Qwen3.5, attention": {"more": "full_attention"},
    "Qwen3.5, recurrent": {"more": "linear_attention"},
    "Qwen3.5, recurrent with states in bfloat16": {"more": "linear_attention"},
}
HEAD = "| a layer of | launches |"


def main() -> None:
    """Print Markdown."""
    print(HEAD, "|---|---|", sep="\n")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), Numerics():
        for name in FAMILIES:
            print(row(Path(folder), name))


def row(folder: Path, name: str) -> str:
    """Return the row of a family."""
    few, many = (_launches(folder / f"{name} {layers}", name, layers) for layers in (2, 4))
    count, odd = divmod(sum((many - few).values()), 2)
    assert not odd and few <= many, "layers differ"
    return f"| {name} | {count} |"


def _launches(folder: Path, name: str, num_layers: int) -> Counter[str]:
    """Return the launches of a decode step of two sequences, by operator."""
    folder.mkdir()
    shape: dict[str, Any] = {"draft_layers": 1, "taps": (0,), "head_dim": 64}
    sizes: dict[str, Any] = {"max_num_seqs": 2, "kv_cache_memory": 16 << 20, "max_model_len": 256, "draft": None}
    if "more" in FAMILIES[name]:
        kinds = ("linear_attention", "full_attention", *[FAMILIES[name]["more"]] * (num_layers - 2))
        pair = make_hybrid_pair(folder, layer_types=kinds, block_size=8, **shape)
        if name.endswith("bfloat16"):
            sizes["mamba_ssm_cache_dtype"] = "bfloat16"
    else:
        pair = make_pair(folder, num_layers=num_layers, **shape, **FAMILIES[name])
    if name.endswith("W8A8"):
        pair = replace(pair, target=quantise(pair.target, folder, "W8A8 dynamic")[0])
    core = engine(pair, enforce_eager=True, **sizes)
    for i in range(2):
        core.add(Request(f"r{i}", tuple(range(1, 20 + i)), max_tokens=20))
    while core.step().stats.kind != "decode":
        pass
    with traced() as trace:
        core.step()
    return Counter(trace.launches)


if __name__ == "__main__":
    main()
