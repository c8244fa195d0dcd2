"""A CPU engine finds its free memory, on the machine and in a container."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from app.engine.device import host_memory
from app.engine.device.factory import make_backend

SIZES = {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 100, "SC_PHYS_PAGES": 2_000_000}
MEMINFO = "MemTotal:        8000000 kB\nMemFree:          100000 kB\nMemAvailable:    6000000 kB\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With nothing that says anything yet."""
    monkeypatch.setattr(host_memory, "os", SimpleNamespace(sysconf=SIZES.get))
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    return tmp_path


def test_what_linux_keeps_files_in_is_free(folder: Path) -> None:
    (folder / "meminfo").write_text(MEMINFO)
    assert make_backend("cpu").memory() == (6_000_000 << 10, 2_000_000 * 4096)


@pytest.mark.parametrize("said", [None, "MemFree:          100000 kB\n"])
def test_where_nothing_says_what_is_available_unused_memory_is_free(folder: Path, said: str | None) -> None:
    if said is not None:
        (folder / "meminfo").write_text(said)
    assert host_memory.host_memory() == (100 * 4096, 2_000_000 * 4096)


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("1000000000", 300_000_000, (900_000_000, 1_000_000_000)),
        ("1000000000", 1_300_000_000, (0, 1_000_000_000)),
        ("9000000000", 300_000_000, (6_000_000 << 10, 2_000_000 * 4096)),
        ("max", 300_000_000, (6_000_000 << 10, 2_000_000 * 4096)),
    ],
)
def test_a_container_has_what_its_limit_leaves(folder: Path, limit: str, used: int, expected: tuple[int, int]) -> None:
    (folder / "meminfo").write_text(MEMINFO)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("anon 100\ninactive_file 200000000\nactive_file 5\n")
    assert host_memory.host_memory() == expected
