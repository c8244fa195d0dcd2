"""Check of the prose in docstrings and comments, by the rules of "Prose" in docs/DESIGN.md.

python -m tools.prose          print each finding in a folder of CLEAN; exit with 1 if there is one
python -m tools.prose --all    print the number of findings in each folder, and exit with 0
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("app", "tools")
LEFT_OUT = "tools/demo_pair/corpus"
CLEAN = ("app/api", "app/bench", "app/client", "app/config", "app/demo", "app/doctor", "app/text", "tools")
"""Folders that `make check` holds to the rules, with the folders below them. This list only grows."""

BANNED = re.compile(r"\b(nobody|somebody|whoever|who leaves|what waits)\b", re.IGNORECASE)
OPENING = re.compile(r"(What|Whether|Of|How)\b")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every string that is a statement: docstrings, and those below a constant or a field."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def findings(source: str) -> list[tuple[int, str]]:
    """Return (line, complaint) for each banned word, and for each docstring with a banned opening."""
    strings, found = list(docstrings(source)), []
    for line, text in [*strings, *comments(source)]:
        # A term can be broken by the end of a line.
        found += [(line, f"name the thing instead of {word!r}") for word in BANNED.findall(" ".join(text.split()))]
    for line, text in strings:
        if opening := OPENING.match(text.strip()):
            found.append((line, f"begin with a verb or a noun, not with {opening[0]!r}"))
    return sorted(found)


def main(arguments: list[str]) -> int:
    counting = "--all" in arguments
    counts: Counter[str] = Counter()
    for path in sorted(path for source in SOURCES for path in (ROOT / source).rglob("*.py")):
        name, folder = path.relative_to(ROOT).as_posix(), path.parent.relative_to(ROOT).as_posix()
        held = any(name.startswith(f"{clean}/") for clean in CLEAN)
        if name.startswith(LEFT_OUT) or not (counting or held):
            continue
        found = findings(path.read_text(encoding="utf-8"))
        counts[folder] += len(found)
        for line, complaint in () if counting else found:
            print(f"{name}:{line}: {complaint}")
    for folder, count in sorted(counts.items()) if counting else ():
        print(f"{count:4} {folder}")
    return 0 if counting or not counts.total() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
