"""A picture of each table. Needs matplotlib, which nothing else imports."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from app.bench.report import Cell, Table, acceptance_at, percentile

COLOURS = ("#8c8c8c", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which everybody can tell apart; the first variant, which the others are held against, is grey."""
DARK = "#404040"
MOST_ACROSS = 3
DPI = 150
WIDTH_OF_ONE = 7.0
"""Inches of a panel that stands alone, so that its legend has room."""
LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "itl": "inter-token latency (chunks)"}

Series = Mapping[str, Sequence[float]]
"""Variant -> a figure for each pressure, or whatever bars stand over; NaN where there is none."""


def write(folder: Path, cells: Sequence[Cell], tables: Sequence[Table], limits: Mapping[str, float]) -> None:
    """NAME.png for every table."""
    draw: dict[str, Callable[[], Figure]] = {
        "speed": lambda: _speed(cells),
        "acceptance": lambda: _acceptance(cells),
        "positions": lambda: _positions(cells),
        "accuracy": lambda: _accuracy(cells),
        "latency": lambda: _latency(cells),
        "goodput": lambda: _goodput(cells, limits),
    }
    for table in tables:
        figure = draw[table.name]()
        figure.suptitle(table.title, fontweight="bold")
        figure.savefig(folder / f"{table.name}.png", dpi=DPI)


def panels_of(names: Sequence[str], most_across: int = MOST_ACROSS, width: float = 4.2) -> tuple[Figure, list[Axes]]:
    """A panel for each name, which is its title; `width` is a panel's in inches."""
    across = min(most_across, len(names))
    down = math.ceil(len(names) / across)
    figure = Figure(figsize=(0.6 + width * across, 0.9 + 3.2 * down), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for panel, name in zip(panels, names, strict=False):
        panel.set_title(name, fontsize="medium")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e5e5e5")
        panel.set_axisbelow(True)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    return figure, panels[: len(names)]


def legend(figure: Figure, panels: Sequence[Axes], across: int = 6) -> None:
    """One for all panels, below them; what stands for itself has no label."""
    found = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    if found:
        figure.legend(
            list(found.values()), list(found), loc="outside lower center", ncols=min(across, len(found)), frameon=False
        )


def _groups(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    return {text: [cell for cell in cells if cell.text == text] for text in dict.fromkeys(cell.text for cell in cells)}


def _colours(cells: Sequence[Cell]) -> dict[str, str]:
    names = list(dict.fromkeys(name for cell in cells for name in cell.rounds))
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def _bars(panel: Axes, group: Sequence[Cell], series: Series, colours: Mapping[str, str], above: Series) -> None:
    bars(panel, [cell.pressure.label for cell in group], series, colours, above)
    panel.set_xlabel("requests at once" if group[0].pressure.rate is None else "requests arriving")


def bars(
    panel: Axes, labels: Sequence[str], series: Series, colours: Mapping[str, str], above: Series = MappingProxyType({})
) -> None:
    """Bars of `series` side by side over each label; `above` has what is written above them, as times."""
    width = 0.8 / len(series)
    for index, (name, figures) in enumerate(series.items()):
        places = places_of(index, len(series), len(labels))
        panel.bar(places, figures, width * 0.92, color=colours[name], label=name)
        for place, height, times in zip(places, figures, above.get(name, ()), strict=False):
            panel.annotate(
                f"{times:.2f} x",
                (place, height),
                (0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize="x-small",
                rotation=90 if len(series) * len(labels) > 10 else 0,
            )
    panel.margins(y=0.15)
    panel.set_xticks(range(len(labels)), labels)


def places_of(index: int, num_series: int, num_labels: int) -> list[float]:
    """Where the bars of a series stand."""
    return [at + (index - (num_series - 1) / 2) * 0.8 / num_series for at in range(num_labels)]


def _speed(cells: Sequence[Cell]) -> Figure:
    groups, colours = _groups(cells), _colours(cells)
    figure, panels = panels_of(list(groups))
    for panel, group in zip(panels, groups.values(), strict=True):
        first, *others = group[0].rounds
        series = {name: [cell.speed(name) for cell in group] for name in (first, *others)}
        _bars(panel, group, series, colours, {n: [cell.speed_up(n).middle for cell in group] for n in others})
        panel.set_ylabel("output tokens / s")
    legend(figure, panels)
    return figure


def _acceptance(cells: Sequence[Cell]) -> Figure:
    groups, colours = _groups(cells), _colours(cells)
    figure, panels = panels_of(list(groups))
    for panel, group in zip(panels, groups.values(), strict=True):
        lengths = {name: [cell.acceptance_length(name) or math.nan for cell in group] for name in group[0].rounds}
        drafting = {name: found for name, found in lengths.items() if not all(map(math.isnan, found))}
        _bars(panel, group, drafting, colours, {})
        panel.set_ylabel("tokens a step")
    legend(figure, panels)
    return figure


def _positions(cells: Sequence[Cell]) -> Figure:
    colours = _colours(cells)
    found = acceptance_at(cells)
    texts = list(dict.fromkeys(text for text, _ in found))
    figure, panels = panels_of(texts)
    for panel, text in zip(panels, texts, strict=True):
        lines = {name: shares for (of_text, name), shares in found.items() if of_text == text}
        for index, (name, shares) in enumerate(lines.items()):
            # the first is the widest, so that one that coincides with it leaves it visible
            width = 1.5 + 2 * (len(lines) - 1 - index)
            panel.plot(range(1, len(shares) + 1), shares, color=colours[name], linewidth=width, label=name)
        panel.set_ylim(0, 1.03)
        panel.set_xlabel("position in the block")
        panel.set_ylabel("accepted of verified")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure, panels)
    return figure


def _accuracy(cells: Sequence[Cell]) -> Figure:
    groups, colours = _groups([c for c in cells if any(c.accuracy(n) is not None for n in c.rounds)]), _colours(cells)
    figure, panels = panels_of(list(groups))
    for panel, group in zip(panels, groups.values(), strict=True):
        series = {name: [100 * (cell.accuracy(name) or 0.0) for cell in group] for name in group[0].rounds}
        _bars(panel, group, series, colours, {})
        panel.set_ylim(0, 103)
        panel.set_ylabel("% right")
    legend(figure, panels)
    return figure


def _latency(cells: Sequence[Cell]) -> Figure:
    groups, colours = _groups(cells), _colours(cells)
    figure, panels = panels_of([f"{text}: {said}" for text in groups for said in LATENCIES.values()], len(LATENCIES))
    kinds = [(group, kind) for group in groups.values() for kind in LATENCIES]
    for panel, (group, kind) in zip(panels, kinds, strict=True):
        quantiles = {q: _milliseconds(group, kind, q) for q in (50, 90, 99)}
        _bars(panel, group, quantiles[50], colours, {})
        for index, name in enumerate(quantiles[50]):
            places = places_of(index, len(quantiles[50]), len(group))
            labels = ("", "") if index else ("p90", "up to p99")
            panel.plot(places, quantiles[90][name], "o", markersize=3, color=DARK, label=labels[0])
            panel.vlines(places, quantiles[50][name], quantiles[99][name], DARK, linewidth=1, label=labels[1])
        panel.set_ylabel("ms")
    legend(figure, panels)
    return figure


def _milliseconds(group: Sequence[Cell], kind: str, percent: float) -> dict[str, list[float]]:
    def figure(cell: Cell, name: str) -> float:
        times = cell.times(name, kind)
        return 1000 * percentile(times, percent) if times else math.nan

    return {name: [figure(cell, name) for cell in group] for name in group[0].rounds}


def _goodput(cells: Sequence[Cell], limits: Mapping[str, float]) -> Figure:
    groups, colours = _groups(cells), _colours(cells)
    figure, panels = panels_of(list(groups))
    for panel, group in zip(panels, groups.values(), strict=True):
        series = {name: [cell.goodput(name, limits) for cell in group] for name in group[0].rounds}
        _bars(panel, group, series, colours, {})
        panel.set_ylabel("requests / s within all limits")
    legend(figure, panels)
    return figure
