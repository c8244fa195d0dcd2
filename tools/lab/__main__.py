"""`python -m tools.lab PART ...`: measurements of this server's own code, from a source tree."""

import importlib
import sys
from collections.abc import Sequence

from tools.bench.command import guarded

PARTS = {
    "step": "the cost of a decode step and of its parts, against sequences and against context",
    "api": "the cost of the way through HTTP by token, the share of a run's CPU time, and start-up",
    "attention": "a CPU's attention of decode steps, against a plain read of K and V",
    "cpu": "the engine on a CPU, against Transformers' `generate` and against matrix products alone",
    "dtypes": "the engine in float32 and in bfloat16 on a CPU, by turns",
    "linear": "products of few rows on a CPU, against a plain read of their weights",
    "llama_cpp": "llama.cpp's server, built from source, and this one, by turns over HTTP on a CPU",
    "loading": "a checkpoint's way into a CPU's memory, against copying its files",
    "ranks": "the host's cost of sending a step to the other ranks of a model",
    "widths": "`--verify auto` against plain decoding and whole blocks",
}
USAGE = (
    "usage: python -m tools.lab PART ...\n\nparts:\n"
    + "".join(f"  {name:<10}{text}\n" for name, text in PARTS.items())
    + "\n`python -m tools.lab PART --help` lists the flags of a part\n"
)


def main(arguments: Sequence[str]) -> int:
    part, *rest = arguments or [""]
    if part in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if part not in PARTS:
        print(f"python -m tools.lab: no part {part}\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    module = importlib.import_module(f"tools.lab.{part}")
    options = module.parser().parse_args(rest)
    return guarded(lambda: int(module.bench(options, rest)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
