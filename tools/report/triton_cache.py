"""Kernels that Triton has compiled, in a file that another start or machine takes up. Imports no torch.

    TRITON_CACHE_DIR=FOLDER dflash-server serve ...     behind  python -m tools.report.triton_cache FILE FOLDER

Triton's own files name one another by absolute paths, so a folder that was only copied is compiled anew. The kernels
are machine code, so a file must come from a report that its user trusts.
"""

import gzip
import json
import os
import platform
import shutil
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

from app.config.error import ConfigError

NAME = "triton-cache.tar.gz"
VARIABLE = "TRITON_CACHE_DIR"
MAKER = "comment"
"""Header of a packed cache that holds what `maker` returns."""
GROUPS = "*/__grp__*.json"
"""Files that list the files of a kernel: {"child_paths": {name: path}}."""


@contextmanager
def own_cache(folder: Path, given: str | None) -> Iterator[Callable[[], dict[str, str]]]:
    """Let child processes compile into a folder of their own. Yield a function that packs it into `folder`.

    It begins with the kernels of the file `given`, or else of an earlier report in `folder`. A file that is damaged or
    of another machine is left out with a warning. Raises ConfigError if `given` is no file.
    """
    file, before = folder / NAME, os.environ.get(VARIABLE)
    source = Path(given) if given else file
    with TemporaryDirectory(prefix="triton-") as name:
        cache = Path(name) / "cache"
        known, left_out = 0, ""
        if given or file.exists():
            try:
                known = unpack(source, cache)
            except ConfigError as error:
                if not source.is_file():
                    raise
                left_out = f", without {error}"
                print(f"warning: {error}: kernels are compiled anew", file=sys.stderr)
                shutil.rmtree(cache, ignore_errors=True)
        packed = known

        def packing() -> dict[str, str]:
            nonlocal packed
            count = num_kernels(cache)
            told = f"{count - known} compiled" + (f", {known} taken from {source}" if known else left_out)
            if count > packed or (count and not file.exists()):
                try:
                    pack(cache, file)
                except OSError as error:
                    return {"kernels": f"{told}, not packed: {error.strerror}"}
                packed = count
            return {"kernels": told}

        os.environ[VARIABLE] = str(cache)
        try:
            yield packing
        finally:
            del os.environ[VARIABLE]
            if before is not None:
                os.environ[VARIABLE] = before


def maker() -> str:
    """Return the versions that all kernels of a cache are of. Triton itself looks at the kind of GPU."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return f"Triton {triton}, Python {platform.python_version()}, {platform.machine()}"


def num_kernels(folder: Path) -> int:
    return len(list(folder.glob(GROUPS)))


def pack(folder: Path, file: Path) -> None:
    """Write all of a cache's folder into `file`, which is whole at any moment."""
    part = file.with_name(f"{file.name}.part")
    try:
        with tarfile.open(part, "w:gz", compresslevel=5, pax_headers={MAKER: maker()}) as packed:
            packed.add(folder, arcname=".")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def unpack(file: Path, folder: Path) -> int:
    """Take the kernels of `file` into a cache's folder, and return their number.

    Raises ConfigError for a file that is damaged, or of another `maker`, and may leave a part of the kernels.
    """
    try:
        with gzip.open(file) as content:
            while content.read(1 << 20):  # its end has a checksum, and an archive may end before it
                pass
        with tarfile.open(file) as packed:
            made_by = packed.pax_headers.get(MAKER, "an unknown machine")
            if made_by != maker():
                raise ValueError(f"it is of {made_by}, and here is {maker()}")
            packed.extractall(folder, filter="data")
        for group in folder.glob(GROUPS):
            names = json.loads(group.read_text())["child_paths"]
            paths = {name: str(group.absolute().parent / name) for name in names}
            group.write_text(json.dumps({"child_paths": paths}))
    except (OSError, EOFError, tarfile.TarError, zlib.error, ValueError, KeyError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0].rstrip(":")
        raise ConfigError(f"{file}: {reason}", f"give a {NAME} that a report has written, or remove it") from None
    return num_kernels(folder)


if __name__ == "__main__":
    print(unpack(Path(sys.argv[1]), Path(sys.argv[2])), "kernels")
