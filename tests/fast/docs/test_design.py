"""docs/DESIGN.md counts lines: what it says is so, a few more or less."""

import re
from pathlib import Path

import pytest

from tests import ROOT

PAGE = (ROOT / "docs" / "DESIGN.md").read_text(encoding="utf-8")
MUST_READ = (
    "core scheduler sequence batch kv_cache model_runner stages step_inputs layers "
    "dflash/drafter dflash/model models/qwen3"
).split()
LEFT_OUT = ("bench", "demo", "npu_report", "engine/npu_report")


def lines_of(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_its_counts_of_lines_are_true() -> None:
    said = re.search(r"must-read path.*? about ([\d,]+) lines; what serves.*? about ([\d,]+)\.", PAGE, re.DOTALL)
    assert said is not None
    must_read, serving = (int(number.replace(",", "")) for number in said.groups())
    app = ROOT / "app"
    left_out = [app / name for name in LEFT_OUT]
    serves = [path for path in app.rglob("*.py") if not any(path.is_relative_to(folder) for folder in left_out)]
    assert lines_of([app / "engine" / f"{name}.py" for name in MUST_READ]) == pytest.approx(must_read, rel=0.15)
    assert lines_of(serves) == pytest.approx(serving, rel=0.1)
