"""`dflash-server bench [PART] ...`; without a part it is `http`."""

import importlib
import sys
from collections.abc import Sequence

PARTS = {
    "http": "servers against one another over HTTP, by turns: the default part",
    "eval": "accuracy and acceptance length with and without drafts, on GSM8K or the demo's own problems",
}
LABS = ("step", "cpu", "widths", "api")
"""Measurements of this server's own code. The installed package does not have them."""
GPU_REPORT = "gpu-report"
"""An older name of `report --device cuda`."""

USAGE = (
    "usage: dflash-server bench [PART] ...\n\nparts:\n"
    + "".join(f"  {name:<6}{text}\n" for name, text in PARTS.items())
    + "\n`dflash-server bench PART --help` lists the flags of a part\n"
)


def main(arguments: Sequence[str]) -> int:
    if list(arguments) in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if not arguments or arguments[0].startswith("-"):
        arguments = ["http", *arguments]
    part, *rest = arguments
    if part in LABS:
        print(f"dflash-server bench: {part} starts in a source tree with `python -m tools.lab {part}`", file=sys.stderr)
        return 2
    if part == GPU_REPORT:
        return int(importlib.import_module("tools.report.command").main(rest, "cuda"))
    if part not in PARTS:
        print(f"dflash-server bench: no part {part}\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    module = importlib.import_module(f"tools.bench.{part}")
    return int(module.main(rest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
