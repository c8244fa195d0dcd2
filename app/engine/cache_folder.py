"""Folders of the user in which compiled code is kept for the next start.

A kept file is called NAME-HASH.KIND, where the hash is of everything that decides its content. Code is loaded from
these folders, so they must belong to this user only.
"""

import contextlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_OF_A_NAME = 8
"""Files kept of each name: shapes, settings and releases that a machine is likely to change between."""
AT_WORK_SECONDS = 3600.0
"""No engine takes longer to compile or load, so an older file belongs to a process that was killed."""
WORK = "work-"
"""Beginning of the names of folders of unfinished files."""
_KEPT = re.compile(r"(\w+)-[0-9a-f]{16}\.\w+")


@contextlib.contextmanager
def cache(name: str) -> Iterator[Path]:
    """Yield the folder of one kind of files, and evict the oldest files at the end.

    Where the user's folder cannot be used safely, a temporary one is used instead, so code of another user is never
    loaded.
    """
    with contextlib.ExitStack() as stack:
        folder = user_folder(name)
        if folder is None:
            remedy = "set XDG_CACHE_HOME to a writable folder of this user only"
            logger.warning("no %s are kept, so each start compiles anew: %s", name, remedy)
            folder = Path(stack.enter_context(work_folder(None)))
        stack.callback(_tidy, folder)
        yield folder


@contextlib.contextmanager
def room(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a folder that holds `num_bytes` of code: `folder`, or with a warning a temporary one.

    Raises OSError, with the reason of each, if neither does. That is found before anything is compiled.
    """
    with contextlib.ExitStack() as stack:
        place = folder
        if reason := _why_no_room(folder, num_bytes):
            place = Path(stack.enter_context(work_folder(None)))
            both = f"{folder} cannot be used ({reason})"
            if other := _why_no_room(place, num_bytes):
                raise OSError(f"{both}, nor can {place.parent} ({other}): free {num_bytes >> 20} MiB in one of them")
            remedy = "free some, or set XDG_CACHE_HOME"
            logger.warning("%s, so each start compiles anew, in %s: %s", both, place.parent, remedy)
        yield place


def _why_no_room(folder: Path, num_bytes: int) -> str:
    """Return why `num_bytes` of code cannot be written to a folder and loaded from there, or ""."""
    try:
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return "mounted noexec"
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def user_folder(name: str) -> Path | None:
    """Return the user's folder, made if it is missing, or None where another user could put files into it.

    It may be read-only: what an image has in it is used.
    """
    with contextlib.suppress(OSError, RuntimeError):  # a user may have no home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-server" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid == os.getuid() and _owners_above(folder) <= {0, os.getuid()}:
            if found.st_mode & 0o077:
                folder.chmod(0o700)
            return folder
    return None


def work_folder(folder: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder for unfinished files in `folder`. A later start removes that of a killed process."""
    return tempfile.TemporaryDirectory(dir=folder, prefix=WORK, ignore_cleanup_errors=True)


def _owners_above(folder: Path) -> set[int]:
    """Return the users that could replace this folder by another."""
    return {path.stat().st_uid for path in folder.resolve().parents}


def _tidy(folder: Path) -> None:
    """Remove what killed processes left, and all but the last used files of each name."""
    last_used: dict[str, list[tuple[float, Path]]] = defaultdict(list)
    with contextlib.suppress(OSError):  # another process may remove the same files
        for path in folder.iterdir():
            if kept := _KEPT.fullmatch(path.name):
                last_used[kept[1]].append((path.stat().st_mtime, path))
            elif path.name.startswith(WORK):
                remove_if_old(path)
        for files in last_used.values():
            for _, path in sorted(files, reverse=True)[MAX_OF_A_NAME:]:
                remove_if_old(path)


def remove_if_old(path: Path) -> None:
    """Remove a file or a folder that no process can still be making."""
    if time.time() - path.lstat().st_mtime < AT_WORK_SECONDS:  # other servers may just be starting
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
