"""Settings of all tests: Hypothesis draws the same examples everywhere, without a time limit."""

import contextlib
import fcntl
import sys

import pytest

from tests.costs import no_transformers, pytest_collection_modifyitems

__all__ = ["no_transformers", "pytest_collection_modifyitems"]

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
def compiled_operators(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have g++ compile the CPU's own operators before the first test, once for all processes of pytest-xdist."""
    if "torch" in sys.modules:
        from app.engine.cpu import linear

        with (tmp_path_factory.getbasetemp().parent / "compiling").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for dtype in linear.DTYPES:
                linear.operator_for(dtype)
