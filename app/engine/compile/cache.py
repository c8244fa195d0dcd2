"""The packages that `--compile` makes: the folder that keeps them, and loading one, so that nothing is left behind."""

import contextlib
import importlib
import math
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from app.engine.errors import UnsupportedError

_MOST_OF_A_NAME = 8
_AT_WORK_SECONDS = 3600.0
"""Nobody makes or loads a package for longer: what is older belongs to a process that was killed."""
_PREFIX = "dflash-compiled-"
_WHOLE = re.compile(r"(\w+)-[0-9a-f]{16}\.pt2")
_UNFINISHED = re.compile(r"\w+-[0-9a-f]{16}\.[0-9a-f]+\.pt2")


@contextlib.contextmanager
def kept_packages() -> Iterator[Path]:
    """A folder of this user's alone, for code is loaded from it; where the usual one cannot be written, a new one that
    is removed at the end. What no engine will use again is removed too. Raises UnsupportedError where PyTorch would
    take another user's code for its own."""
    _take_torch_folder()
    folder = _usual_folder()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as new:
            yield Path(new)
    else:
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):
                _tidy(folder)
    _remove_leavings()


def load_package(package: Path) -> Callable[..., Any]:
    """The function that was compiled. Raises RuntimeError for a package that is broken, or made for other libraries.

    PyTorch unpacks it into a temporary folder, and removes that when the process ends by itself, not when it is killed.
    What is loaded is mapped and needs no file, so the folder goes at once.
    """
    with contextlib.suppress(OSError):
        os.utime(package)  # The last use counts.
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder, _temporary_files_in(folder):
        loaded = importlib.import_module("torch._inductor").aoti_load_package(str(package))
    run: Callable[..., Any] = loaded.loader.boxed_run
    return run


def _usual_folder() -> Path | None:
    with contextlib.suppress(OSError, RuntimeError):  # Path.home() raises RuntimeError for a user without one.
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-server" / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_ours = folder.stat().st_uid == os.getuid() and _owners_above(folder) <= {0, os.getuid()}
        if is_ours and os.access(folder, os.W_OK):
            folder.chmod(0o700)
            return folder
    return None


def _owners_above(folder: Path) -> set[int]:
    """Who could put another folder in its place."""
    return {path.stat().st_uid for path in folder.resolve().parents}


def _take_torch_folder() -> None:
    """PyTorch compiles in a folder with a name that anybody knows, and takes what lies there for its own: it must be
    ours before that, and then it stays ours in a sticky /tmp."""
    usual = importlib.import_module("torch._inductor.runtime.cache_dir_utils").default_cache_dir()
    for folder in {Path(usual), Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or usual)}:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
            if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
                raise PermissionError
            folder.chmod(0o700)
        except OSError:
            raise UnsupportedError(
                f"--compile: {folder} is not this user's own folder. Set TMPDIR (or TORCHINDUCTOR_CACHE_DIR) to one."
            ) from None


@contextlib.contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """Where PyTorch's c10::make_tempdir makes folders."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def _tidy(folder: Path) -> None:
    """Remove unfinished packages, and of each name all but those that were used last. Only what nobody has touched for
    a while: other servers may just be starting."""
    last_used: dict[str, list[tuple[float, Path]]] = {}
    for path in folder.iterdir():
        if whole := _WHOLE.fullmatch(path.name):
            last_used.setdefault(whole[1], []).append((_modified(path), path))
        elif _UNFINISHED.fullmatch(path.name):
            _remove_if_old(path)
    for packages in last_used.values():
        for _, path in sorted(packages, reverse=True)[_MOST_OF_A_NAME:]:
            _remove_if_old(path)


def _remove_leavings() -> None:
    """Of processes of this user that were killed while they loaded."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                _remove_if_old(path)


def _remove_if_old(path: Path) -> None:
    if time.time() - _modified(path) < _AT_WORK_SECONDS:
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _modified(path: Path) -> float:
    """When it was last written or used; infinity if somebody has just removed it."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return math.inf
