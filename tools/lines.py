"""Python lines by room: `python -m tools.lines [--since COMMIT]`. It reports and never judges.

A room is a folder with Python files. Blank lines and docstrings count.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.config.error import ConfigError
from tools.parts import ToolParser

ROOT = Path(__file__).parents[1]
HOUSES = ("app", "tools", "tests")


def rooms(root: Path) -> dict[str, int]:
    """Return room -> lines, of every house in turn."""
    lines: Counter[str] = Counter()
    for house in HOUSES:
        for path in sorted((root / house).rglob("*.py")):
            room = path.parent.relative_to(root).as_posix()
            lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(lines)


def changes(root: Path, commit: str) -> dict[str, tuple[int, int]]:
    """Return room -> lines (added, removed) in tracked files since a commit. Raises ConfigError for an unknown one."""
    diff = ["git", "-C", str(root), "diff", "--numstat", "--no-renames", "--end-of-options", commit, "--"]
    done = subprocess.run([*diff, *(f"{house}/**.py" for house in HOUSES)], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"--since {commit}: {done.stderr.strip()}", "give a commit, a tag or a branch")
    added: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    for line in done.stdout.splitlines():
        more, fewer, path = line.split("\t")
        room = Path(path).parent.as_posix()
        added[room] += int(more)
        removed[room] += int(fewer)
    return {room: (added[room], removed[room]) for room in sorted(added, key=_by_house)}


def _by_house(room: str) -> tuple[int, str]:
    return HOUSES.index(room.partition("/")[0]), room


def table(lines: Mapping[str, int]) -> str:
    """Return a line for each room, and the sum of each house."""
    shown = [*lines.items(), *((f"{house} in all", _sum(lines, house)) for house in HOUSES)]
    return "\n".join(f"{name:24} {number:7,}" for name, number in shown)


def table_of_changes(changed: Mapping[str, tuple[int, int]]) -> str:
    """Return a line for each room with what was added, removed, and by how much it grew, and the sum of each house."""
    added, removed = ({room: pair[i] for room, pair in changed.items()} for i in (0, 1))
    sums = {f"{house} in all": (_sum(added, house), _sum(removed, house)) for house in HOUSES}
    return "\n".join(
        f"{name:24} {more:+7,} {-fewer:8,} {more - fewer:+8,}" for name, (more, fewer) in (dict(changed) | sums).items()
    )


def _sum(lines: Mapping[str, int], house: str) -> int:
    return sum(number for room, number in lines.items() if room.split("/")[0] == house)


def main(arguments: Sequence[str]) -> int:
    parser = ToolParser(prog="python -m tools.lines", description=__doc__)
    parser.add_argument("--since", metavar="COMMIT", help="what changed by room since then, in tracked files")
    commit = parser.parse_args(arguments).since
    try:
        print(table_of_changes(changes(ROOT, commit)) if commit else table(rooms(ROOT)))
    except ConfigError as error:
        return error.show()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
