"""docs/ascend.md says what a layer of each family launches."""

from pathlib import Path

import pytest

from tests import ROOT
from tests.devices.npu.family_launches import FAMILIES, HEAD, row


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_of_families_is_what_the_null_device_traces(tmp_path: Path, name: str) -> None:
    printed, page = row(tmp_path, name), (ROOT / "docs" / "ascend.md").read_text(encoding="utf-8")
    assert f"|\n{printed}\n" in page and f"\n{HEAD}\n" in page, f"put this into docs/ascend.md:\n{printed}"
