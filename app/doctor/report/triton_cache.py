"""Kernels that Triton has compiled, in a file that another start or machine takes up. Imports no torch.

    TRITON_CACHE_DIR=FOLDER dflash-server serve ...     behind  python -m app.doctor.report.triton_cache FILE FOLDER

Triton's own files name one another by absolute paths, so a folder that was only copied is compiled anew. The kernels
are machine code, so a file must come from a report that its user trusts.
"""

import json
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from app.config.error import ConfigError

NAME = "triton-cache.tar.gz"
VARIABLE = "TRITON_CACHE_DIR"
GROUPS = "*/__grp__*.json"
"""Files that list the files of a kernel: {"child_paths": {name: path}}."""


@contextmanager
def own_cache(folder: Path, given: str | None) -> Iterator[Callable[[], dict[str, str]]]:
    """Let child processes compile into a folder of their own. Yield a function that packs it into `folder`.

    It begins with the kernels of the file `given`, or else of an earlier report in `folder`. Raises ConfigError for a
    file that is no packed cache.
    """
    file, before = folder / NAME, os.environ.get(VARIABLE)
    source = Path(given) if given else file
    with TemporaryDirectory(prefix="triton-") as name:
        cache = Path(name)
        known = packed = unpack(source, cache) if given or file.exists() else 0

        def packing() -> dict[str, str]:
            nonlocal packed
            count = num_kernels(cache)
            if count > packed or (count and not file.exists()):
                pack(cache, file)
                packed = count
            return {
                "kernels": f"{count - known} compiled, {known} taken from {source}" if known else f"{count} compiled"
            }

        os.environ[VARIABLE] = name
        try:
            yield packing
        finally:
            del os.environ[VARIABLE]
            if before is not None:
                os.environ[VARIABLE] = before


def num_kernels(folder: Path) -> int:
    return len(list(folder.glob(GROUPS)))


def pack(folder: Path, file: Path) -> None:
    """Write all of a cache's folder into `file`, which is whole at any moment."""
    part = file.with_name(f"{file.name}.part")
    with tarfile.open(part, "w:gz", compresslevel=5) as packed:
        packed.add(folder, arcname=".")
    part.replace(file)


def unpack(file: Path, folder: Path) -> int:
    """Take the kernels of `file` into a cache's folder, and return their number. Raises ConfigError."""
    try:
        with tarfile.open(file) as packed:
            packed.extractall(folder, filter="data")
        for group in folder.glob(GROUPS):
            names = json.loads(group.read_text())["child_paths"]
            paths = {name: str(group.absolute().parent / name) for name in names}
            group.write_text(json.dumps({"child_paths": paths}))
    except (OSError, EOFError, tarfile.TarError, ValueError, KeyError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file}: {reason}", f"give a {NAME} that a report has written, or remove it") from None
    return num_kernels(folder)


if __name__ == "__main__":
    print(unpack(Path(sys.argv[1]), Path(sys.argv[2])), "kernels")
