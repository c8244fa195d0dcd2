"""The command line of a tool that has parts: `python -m tools.TOOL [PART] ...`."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType


def choose(tool: str, parts: Mapping[str, str], arguments: Sequence[str], default: str = "") -> ModuleType | int:
    """Return the module of the part that `arguments` begin with, or an exit code after a list of the parts.

    `parts` maps a name to its line of help. Without a part it is `default`; without that it is an error.
    """
    width = max(map(len, parts)) + 2
    lines = [f"usage: python -m {tool} {'[PART]' if default else 'PART'} ...", "", "parts:"]
    lines += [f"  {name:<{width}}{text}" for name, text in parts.items()]
    lines += ["", f"`python -m {tool} PART --help` lists the flags of a part"]
    part = next(iter(arguments), default)
    if part in ("-h", "--help"):
        print(*lines, sep="\n")
        return 0
    part = default if default and part.startswith("-") else part
    if part not in parts:
        print(f"python -m {tool}: no part {part}\n", *lines, sep="\n", file=sys.stderr)
        return 2
    return importlib.import_module(f"{tool}.{part}")
