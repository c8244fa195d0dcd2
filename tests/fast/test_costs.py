"""The folder of a test gives its marker, and each folder has one."""

import pytest

from tests import ROOT
from tests.costs import MARKERS, marker_of

TESTS = ROOT / "tests"


@pytest.mark.parametrize(
    ("path", "marker"),
    [
        ("fast/api/test_x.py", None),
        ("devices/npu/test_x.py", "npu"),
        ("exhaustive/test_x.py", "exhaustive"),
        ("soak/test_x.py", "soak"),
    ],
)
def test_the_folder_gives_the_marker(path: str, marker: str | None) -> None:
    assert marker_of(TESTS / path, TESTS) == marker
    assert marker is None or marker in MARKERS


@pytest.mark.parametrize("path", ["test_x.py", "fastest/test_x.py", "devices/test_x.py"])
def test_a_folder_without_a_price_is_refused(path: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"tests/costs\.py"):
        marker_of(TESTS / path, TESTS)
