"""The packages of `--compile` on disk, and PyTorch's own files while it makes and loads them."""

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from app.engine.cache_folder import cache, work_folder


@contextlib.contextmanager
def compile_cache() -> Iterator[Path]:
    """Yield the folder of packages. PyTorch's own files lie inside it meanwhile, and are removed at the end.

    So a process that is killed leaves nothing outside the folder.
    """
    with cache("compiled") as folder, work_folder(folder) as work, _temporary_files_in(work):
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
