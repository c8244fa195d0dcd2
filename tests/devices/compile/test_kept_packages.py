"""The folder of `--compile` keeps what is used, loses what is not, and never what another server is at work on."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from app.engine.compile import cache as kept
from app.engine.compile.cache import kept_packages
from app.engine.errors import UnsupportedError

take_torch_folder = kept._take_torch_folder
OLD = time.time() - 2 * kept._AT_WORK_SECONDS


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where temporary files go; the cache is beside it. PyTorch's own folder is left out."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(kept, "_take_torch_folder", lambda: None)
    return folder


def package(folder: Path, name: str, number: int, used: float) -> str:
    path = folder / f"{name}-{number:016x}.pt2"
    path.touch()
    os.utime(path, (used, used))
    return path.name


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_it_is_this_users_alone(tmp_path: Path) -> None:
    (tmp_path / "cache" / "dflash-server" / "compiled").mkdir(parents=True, mode=0o777)
    with kept_packages() as folder:
        assert folder == tmp_path / "cache" / "dflash-server" / "compiled"
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("why", ["a file is in its place", "nobody's home", "another's folder", "another's above it"])
def test_where_it_cannot_be_there_is_a_new_one_for_this_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path, why: str
) -> None:
    if why == "a file is in its place":
        (tmp_path / "cache").touch()
    elif why == "nobody's home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # As where the user has no entry either.
    elif why == "another's above it":
        assert kept._owners_above(temporary) >= {tmp_path.stat().st_uid, Path("/").stat().st_uid}
        monkeypatch.setattr(kept, "_owners_above", lambda folder: {0, os.getuid(), 12345})
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with kept_packages() as folder:
        assert folder.parent == temporary and folder.stat().st_mode & 0o777 == 0o700
        (folder / "target.pt2").touch()
    assert names(temporary) == set()


@pytest.mark.parametrize("planted", ["another's folder", "a link", "a file", "a file that a variable names"])
def test_code_that_another_user_may_have_put_in_torchs_folder_is_never_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path, planted: str
) -> None:
    """Its name is known to anybody who may write in /tmp."""
    monkeypatch.setattr(kept, "_take_torch_folder", take_torch_folder)
    with kept_packages():
        (own,) = temporary.iterdir()
    assert own.name.startswith("torchinductor_") and own.stat().st_mode & 0o777 == 0o700
    if planted == "a link":
        own.rmdir()
        own.symlink_to(tmp_path)
    elif planted == "a file":
        own.rmdir()
        own.touch()
    elif planted == "a file that a variable names":
        (tmp_path / "torchinductor_file").touch()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torchinductor_file"))
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UnsupportedError, match=r"--compile: .*torchinductor_.* Set TMPDIR"), kept_packages():
        pass


def test_of_each_name_those_that_were_used_last_are_kept() -> None:
    with kept_packages() as folder:
        targets = [package(folder, "target", number, OLD - number) for number in range(kept._MOST_OF_A_NAME + 3)]
        drafts = [package(folder, "draft", number, OLD - number) for number in range(3)]
    assert names(folder) == {*targets[: kept._MOST_OF_A_NAME], *drafts}


def test_a_package_counts_as_used_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with kept_packages() as folder:
        path = folder / package(folder, "target", 1, OLD)
    monkeypatch.setattr("importlib.import_module", None)
    with pytest.raises(TypeError):
        kept.load_package(path)
    assert path.stat().st_mtime > OLD + kept._AT_WORK_SECONDS


def test_what_servers_that_are_starting_use_is_left_alone() -> None:
    with kept_packages() as folder:
        recent = {package(folder, "target", number, time.time() - 60) for number in range(3 * kept._MOST_OF_A_NAME)}
        recent.add("target-0123456789abcdef.4711.pt2")
        (folder / "target-0123456789abcdef.4711.pt2").touch()
    assert names(folder) == recent


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path, temporary: Path) -> None:
    with kept_packages() as folder:
        unfinished = folder / "target-0123456789abcdef.4711.pt2"
        unpacked = temporary / "dflash-compiled-abc"
        inside = unpacked / "aotinductor_xyz" / "model.so"
        now = temporary / "dflash-compiled-now"
        others = [folder / "notes.txt", temporary / "dflash-sockets", tmp_path / "elsewhere"]
        inside.parent.mkdir(parents=True)
        for path in (unfinished, inside, now, *others):
            path.touch()
        link = temporary / "dflash-compiled-link"
        link.symlink_to(tmp_path)
        for path in (unfinished, unpacked, link, *others):
            os.utime(path, (OLD, OLD), follow_symlinks=False)
    assert not unfinished.exists() and not unpacked.exists() and not link.is_symlink()
    assert now.exists() and all(path.exists() for path in others)


def test_of_what_belongs_to_other_users_nothing_is_removed(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    theirs = temporary / "dflash-compiled-theirs"
    theirs.mkdir()
    os.utime(theirs, (OLD, OLD))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with kept_packages():
        pass
    assert theirs.exists()


def test_a_folder_that_vanishes_meanwhile_is_no_error() -> None:
    with kept_packages() as folder:
        folder.rmdir()
