"""docs/ascend.md says what a step launches."""

from pathlib import Path

import pytest

from tests.npu.launches import table

DOCS = Path(__file__).parents[2] / "docs" / "ascend.md"


@pytest.mark.usefixtures("numerics")
def test_the_table_of_launches_is_what_the_null_device_traces(tmp_path: Path) -> None:
    printed = table(tmp_path)
    assert printed in DOCS.read_text(encoding="utf-8"), f"put this into docs/ascend.md:\n{printed}"
