"""Pictures of the tables of one process: what a table says, as bars. Needs matplotlib."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from app.bench.plots import COLOURS, DARK, DPI, WIDTH_OF_ONE, bars, legend, panels_of, places_of
from app.bench.report import Row, Table

WAYS = "plain", "k=1", "full", "auto", "transformers"
_COLOUR_OF = dict(zip(WAYS, COLOURS, strict=False))


def number(cell: object) -> float:
    """What a cell begins with: 29615 of "29,615", 0.98 of "0.98 (0.91-1.07)". NaN of "-"."""
    found = re.match(r"-?[\d,]*\.?\d+", str(cell))
    return float(found[0].replace(",", "")) if found else math.nan


def cpu(path: Path, table: Table) -> None:
    """Tokens a second of every way at each concurrency; a line is its floor."""
    rows = table.rows
    concurrencies = list(dict.fromkeys(row["concurrency"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    figure, (panel,) = panels_of(["whole requests"], width=WIDTH_OF_ONE)
    bars(panel, [str(c) for c in concurrencies], _of_ways(rows, concurrencies, ways, "tok/s"), _COLOUR_OF)
    floors = _of_ways(rows, concurrencies, ways, "floor tok/s")
    for index, way in enumerate(ways):
        places = places_of(index, len(ways), len(concurrencies))
        label = None if index else "matrix products alone"
        panel.plot(places, floors[way], "_", color=DARK, markersize=14, label=label)
    panel.set_yscale("log")
    panel.set_xlabel("requests at once")
    panel.set_ylabel("tokens / s")
    legend(figure, [panel])
    figure.suptitle(table.title, fontweight="bold")
    figure.savefig(path, dpi=DPI)


def _of_ways(
    rows: Sequence[Row], concurrencies: Sequence[int], ways: Sequence[str], column: str
) -> dict[str, list[float]]:
    found = {(row["way"], row["concurrency"]): number(row[column]) for row in rows}
    return {way: [found.get((way, concurrency), math.nan) for concurrency in concurrencies] for way in ways}


def widths(path: Path, table: Table) -> None:
    """Tokens a second of every variant at each concurrency, a panel for each text; above `auto`, times plain."""
    groups: dict[str, list[Row]] = {}
    for row in table.rows:
        groups.setdefault(row["text"], []).append(row)
    figure, panels = panels_of(list(groups), most_across=4)
    for panel, rows in zip(panels, groups.values(), strict=True):
        labels = [str(row["concurrency"]) for row in rows]
        series = {way: [number(row[f"{way} tok/s"]) for row in rows] for way in WAYS if f"{way} tok/s" in rows[0]}
        bars(panel, labels, series, _COLOUR_OF, {"auto": [number(row["auto / plain"]) for row in rows]})
        panel.set_xlabel("requests at once")
        panel.set_ylabel("tokens / s")
    legend(figure, panels)
    figure.suptitle(table.title, fontweight="bold")
    figure.savefig(path, dpi=DPI)


def of_columns(path: Path, table: Table, heads: Sequence[str], columns: Sequence[str]) -> None:
    """A panel for each of `columns`, in which every row has a bar; what a row is of, its `heads` say."""
    labels = ["\n".join(str(row[head]) for head in heads) for row in table.rows]
    figure, panels = panels_of(columns)
    for panel, column in zip(panels, columns, strict=True):
        bars(panel, labels, {column: [number(row[column]) for row in table.rows]}, {column: COLOURS[1]})
        panel.tick_params(axis="x", labelsize="x-small")
        panel.set_xlabel(", ".join(heads))
    figure.suptitle(table.title, fontweight="bold")
    figure.savefig(path, dpi=DPI)
