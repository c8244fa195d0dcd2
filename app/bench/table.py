"""Tables of figures: printed as Markdown, written as JSON, drawn as bars, put into a page."""

import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from app.config.error import ConfigError

Row = dict[str, Any]
BEGIN, END = "<!-- bench -->\n", "<!-- /bench -->\n"


class Bar(NamedTuple):
    panel: str
    label: str
    series: str
    value: float


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that have the same columns. `name` is the PNG's too, and `meaning` stands below the title.

    The picture has a bar for each of the columns `figures` in each row. The templates give its panel, its label on the
    axis and its series, from the row's columns and `{figure}`.
    """

    name: str
    title: str
    meaning: str
    rows: list[Row]
    figures: Sequence[str] = ()
    panel: str = "{text}"
    label: str = "{concurrency}"
    series: str = "{figure}"

    def __str__(self) -> str:
        return f"## {self.title}\n\n{self.meaning}\n\n{markdown(self.rows)}\n"

    @property
    def bars(self) -> list[Bar]:
        found = []
        for row in self.rows:
            for figure in self.figures:
                name = {**row, "figure": figure}
                if (value := first_number(row[figure])) is not None:
                    found.append(
                        Bar(
                            self.panel.format_map(name),
                            self.label.format_map(name),
                            self.series.format_map(name),
                            value,
                        )
                    )
        return found


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def first_number(cell: object) -> float | None:
    """Return 29615 for "29,615", 0.98 for "0.98 (0.91-1.07)" and None for "-"."""
    found = re.match(r"-?[\d,]*\.?\d+", str(cell))
    return float(found[0].replace(",", "")) if found else None


def save(folder: Path, name: str, results: Mapping[str, Any], tables: Sequence[Table]) -> None:
    """Write NAME.json and a PNG of each table. Without matplotlib there is no PNG, and a line says so."""
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1))
    try:
        from app.bench import plots
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print("no pictures: matplotlib is not installed; pip install 'dflash-server[bench]'", file=sys.stderr)
        return
    for table in tables:
        plots.draw(folder / f"{table.name}.png", table)


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
    """Return the text before and behind the marks of a Markdown page.

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
