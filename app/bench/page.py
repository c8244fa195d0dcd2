"""A table of a bench in a Markdown page that people read: `dflash-server bench --into README.md`."""

import os
from collections.abc import Sequence
from pathlib import Path

from app.bench import report
from app.bench.machine import describe_host
from app.config.settings import ConfigError

BEGIN, END = "<!-- bench -->\n", "<!-- /bench -->\n"


def check(page: Path) -> None:
    """Raises ConfigError, before anything is measured, if there is no place for a table in the page."""
    _parts(page)
    if not os.access(page, os.W_OK):
        raise ConfigError(f"--into {page}: it cannot be written", "make it writable")


def write(page: Path, cells: Sequence[report.Cell], command: str) -> None:
    """The speeds of `cells` between the page's marks, with the command, the machine, and what a reader must know."""
    before, after = _parts(page)
    speed, *_ = report.tables(cells, {})
    parts = [f"`{command}` ({describe_host()}):", report.markdown(speed.rows)]
    if notes := report.notes(cells):
        parts.append("\n".join(f"- {note}" for note in notes))
    told = "\n\n".join(parts)
    page.write_text(f"{before}{BEGIN}\n{told}\n\n{END}{after}", encoding="utf-8")


def _parts(page: Path) -> tuple[str, str]:
    """What stands before the marks, and behind them."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--into {page}: {error.strerror or error}", "give a Markdown file") from None
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise ConfigError(
            f"--into {page}: it has no place for a table", f"a line {BEGIN.strip()}, and one {END.strip()}"
        )
    return before, after
