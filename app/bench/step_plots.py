"""The picture of `bench step`. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from app.bench.plots import COLOURS, DPI, legend, panels_of
from app.bench.step_report import Found, Series


def write(path: Path, all_series: Sequence[Series], found: Found) -> None:
    """A panel for each axis and what it is held at; in each, whole steps and the part that the host has in them."""
    groups: dict[str, list[Series]] = {}
    for some in all_series:
        groups.setdefault(f"against {some.axis}, {some.held}", []).append(some)
    figure, panels = panels_of(list(groups))
    for panel, group in zip(panels, groups.values(), strict=True):
        for some in group:
            sizes = [some.size(shape) for shape in some.shapes]
            colour = COLOURS[some.drafts]
            panel.plot(sizes, [found[s].ms for s in some.shapes], "o-", color=colour, markersize=3, label=some.kind)
            hosts = [found[s].middle(lambda split: split.host) for s in some.shapes]
            label = f"{some.kind}: schedule, build, commit"
            panel.plot(sizes, hosts, "o--", color=colour, markersize=2, linewidth=1, label=label)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        sizes = sorted({some.size(shape) for some in group for shape in some.shapes})
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.minorticks_off()
        panel.set_xlabel("sequences" if group[0].axis == "batch" else "tokens of context")
        panel.set_ylabel("ms a step")
    legend(figure, panels)
    figure.suptitle("Cost of a decode step", fontweight="bold")
    figure.savefig(path, dpi=DPI)
