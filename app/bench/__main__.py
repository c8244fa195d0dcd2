"""`dflash-server bench [PART] ...`; where no part is named, it is `http`."""

import importlib
import sys
from collections.abc import Sequence

PARTS = {
    "http": "servers against one another over HTTP, by turns: the part that is meant where none is named",
    "eval": "accuracy and acceptance length with and without drafts, on GSM8K or the demo's own problems",
    "step": "what a decode step costs and where the time goes, against sequences and against context",
    "api": "what the way through HTTP costs a token, start-up, and the share of a run's CPU time",
    "cpu": "what the engine makes of a CPU, against Transformers' `generate` and against matrix products alone",
    "widths": "what `--verify auto` is worth against plain decoding and whole blocks",
    "gpu-report": "everything that only a GPU can tell about the CUDA backend: kernels, graphs, speed beside its floor",
}

USAGE = (
    "usage: dflash-server bench [PART] ...\n\nparts:\n"
    + "".join(f"  {k:<12}{v}\n" for k, v in PARTS.items())
    + "\n`dflash-server bench PART --help` lists the flags of a part\n"
)


def main(arguments: Sequence[str]) -> int:
    if list(arguments) in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if not arguments or arguments[0].startswith("-"):
        arguments = ["http", *arguments]
    if arguments[0] not in PARTS:
        print(f"dflash-server bench: no part {arguments[0]}\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    part = importlib.import_module(f"app.bench.{arguments[0].replace('-', '_')}")
    return int(part.main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
