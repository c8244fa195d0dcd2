"""`python -m tools.bench [PART] ...`; without a part it is `http`."""

import importlib
import sys
from collections.abc import Sequence

PARTS = {
    "http": "servers against one another over HTTP, by turns: the default part",
    "eval": "accuracy and acceptance length with and without drafts, on GSM8K or the demo's own problems",
}
USAGE = (
    "usage: python -m tools.bench [PART] ...\n\nparts:\n"
    + "".join(f"  {name:<6}{text}\n" for name, text in PARTS.items())
    + "\n`python -m tools.bench PART --help` lists the flags of a part\n"
)


def main(arguments: Sequence[str]) -> int:
    if list(arguments) in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if not arguments or arguments[0].startswith("-"):
        arguments = ["http", *arguments]
    part, *rest = arguments
    if part not in PARTS:
        print(f"python -m tools.bench: no part {part}\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    module = importlib.import_module(f"tools.bench.{part}")
    return int(module.main(rest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
