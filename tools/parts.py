"""The command lines of tools, and of those that have parts: `python -m tools.TOOL PART ...`."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from app.config.error import ConfigError, nearest
from app.config.parser import Parser


class ToolParser(Parser):
    """Parser that ends the process after a mistake, which it prints."""

    def error(self, message: str) -> NoReturn:
        try:
            super().error(message)
        except ConfigError as error:
            sys.exit(error.show())

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        try:
            return super().parse_args(args, namespace)
        except ConfigError as error:
            sys.exit(error.show())


def choose(tool: str, parts: Mapping[str, str], arguments: Sequence[str]) -> str | int:
    """Return the part that `arguments` begin with, or an exit code after a list of the parts.

    `parts` maps a name to its line of help.
    """
    width = max(map(len, parts)) + 2
    lines = [f"usage: python -m {tool} PART ...", "", "parts:"]
    lines += [f"  {name:<{width}}{text}" for name, text in parts.items()]
    lines += ["", f"`python -m {tool} PART --help` lists the flags of a part"]
    part = next(iter(arguments), "")
    if part in ("-h", "--help"):
        print(*lines, sep="\n")
        return 0
    if not part:
        print(*lines, sep="\n", file=sys.stderr)
        return 2
    if part not in parts:
        near = nearest(part, parts)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(parts)}"
        return ConfigError(f"python -m {tool}: there is no part {part}", hint).show()
    return part
