"""Rows of figures as text."""

from collections.abc import Mapping, Sequence


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """A table of rows that have the same columns."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
