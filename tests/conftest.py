"""Settings of all tests: Hypothesis draws the same examples everywhere, without a time limit, and costs are guarded."""

import contextlib
import sys

import pytest

from tests.costs import cost, pytest_collection_modifyitems

__all__ = ["cost", "pytest_collection_modifyitems"]

with contextlib.suppress(ModuleNotFoundError):  # the NPU's environment goes without
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "dflash",
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("dflash")


@pytest.fixture(scope="session", autouse=True)
def compiled_operators() -> None:
    """Have g++ compile the CPU's own operators before the first test, which would pay for it."""
    if "torch" in sys.modules:
        from app.engine.cpu import linear

        linear.own(sys.modules["torch"].float32)
