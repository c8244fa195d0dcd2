"""`python -m tools.lab PART ...`: measurements of this server's own code, from a source tree."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tools.bench.command import guarded
from tools.lab import cpu, llama_cpp, step
from tools.parts import choose


class Part(NamedTuple):
    """A part of the laboratory. `bench` takes the options and the arguments that they were parsed from."""

    help: str
    parser: Callable[[], argparse.ArgumentParser]
    bench: Callable[[argparse.Namespace, Sequence[str]], int]


PARTS = {
    "step": Part("the cost of a decode step and of its parts, by sequences and by context", step.parser, step.bench),
    "cpu": Part("the engine on a CPU, against Transformers' `generate`", cpu.parser, cpu.bench),
    "llama_cpp": Part(
        "llama.cpp's server, built from source, and this one, interleaved over HTTP on a CPU",
        llama_cpp.parser,
        llama_cpp.bench,
    ),
}


def main(arguments: Sequence[str]) -> int:
    name = choose("tools.lab", {name: part.help for name, part in PARTS.items()}, arguments)
    if isinstance(name, int):
        return name
    part, rest = PARTS[name], arguments[1:]
    options = part.parser().parse_args(rest)
    return guarded(lambda: part.bench(options, rest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
