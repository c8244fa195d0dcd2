"""`python -m tools.lines`: Python lines by folder against the budgets of pyproject.toml. Exits with 1 if any is over.

`--path` prints the size of a step's path instead, which docs/DESIGN.md quotes.
"""

import ast
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUG_INS = ("engine/cpu", "engine/cuda", "engine/npu")
OFF_THE_PATH: tuple[str, ...] = (
    *("engine/sampling", "engine/device", "engine/load", "engine/faults.py", "engine/schedule/overlap.py"),
    *("engine/step/graphs.py", "engine/schedule/policy.py", "engine/schedule/costs.py"),
)
"""Rooms and files that serve a step and are one hop away from its path."""


def imports(path: Path) -> set[str]:
    """Return the dotted names that a file imports anywhere, also inside functions and for types only."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def closure(start: Path) -> set[Path]:
    """Return the file and every file of app/ that it imports, directly or not."""
    found, waiting = set(), [start]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for name in imports(path):
            stem = ROOT.joinpath(*name.split("."))
            packages = [package / "__init__.py" for package in (stem, *stem.parents) if package.is_relative_to(ROOT)]
            waiting += [file for file in (stem.with_suffix(".py"), *packages) if file.is_file()]
    return {path for path in found if path.is_relative_to(ROOT / "app")}


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def count(paths: set[Path], *, without: tuple[str, ...] = ()) -> int:
    """Return the lines of the files that are in none of the folders of app/ in `without`, and are none of its files."""
    left_out = [ROOT / "app" / name for name in without]
    return sum(lines_of(path) for path in paths if not any(path.is_relative_to(folder) for folder in left_out))


def figures() -> dict[str, int]:
    """Return what is counted -> lines, in the words of docs/DESIGN.md."""
    step = closure(ROOT / "app" / "engine" / "core.py")
    return {
        "the path of a step": count(step, without=(*PLUG_INS, *OFF_THE_PATH)),
        "all that `core.py` imports, without plug-ins": count(step, without=PLUG_INS),
        "`app/`": count(set((ROOT / "app").rglob("*.py"))),
    }


def table() -> str:
    """Return the figures as Markdown."""
    rows = [f"| {name} | {lines:,} |" for name, lines in figures().items()]
    return "\n".join(["| code | lines |", "|---|---|", *rows])


def budgets() -> dict[str, int]:
    """Return folder -> lines."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    table: dict[str, int] = project["tool"]["lines"]
    return table


def spent(root: Path, folders: Sequence[str]) -> dict[str, int]:
    """Return the Python lines of each folder without those of a deeper folder in the list.

    A folder that is not in the list counts towards its nearest parent that is, so no folder escapes.
    """
    lines = dict.fromkeys(folders, 0)
    for path in (root / "app").rglob("*.py"):
        inside = path.relative_to(root).as_posix()
        owner = max((folder for folder in folders if inside.startswith(f"{folder}/")), key=len)
        lines[owner] += lines_of(path)
    return lines


def over(lines: Mapping[str, int], allowed: Mapping[str, int]) -> list[str]:
    """Return the folders that have more lines than allowed."""
    return [folder for folder, number in lines.items() if number > allowed[folder]]


def main() -> int:
    allowed = budgets()
    lines = spent(ROOT, list(allowed))
    exceeded = over(lines, allowed)
    for folder, number in lines.items():
        print(f"{folder:22} {number:6,} of {allowed[folder]:6,}{'  EXCEEDED' if folder in exceeded else ''}")
    print(f"{'in all':22} {sum(lines.values()):6,} of {sum(allowed.values()):6,}")
    return 1 if exceeded else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--path"]:
        print(table())
        sys.exit(0)
    sys.exit(main())
