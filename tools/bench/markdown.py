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
BEGIN, END = "<!-- bench -->\n", "<!-- /bench -->\n"


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


def split_page(page: Path) -> tuple[str, str]:
    """Return the text before and after the marks of a Markdown page.

    Raises ConfigError if the page has no marks or cannot be read or written.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--into {page}: {error.strerror or error}", "give a Markdown file") from None
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        hint = f"a line {BEGIN.strip()}, and one {END.strip()}"
        raise ConfigError(f"--into {page}: it has no place for a table", hint)
    if not os.access(page, os.W_OK):
        raise ConfigError(f"--into {page}: it cannot be written", "make it writable")
    return before, after


def write_page(page: Path, paragraphs: Sequence[str]) -> None:
    """Replace the text between the marks of a Markdown page."""
    before, after = split_page(page)
    text = "\n\n".join(paragraphs)
    page.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{after}", encoding="utf-8")
