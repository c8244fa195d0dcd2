"""docs/ascend.md says what a step launches."""

from pathlib import Path

import pytest

from tests import ROOT
from tests.devices.npu.launches import DRAFT_LAYERS, HEAD, LAYER, LAYERS, WAYS, around, rows

DOCS = ROOT / "docs" / "ascend.md"
MAX_AROUND = 40
"""Tasks of a decode step with drafts that are no layer's."""


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
    for line in printed:
        assert f"|\n{line}\n" in page, f"put this into docs/ascend.md:\n{line}"
    assert f"\n{HEAD}\n" in page and around() in page
    if way.startswith("DFlash,"):
        (decode,) = (line for line in printed if ", decode, greedy |" in line)
        assert int(decode.split("|")[2]) - len(LAYER) * (LAYERS + DRAFT_LAYERS) <= MAX_AROUND
