"""A folder of a module's own for compiled packages."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that what a module compiles is kept in."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield cache / "dflash-server" / "compiled"
