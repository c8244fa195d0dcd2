"""docs/ascend.md says what a step launches."""

from pathlib import Path

import pytest

from tests import ROOT
from tests.devices.npu.launches import FEWEST, HEAD, WAYS, rows

DOCS = ROOT / "docs" / "ascend.md"


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize(
    "way",
    [
        way if way.endswith("graphs") and not way.startswith("plain") else pytest.param(way, marks=pytest.mark.slow)
        for way in WAYS
    ],
)
def test_the_table_of_launches_is_what_the_null_device_traces(tmp_path: Path, way: str) -> None:
    printed, page = rows(tmp_path, way), DOCS.read_text(encoding="utf-8")
    assert f"|\n{printed}\n" in page, f"put this into docs/ascend.md:\n{printed}"
    assert f"\n{HEAD}\n" in page and f"\n{FEWEST}\n" in page
