"""docs/DESIGN.md says how much there is to read, as the import closure of the engine's core counts it."""

import re

import pytest

from tests import ROOT
from tools.lines import figures, table

PAGE = (ROOT / "docs" / "DESIGN.md").read_text(encoding="utf-8")


def test_its_figures_of_lines_are_those_that_the_import_closure_gives() -> None:
    """Within 10 %, so that not every change is a change of the page."""
    rows = re.findall(
        r"^\| (.+) \| ([\d,]+) \|$", PAGE.partition("| code | lines |")[2].partition("\n\n")[0], re.MULTILINE
    )
    stated = {name: int(lines.replace(",", "")) for name, lines in rows}
    assert stated == pytest.approx(figures(), rel=0.1), f"put this into docs/DESIGN.md:\n{table()}"
