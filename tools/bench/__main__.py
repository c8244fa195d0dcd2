"""`python -m tools.bench`. The name of its only part, `http`, or vLLM's, `serve`, may come before the flags."""

import sys
from collections.abc import Sequence

from tools.bench import http


def main(arguments: Sequence[str]) -> int:
    return http.main(arguments[1:] if arguments and arguments[0] in ("http", "serve") else arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
