"""The user's folder for what a start leaves for the next one."""

import contextlib
import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the folder for files of one kind. It may be missing. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-server" / name


def own_folder(name: str) -> Path | None:
    """Return that folder, made if it is missing, or None where another user could put files into it.

    Code is loaded from such folders, so they must belong to this user only.
    """
    with contextlib.suppress(OSError, RuntimeError):
        folder = cache_folder(name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_ours = folder.stat().st_uid == os.getuid() and _owners_above(folder) <= {0, os.getuid()}
        if is_ours and os.access(folder, os.W_OK):
            folder.chmod(0o700)
            return folder
    return None


def _owners_above(folder: Path) -> set[int]:
    """Return the users that could put another folder in its place."""
    return {path.stat().st_uid for path in folder.resolve().parents}
