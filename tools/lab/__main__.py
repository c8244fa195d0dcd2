"""`python -m tools.lab PART ...`: measurements of this server's code, from a source tree."""

import sys
from collections.abc import Sequence

from app.config.error import ConfigError, nearest
from tools.bench.command import guarded, out_folder
from tools.lab import cpu, gaps, llama_cpp, products, step

PARTS = {"step": step, "cpu": cpu, "products": products, "gaps": gaps, "llama_cpp": llama_cpp}
"""Modules with a `parser`, and a `bench` of its options and of the arguments that they were parsed from."""


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

    def bench() -> int:
        out_folder(options)
        return part.bench(options, rest)

    return guarded(bench)


def usage() -> str:
    width = max(map(len, PARTS)) + 2
    lines = ["usage: python -m tools.lab PART ...", "", "parts:"]
    lines += [f"  {name:<{width}}{(part.__doc__ or '').partition(':')[0]}" for name, part in PARTS.items()]
    return "\n".join([*lines, "", "`python -m tools.lab PART --help` lists the flags of a part"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
