"""Lines of code that a reader meets: `python -m tools.lines` prints the figures of docs/DESIGN.md."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUG_INS = ("engine/cpu", "engine/cuda", "engine/npu", "engine/compile")
OFF_THE_PATH = (
    *("engine/sampling", "engine/device", "engine/load", "engine/faults.py", "engine/schedule/overlap.py"),
    *("engine/step/graphs.py", "engine/schedule/policy.py", "engine/schedule/costs.py"),
)
"""Rooms and files that serve a step and are one hop away from its path."""


def imports(path: Path) -> set[str]:
    """Return the dotted names that a file imports anywhere, also inside functions and for types alone."""
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


def count(paths: set[Path], *, without: tuple[str, ...] = ()) -> int:
    """Return the lines of the files that lie in none of the folders of app/ in `without`, and are none of its files."""
    left_out = [ROOT / "app" / name for name in without]
    kept = [path for path in paths if not any(path.is_relative_to(folder) for folder in left_out)]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in kept)


def figures() -> dict[str, int]:
    """Return what is counted -> lines, in the words of docs/DESIGN.md."""
    whole, step = set((ROOT / "app").rglob("*.py")), closure(ROOT / "app" / "engine" / "core.py")
    return {
        "the path of a step": count(step, without=(*PLUG_INS, *OFF_THE_PATH)),
        "all that `core.py` imports, without plug-ins": count(step, without=PLUG_INS),
        "`app/` without plug-ins and check": count(whole, without=(*PLUG_INS, "check")),
        "`app/`": count(whole),
    }


def table() -> str:
    """Return the figures as Markdown."""
    rows = [f"| {name} | {lines:,} |" for name, lines in figures().items()]
    return "\n".join(["| code | lines |", "|---|---|", *rows])


if __name__ == "__main__":
    print(table())
