"""`dflash-server bench PART ...`."""

import importlib
import sys
from collections.abc import Sequence

PARTS = {
    "widths": "what `--verify auto` is worth against plain decoding and whole blocks",
}

USAGE = "usage: dflash-server bench PART ...\n\nparts:\n" + "".join(f"  {k:<12}{v}\n" for k, v in PARTS.items())


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] not in PARTS:
        print(f"dflash-server bench: no part {arguments[0]}\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    part = importlib.import_module(f"app.bench.{arguments[0].replace('-', '_')}")
    return int(part.main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
