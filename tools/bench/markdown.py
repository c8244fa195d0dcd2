"""Tables of figures: printed as Markdown, written as JSON, put into a page."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from app.config.error import ConfigError

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that have the same columns, and `meaning` to explain them below the title. JSON has them by `name`."""

    name: str
    title: str
    meaning: str
    rows: list[Row]

    def __str__(self) -> str:
        return f"## {self.title}\n\n{self.meaning}\n\n{markdown(self.rows)}\n"


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def describe_host() -> str:
    """Return the CPU, its cores and the torch version in one line, without an import of torch."""
    threads = os.environ.get("OMP_NUM_THREADS")
    limit = f", OMP_NUM_THREADS={threads}" if threads else ""
    return f"{cpu_name()}, {os.cpu_count()} cores{limit}, torch {version('torch')}"


def cpu_name() -> str:
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def split_page(into: str) -> tuple[Path, str, str]:
    """Return the file of `PAGE` or `PAGE#PLACE`, and its text up to and from the marks of that place.

    Raises ConfigError if the page has no such marks or cannot be read or written.
    """
    file, _, place = into.partition("#")
    page, name = Path(file), f"bench {place}".rstrip()
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--into {page}: {error.strerror or error}", "give a Markdown file") from None
    before, begin, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- /{name} -->\n")
    if not begin or not end:
        hint = f"a line <!-- {name} -->, and one <!-- /{name} -->"
        raise ConfigError(f"--into {into}: it has no place for a table", hint)
    if not os.access(page, os.W_OK):
        raise ConfigError(f"--into {page}: it cannot be written", "make it writable")
    return page, before + begin, end + after


def write_page(into: str, paragraphs: Sequence[str]) -> None:
    """Replace the text between the marks of a Markdown page."""
    page, before, after = split_page(into)
    text = "\n\n".join(paragraphs)
    page.write_text(f"{before}\n{text}\n\n{after}", encoding="utf-8")
