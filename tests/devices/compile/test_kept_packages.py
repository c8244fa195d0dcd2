"""The folder of `--compile` keeps what is used, loses what is not, and never what another server is at work on."""

import importlib
import os
import shutil
import tempfile
import time
import zipfile
from pathlib import Path

import pytest

from app.engine import cache_folder
from app.engine.compile.cache import compile_cache, load_package

OLD = time.time() - 2 * cache_folder.AT_WORK_SECONDS


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where temporary files go; the cache is beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
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
    with compile_cache() as folder:
        assert folder == tmp_path / "cache" / "dflash-server" / "compiled"
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("why", ["a file is in its place", "no home", "another's folder", "another's above it"])
def test_where_it_cannot_be_there_is_a_new_one_for_this_time(monkeypatch, tmp_path, temporary, why):
    if why == "a file is in its place":
        (tmp_path / "cache").touch()
    elif why == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # Like for a user without an entry.
    elif why == "another's above it":
        assert cache_folder._owners_above(temporary) >= {tmp_path.stat().st_uid, Path("/").stat().st_uid}
        monkeypatch.setattr(cache_folder, "_owners_above", lambda folder: {0, os.getuid(), 12345})
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with compile_cache() as folder:
        assert folder.parent == temporary and folder.stat().st_mode & 0o777 == 0o700
        (folder / "target.pt2").touch()
    assert names(temporary) == set()


def torch_folders() -> set[Path]:
    """Where PyTorch puts code that it compiles, and takes it from."""
    code = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    return {Path(code.cache_dir()), Path(code.default_cache_dir()), Path(os.environ["TMPDIR"])}


@pytest.mark.parametrize("own", [True, False])
def test_pytorch_takes_code_from_a_new_folder_of_this_user_alone(monkeypatch, temporary, own):
    """It takes none from a folder with a known name in /tmp, where any user may write, nor from a variable's folder."""
    planted = torch_folders() if "TMPDIR" in os.environ else set()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(temporary / "planted"))
    if not own:
        monkeypatch.setattr(cache_folder, "own_folder", lambda name: None)
    with compile_cache() as folder:
        found = torch_folders()
        assert all(path.is_relative_to(folder) for path in found) and not found & planted
        (work,) = folder.iterdir()
        assert work.stat().st_mode & 0o777 == folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(temporary / "planted") and tempfile.gettempdir() == str(
        temporary
    )
    assert names(temporary) == set() and not work.exists()


def test_of_each_name_those_that_were_used_last_are_kept() -> None:
    with compile_cache() as folder:
        targets = [package(folder, "target", number, OLD - number) for number in range(cache_folder.MAX_OF_A_NAME + 3)]
        drafts = [package(folder, "draft", number, OLD - number) for number in range(3)]
    assert names(folder) == {*targets[: cache_folder.MAX_OF_A_NAME], *drafts}


def test_a_package_counts_as_used_when_it_is_loaded() -> None:
    with compile_cache() as folder:
        path = folder / package(folder, "target", 1, OLD)
    with pytest.raises(RuntimeError):
        load_package(path)
    assert path.stat().st_mtime > OLD + cache_folder.AT_WORK_SECONDS


@pytest.mark.parametrize("at", ["code", "end", "nothing is left"])
def test_a_damaged_package_is_refused(tmp_path: Path, at: str) -> None:
    path = tmp_path / "target.pt2"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("model.so", b"code" * 1000)
    with pytest.raises(RuntimeError) as whole:  # it has no model
        load_package(path)
    assert "damaged" not in str(whole.value) and "cannot be read" not in str(whole.value)
    data = bytearray(path.read_bytes())
    if at == "code":
        data[2000] ^= 1
    path.write_bytes({"code": data, "end": data[:-30], "nothing is left": b""}[at])
    with pytest.raises(RuntimeError, match="is damaged: model.so" if at == "code" else "cannot be read"):
        load_package(path)


def test_what_servers_that_are_starting_use_is_left_alone() -> None:
    with compile_cache() as folder:
        numbers = range(3 * cache_folder.MAX_OF_A_NAME)
        recent = {package(folder, "target", number, time.time() - 60) for number in numbers}
        recent.add("work-of-another")
        (folder / "work-of-another").mkdir()
    assert names(folder) == recent


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path, temporary: Path) -> None:
    with compile_cache() as folder:
        unfinished = folder / "work-abc" / "target-0123456789abcdef.pt2"
        unpacked = folder / "work-def" / "aotinductor_xyz" / "model.so"
        now = folder / "work-now"
        others = [folder / "notes.txt", temporary / "dflash-sockets", tmp_path / "elsewhere"]
        for path in (unfinished, unpacked, now / "model.so", *others):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        link = folder / "work-link"
        link.symlink_to(tmp_path)
        for path in (unfinished.parent, folder / "work-def", link, *others):
            os.utime(path, (OLD, OLD), follow_symlinks=False)
    assert not unfinished.parent.exists() and not (folder / "work-def").exists() and not link.is_symlink()
    assert now.exists() and all(path.exists() for path in others)


def test_a_folder_that_vanishes_meanwhile_is_no_error() -> None:
    with compile_cache() as folder:
        shutil.rmtree(folder)
