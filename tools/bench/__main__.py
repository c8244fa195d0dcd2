"""`python -m tools.bench [PART] ...`; without a part it is `http`."""

import sys
from collections.abc import Sequence

from tools.bench import eval, http, table
from tools.parts import choose

PARTS = {
    "http": "servers compared over HTTP in interleaved rounds: the default part",
    "eval": "accuracy and acceptance length with and without drafts, on published evaluations or the demo's problems",
    "table": "accuracy, acceptance length and speed by tensor parallelism and concurrency, in one table",
}


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["serve"]:  # vLLM's name
        arguments = ["http", *arguments[1:]]
    part = choose("tools.bench", PARTS, arguments, default="http")
    if isinstance(part, int):
        return part
    modules = {"http": http, "eval": eval, "table": table}
    return modules[part].main(arguments[1:] if arguments[:1] and arguments[0] in PARTS else arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
