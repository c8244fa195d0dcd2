"""The folder that keeps the packages of `--compile`. Code is loaded from it, so it must belong to this user only."""

import contextlib
import os
import re
import shutil
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from app.engine.cache_folder import own_folder

MAX_OF_A_NAME = 8
"""Packages kept of each function: shapes, settings and releases that a machine is likely to change between."""
AT_WORK_SECONDS = 3600.0
"""No engine takes longer to compile or load, so an older file belongs to a process that was killed."""
_WORK = "work-"
_PACKAGE = re.compile(r"(\w+)-[0-9a-f]{16}\.pt2")


@contextlib.contextmanager
def compile_cache() -> Iterator[Path]:
    """Yield the folder of packages. PyTorch's own files lie inside it meanwhile, and are removed at the end.

    Where the user's folder cannot be used safely, it is a new one that is removed at the end. So no code of another
    user is ever taken, and a process that is killed leaves nothing outside the folder.
    """
    with contextlib.ExitStack() as stack:

        def temporary(where: Path | None, prefix: str) -> str:
            made = tempfile.TemporaryDirectory(dir=where, prefix=prefix, ignore_cleanup_errors=True)
            return stack.enter_context(made)

        folder = own_folder("compiled") or Path(temporary(None, "dflash-compiled-"))
        stack.callback(_tidy, folder)
        stack.enter_context(_temporary_files_in(temporary(folder, _WORK)))
        yield folder


def load_package(package: Path) -> Callable[..., Any]:
    """Return the compiled function. Raises RuntimeError for a package that is broken or made for other libraries.

    PyTorch unpacks it into the folder of temporary files. The code is mapped, and needs no file afterwards.
    """
    with contextlib.suppress(OSError):
        os.utime(package)  # The last use counts.
    _check(package)
    # The Python function around it has g++ try the processor's instructions first, for a second and more each time.
    loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", False, 1, -1)
    run: Callable[..., Any] = loader.boxed_run
    return run


def _check(package: Path) -> None:
    """Raise RuntimeError if the package is not what was written. PyTorch runs damaged code, and reads no CRC."""
    try:
        with zipfile.ZipFile(package) as files:
            damaged = files.testzip()
    except Exception as error:  # the zip's own fields may be damaged in any way
        raise RuntimeError(f"{package} cannot be read: {error}") from error
    if damaged:
        raise RuntimeError(f"{package} is damaged: {damaged}")


@contextlib.contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """Let PyTorch's Python and C++ put temporary files, and compiled code, only into `folder`."""
    names, tempdir = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"), tempfile.tempdir
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, folder))
    tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = tempdir
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _tidy(folder: Path) -> None:
    """Remove what processes that were killed left, and of each name all packages but those that were used last."""
    last_used: dict[str, list[tuple[float, Path]]] = defaultdict(list)
    with contextlib.suppress(OSError):  # Another process may remove the same files.
        for path in folder.iterdir():
            if package := _PACKAGE.fullmatch(path.name):
                last_used[package[1]].append((path.stat().st_mtime, path))
            elif path.name.startswith(_WORK):
                _remove_if_old(path)
        for packages in last_used.values():
            for _, path in sorted(packages, reverse=True)[MAX_OF_A_NAME:]:
                _remove_if_old(path)


def _remove_if_old(path: Path) -> None:
    if time.time() - path.lstat().st_mtime < AT_WORK_SECONDS:  # Other servers may just be starting.
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
