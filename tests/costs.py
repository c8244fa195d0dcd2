"""The folder of a test decides when it runs.

`make test` runs the fast tests: those in tests/fast without a marker of MARKERS. `make test-rest` runs the others,
except the slow ones, which only `make proof` runs. A folder gives its marker. A test in tests/fast may carry
`exhaustive` or `slow` itself.
"""

import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDERS = {
    "fast": None,
    "devices/cuda": "gpu_interp",
    "devices/npu": "npu",
    "server": "server",
    "clients": "clients",
    "ray": "ray",
    "browser": "browser",
    "deploy": "deploy",
    "exhaustive": "exhaustive",
    "soak": "soak",
}
MARKERS = {marker for marker in FOLDERS.values() if marker} | {"slow"}


def marker_of(path: Path, tests: Path) -> str | None:
    """Return the marker of a test file's folder. Raises UsageError for a folder that FOLDERS does not name."""
    inside = path.relative_to(tests).as_posix()
    for folder, marker in FOLDERS.items():
        if inside.startswith(f"{folder}/"):
            return marker
    raise pytest.UsageError(f"tests/{inside}: its folder is not in tests/costs.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(tests) and (marker := marker_of(item.path, tests)):
            item.add_marker(marker)
        if is_fast(item):
            item.add_marker("fast")


def is_fast(item: pytest.Item) -> bool:
    return not any(mark.name in MARKERS for mark in item.iter_markers())


def fast_ones(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Return the parameters of a fast test. Those that are not in `fast` run with the exhaustive tests."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def landing_ones(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return the parameters of an exhaustive test. Only `make proof` runs those that are not in `kept`."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture(autouse=True)
def no_transformers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a fast test that loads Transformers, whose import takes seconds."""
    loaded = "transformers" in sys.modules
    yield
    if is_fast(request.node) and not loaded and "transformers" in sys.modules:
        pytest.fail("a fast test loads Transformers: read tests/golden, or mark it exhaustive")
