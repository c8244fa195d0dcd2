"""Launches of a decode step on an NPU. `make npu-launches` prints the table of docs/ascend.md.

The target has 36 layers and the draft 5, like Qwen3-8B and its draft. Weights are tiny and random, because sizes do not
change the number of launches. The null device counts calls of torch_npu 2.13.0's own host code, without an NPU.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

import app.engine.build.engine as build
from app.engine.core import EngineCore
from app.engine_config import EngineConfig
from app.messages import Request, SamplingParams
from tests.devices.npu.null_device import Trace, traced
from tests.devices.npu.numerics import Numerics
from tests.fast.engine.pairs import Pair, make_pair

LAYERS, DRAFT_LAYERS = 36, 5
FUSED = {
    "norm": 1,
    "QKV projection": 1,
    "norm of q and k, RoPE, K/V write": 1,
    "attention": 1,
    "output projection": 1,
    "residual and norm": 1,
    "gate and up projection": 1,
    "SwiGLU": 1,
    "down projection": 1,
}
"""The fewest launches of a layer. npu_qkv_rms_norm_rope_cache would replace six launches by one."""


SHAPE = {"head_dim": 64, "num_heads": 2, "num_kv_heads": 1, "taps": (1, 9, 17, 25, 33), "block_size": 16}


HEAD = f"| a decode step, {LAYERS} + {DRAFT_LAYERS} layers | operators | graphs | updates | copies | waits |"
_ALL = LAYERS + DRAFT_LAYERS
FEWEST = f"The fewest that fused operators allow: {len(FUSED)} a layer, {len(FUSED) * _ALL} for {_ALL} layers."
EXPERTS = "experts, "
"""Prefix of a way whose target has experts in all of its layers."""
WAYS = ("plain, eager", "plain, graphs", "DFlash, eager", "DFlash, graphs", "experts, eager", "experts, graphs")


def main() -> None:
    """Print Markdown, and the fewest launches below it."""
    print(HEAD, "|---" * 6 + "|", sep="\n")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), Numerics():
        for way in WAYS:
            print(rows(Path(folder), way))
    print("", FEWEST, sep="\n")


def rows(folder: Path, way: str) -> str:
    """Return the rows of a greedy step and of a drawn one."""
    experts = 8 if way.startswith(EXPERTS) else 0
    pair = make_pair(folder, num_layers=LAYERS, draft_layers=DRAFT_LAYERS, experts=experts, **SHAPE)
    draft = {"draft": None} if way.startswith("plain") else {}
    core = engine(pair, enforce_eager=way.endswith("eager"), **draft)
    return "\n".join(row(core, way, temperature) for temperature in (0.0, 0.7))


def row(core: EngineCore, way: str, temperature: float) -> str:
    trace = decode_step(core, temperature)
    cells = [len(trace.of(kind)) for kind in ("launch", "replay", "update", "copy")] + [len(trace.waits)]
    return f"| {way}, {'drawn' if temperature else 'greedy'} | " + " | ".join(map(str, cells)) + " |"


def engine(pair: Pair, **config: Any) -> EngineCore:
    sizes = {"max_num_seqs": 4, "kv_cache_memory": 64 << 20, "max_model_len": 256, "max_graphs": 2}
    wishes = {"target": pair.target, "draft": pair.draft, "device": "npu:0", "dtype": "bfloat16"}
    return build.build_engine(EngineConfig(**wishes | sizes | config)).core


def decode_step(core: EngineCore, temperature: float) -> Trace:
    """Return the trace of a step in which four sequences verify whole blocks."""
    for i in range(4):
        core.add(
            Request(
                f"r{i}",
                tuple(range(1, 20 + i)),
                sampling=SamplingParams(temperature=temperature, seed=i),
                max_tokens=60,
            )
        )
    while core.step().stats.kind != "decode":
        pass
    with traced() as trace:
        core.step()
    for i in range(4):
        core.abort(f"r{i}")
    return trace


if __name__ == "__main__":
    main()
