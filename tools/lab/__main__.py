"""`python -m tools.lab PART ...`: measurements of this server's own code, from a source tree."""

import sys
from collections.abc import Sequence

from tools.bench.command import guarded
from tools.parts import choose

PARTS = {
    "step": "the cost of a decode step and of its parts, against sequences and against context",
    "api": "the cost of the way through HTTP by token, the share of a run's CPU time, and start-up",
    "attention": "a CPU's attention of decode steps, against a plain read of K and V",
    "cpu": "the engine on a CPU, against Transformers' `generate`",
    "dtypes": "the engine in float32, bfloat16 and int8 on a CPU, interleaved",
    "linear": "products of few rows on a CPU, against a plain read of their weights",
    "llama_cpp": "llama.cpp's server, built from source, and this one, interleaved over HTTP on a CPU",
    "loading": "a checkpoint's way into a CPU's memory, against copying its files",
    "ranks": "the host's cost of sending a step to the other ranks of a model",
    "traffic": "tokens a second of traffic that refills, expected of an H200 and an Ascend910B3, with floors",
    "widths": "`--verify auto` against plain decoding and whole blocks",
}


def main(arguments: Sequence[str]) -> int:
    part = choose("tools.lab", PARTS, arguments)
    if isinstance(part, int):
        return part
    options = part.parser().parse_args(arguments[1:])
    return guarded(lambda: int(part.bench(options, arguments[1:])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
