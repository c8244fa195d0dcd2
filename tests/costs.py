"""The cost of a test decides when it runs.

`make test` runs the fast tests, which have no marker of FOLDERS. `make test-all` runs all but the slow ones. The folder
gives the marker, and a single costly test in tests/fast carries one itself. The cost is process time, of the worker and
of the children that it waited for. It is put into relation to a fixed loop, so that a busy machine changes little.
"""

import importlib
import os
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from importlib.machinery import ModuleSpec
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
LIMIT = 2.0
"""Seconds of process time. 5,000 fast tests share 480 s, which are four minutes on two cores: 0.1 s for each."""
QUIET = 0.2
"""Seconds of process time that the loop of slowness() takes on a quiet core."""


def marker_of(path: Path, tests: Path) -> str | None:
    """Return the marker of a test file's folder. Raises UsageError for a folder that has no price."""
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


class ImportMeter:
    """Process time spent in imports, which the first test of a process pays for all others."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread = threading.get_ident()
        self._depth = 0
        self._load = importlib._bootstrap._load_unlocked  # type: ignore[attr-defined]
        importlib._bootstrap._load_unlocked = self._measured  # type: ignore[attr-defined]

    def _measured(self, spec: ModuleSpec) -> object:
        if self._depth or threading.get_ident() != self._thread:
            return self._load(spec)
        self._depth, before = 1, process_seconds()
        try:
            return self._load(spec)
        finally:
            self._depth = 0
            self.seconds += process_seconds() - before


def fast_ones(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Return parameters of a costly test: those in `fast` stay fast, and the others run with the exhaustive tests."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def process_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def slowness() -> float:
    """Return how many times slower than QUIET a fixed loop runs now, 1 or more.

    Processor time grows, up to twice, where other processes share the core's caches or its other thread.
    """
    before = time.process_time()
    for number in range(5_000_000):
        number * number
    return max(1.0, (time.process_time() - before) / QUIET)


IMPORTS = ImportMeter()


@pytest.fixture(autouse=True)
def cost(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a fast test that is not fast, or that loads Transformers.

    Fixtures of modules and sessions are set up before those of functions, and autouse ones come first among these: the
    test pays for itself and its own fixtures alone, so its place in the order does not matter.
    """
    loaded = "transformers" in sys.modules
    before = process_seconds() - IMPORTS.seconds
    yield
    if not is_fast(request.node):
        return
    seconds = process_seconds() - IMPORTS.seconds - before
    if seconds > LIMIT and (seconds := seconds / slowness()) > LIMIT:
        pytest.fail(f"{seconds:.1f} s of process time, and fast tests have {LIMIT:g} s: mark it exhaustive")
    if not loaded and "transformers" in sys.modules:
        pytest.fail("a fast test loads Transformers: read tests/golden, or mark it exhaustive")
