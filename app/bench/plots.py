"""Pictures of tables as bars. Needs matplotlib, which no other module imports."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from app.bench.table import Bar, Table

COLOURS = ("#8c8c8c", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""The palette of Okabe and Ito, which colour-blind readers can tell apart. The first series is grey."""
PANELS_ACROSS = 3
DPI = 150


def draw(path: Path, table: Table) -> None:
    """Write a PNG with a panel for each of the table's panels."""
    bars = table.bars
    names = list(dict.fromkeys(bar.panel for bar in bars))
    series = list(dict.fromkeys(bar.series for bar in bars))
    across = min(PANELS_ACROSS, len(names))
    down = math.ceil(len(names) / across)
    figure = Figure(figsize=(3.0 + 4.2 * across, 0.9 + 3.2 * down), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for panel, name in zip(panels, names, strict=False):
        panel.set_title(name, fontsize="medium")
        _draw_panel(panel, [bar for bar in bars if bar.panel == name], series)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    handles = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle(table.title, fontweight="bold")
    figure.savefig(path, dpi=DPI)


def _draw_panel(panel: Axes, bars: list[Bar], all_series: list[str]) -> None:
    """Draw the series side by side over each label."""
    labels = list(dict.fromkeys(bar.label for bar in bars))
    present = [name for name in all_series if any(bar.series == name for bar in bars)]
    width = 0.8 / len(present)
    for index, name in enumerate(present):
        heights = {bar.label: bar.value for bar in bars if bar.series == name}
        middles = [labels.index(label) + (index - (len(present) - 1) / 2) * width for label in heights]
        colour = COLOURS[all_series.index(name) % len(COLOURS)]
        panel.bar(middles, list(heights.values()), width * 0.92, color=colour, label=name)
    panel.set_xticks(range(len(labels)), labels, fontsize="x-small")
    panel.grid(axis="y", color="#e5e5e5")
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
