"""The user's folder for what a start leaves for the next one."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the folder for files of one kind. It may be missing. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-server" / name
