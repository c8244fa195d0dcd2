"""Run a model on an NPU with every operator call held to docs/npu-contract.md, eagerly and slowly.

    python -m tools.npu_contract --target FOLDER [--draft FOLDER] [--device npu:0] [--sequences 4] [--tokens 64]

Prompts are random token ids, and the engine runs in this process. A wrong call ends it with an error that names the
rule.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from app.config.engine import EngineConfig
from app.engine.load.engine import build_engine
from app.messages import Request
from tools.npu_contract.check import Checked
from tools.parts import ToolParser

LONGEST_PROMPT = 300


def main(argv: Sequence[str] | None = None) -> int:
    parser = ToolParser(prog="python -m tools.npu_contract", description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--device", default="npu:0")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--kv-cache-memory", type=int, help="bytes")
    options = parser.parse_args(argv)
    wishes = {"device": options.device, "max_num_seqs": options.sequences, "kv_cache_memory": options.kv_cache_memory}
    config = EngineConfig(options.target, options.draft, enforce_eager=True, tune="off", **wishes)
    with torch.inference_mode(), Checked() as checked:
        core = build_engine(config).core
        draw, vocab = Random(0), core.runner.forward.target.config.vocab_size
        prompts = [draw.choices(range(vocab), k=draw.randint(1, LONGEST_PROMPT)) for _ in range(options.sequences)]
        core.run([Request(f"r{i}", tuple(ids), max_tokens=options.tokens) for i, ids in enumerate(prompts)])
    print(f"{checked.calls} operator calls kept the rules of docs/npu-contract.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
