"""The result as a table, printed and on a page."""

from pathlib import Path
from typing import NamedTuple

BEGIN, END = "<!-- make test-images -->", "<!-- end of make test-images -->"


class Row(NamedTuple):
    """One fact about an image."""

    image: str
    subject: str
    result: str
    seconds: float | None = None


def table(rows: list[Row]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| image | subject | result | seconds |", "|---|---|---|---|"]
    for row in rows:
        seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
        lines.append(f"| {row.image} | {row.subject} | {row.result} | {seconds} |")
    return lines


def into_page(page: Path, command: str, rows: list[Row]) -> None:
    """Replace the part of the page between BEGIN and END with the command and the table."""
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    body = ["", "```console", f"$ {command}", "```", "", *table(rows), ""]
    page.write_text(head + BEGIN + "\n".join(body) + END + tail, encoding="utf-8")
