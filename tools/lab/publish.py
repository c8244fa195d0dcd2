"""The beginning and the end of every laboratory: its parser, and its tables, verdicts and JSON."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools.bench.flags import add_out_flag
from tools.bench.markdown import Table, describe_host
from tools.parts import ToolParser


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim, the finding, and if it holds. None means that the rounds cannot tell."""

    claim: str
    holds: bool | None
    found: str

    def __str__(self) -> str:
        word = {True: "met", False: "MISSED", None: "unsettled"}[self.holds]
        return f"{word}: {self.claim} ({self.found})"


def part_parser(part: str, description: str | None) -> ToolParser:
    """Return the parser of a part, with its --out."""
    made = ToolParser(prog=f"python -m tools.lab {part}", description=description)
    add_out_flag(made, f"{part}.json")
    return made


def publish(
    part: str,
    arguments: Sequence[str],
    tables: Sequence[Table],
    folder: Path | None,
    *,
    about: Sequence[str] = (),
    verdicts: Sequence[Verdict] = (),
    **results: Any,
) -> int:
    """Print tables and verdicts, and write them to the folder. Returns 1 if a claim is missed, else 0."""
    machine = f"{describe_host()}, {torch.get_num_threads()} threads"
    print(f"{machine}\n\n" + "".join(f"- {line}\n" for line in about))
    print(*tables, sep="\n")
    print(*(f"- {verdict}" for verdict in verdicts), sep="\n")
    if folder:
        report: dict[str, Any] = {
            "command": shlex.join(["python", "-m", "tools.lab", part, *arguments]),
            "machine": machine,
            "about": list(about),
            "verdicts": [{"claim": v.claim, "holds": v.holds, "found": v.found} for v in verdicts],
            "tables": {table.name: table.rows for table in tables},
        }
        (folder / f"{part}.json").write_text(json.dumps(report | results, indent=1))
    return int(any(verdict.holds is False for verdict in verdicts))
