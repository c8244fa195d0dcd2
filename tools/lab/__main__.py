"""`python -m tools.lab PART ...`: measurements of this server's code, from a source tree."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from app.config.error import ConfigError, nearest
from tools.bench.command import guarded
from tools.lab import cpu, gaps, llama_cpp, products, step


class Part(NamedTuple):
    """A part of the laboratory. `bench` takes the options and the arguments that they were parsed from."""

    help: str
    parser: Callable[[], argparse.ArgumentParser]
    bench: Callable[[argparse.Namespace, Sequence[str]], int]


PARTS = {
    "step": Part("the cost of a decode step and of its parts, by sequences and by context", step.parser, step.bench),
    "cpu": Part("the engine on a CPU, against Transformers' `generate`", cpu.parser, cpu.bench),
    "products": Part(
        "products on a CPU, beside what the machine reads and multiplies", products.parser, products.bench
    ),
    "gaps": Part("how long streams stand still while a long prompt is read", gaps.parser, gaps.bench),
    "llama_cpp": Part(
        "llama.cpp's server, built from source, and this one, interleaved over HTTP on a CPU",
        llama_cpp.parser,
        llama_cpp.bench,
    ),
}


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in PARTS:
        near = nearest(name, PARTS)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(PARTS)}"
        return ConfigError(f"python -m tools.lab: there is no part {name}", hint).show()
    part = PARTS[name]
    options = part.parser().parse_args(rest)
    return guarded(lambda: part.bench(options, rest))


def usage() -> str:
    width = max(map(len, PARTS)) + 2
    lines = ["usage: python -m tools.lab PART ...", "", "parts:"]
    lines += [f"  {name:<{width}}{part.help}" for name, part in PARTS.items()]
    return "\n".join([*lines, "", "`python -m tools.lab PART --help` lists the flags of a part"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
