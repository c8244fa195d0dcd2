"""The pictures of `step`. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from app.bench.plots import COLOURS, DPI, WIDTH_OF_ONE, legend, panels_of
from tools.lab.step_report import Found, Series


def write(path: Path, title: str, group: Sequence[Series], found: Found) -> None:
    """Whole steps, the part that the host has in them, and, where it is known, their matrix products."""
    figure, (panel,) = panels_of([group[0].held], width=WIDTH_OF_ONE)
    for some in group:
        measured = [found[shape] for shape in some.shapes]
        lines = {
            some.kind: ("o-", [step.ms for step in measured]),
            f"{some.kind}: matrix products": (":", [median(step.products) for step in measured if step.products]),
            f"{some.kind}: schedule, build, commit": (
                "--",
                [step.middle(lambda split: split.host) for step in measured],
            ),
        }
        sizes = [some.size(shape) for shape in some.shapes]
        for label, (style, times) in lines.items():
            if times:
                panel.plot(sizes, times, style, color=COLOURS[some.drafts], markersize=3, label=label)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    sizes = sorted({some.size(shape) for some in group for shape in some.shapes})
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.minorticks_off()
    panel.set_xlabel("sequences" if group[0].axis == "batch" else "tokens of context")
    panel.set_ylabel("ms a step")
    legend(figure, [panel], across=2)
    figure.suptitle(title, fontweight="bold")
    figure.savefig(path, dpi=DPI)
