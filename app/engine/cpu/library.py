"""C++ of this package, compiled by g++ for this processor and kept in the user's folder."""

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from app.engine.cache_folder import own_folder

logger = logging.getLogger(__name__)

MAX_KEPT = 8
"""Libraries of each source that are kept: processors, compilers and releases that a machine is likely to have."""
_SECONDS = 300
"""A compilation takes 5 seconds of a processor."""
_TORCH = Path(torch.__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-shared")


def load_operators(source: Path, *others: Path) -> None:
    """Register the operators of C++ sources, which are compiled into one library if no start before has kept them.

    Raises RuntimeError or OSError if they cannot be made here. Operators of one name are registered once a process.
    """
    if not shutil.which(compiler()):
        raise RuntimeError("there is no g++")
    with contextlib.ExitStack() as stack:
        folder = own_folder("libraries") or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sources = (source, *others)
        library = folder / f"{source.stem}-{_digest(sources)}.so"
        try:
            _check(library)
            os.utime(library)  # the last use counts
            torch.ops.load_library(library)
        except (OSError, RuntimeError):  # missing, damaged, or made for another system's libraries
            _compile(sources, library)
            torch.ops.load_library(library)
            _tidy(folder, source.stem)


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def compiler_version() -> bytes:
    return subprocess.run([compiler(), "--version"], capture_output=True, check=True).stdout


def processor() -> bytes:
    """Return the facts that -march=native looks at."""
    told = (b"model name", b"flags", b"Features", b"CPU part")
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        return b"\n".join(sorted({line for line in lines if line.startswith(told)}))
    return platform.processor().encode()


def _digest(sources: Sequence[Path]) -> str:
    """Return a hash of all that decides the compiled code."""
    what = hashlib.sha256(f"{_FLAGS} {torch.__version__} {_TORCH}".encode())
    what.update(compiler_version() + processor())
    for path in (*sources, *sorted(sources[0].parent.glob("*.h"))):
        what.update(path.read_bytes())
    return what.hexdigest()[:16]


def _compile(sources: Sequence[Path], library: Path) -> None:
    """Compile to another name first, so no other process sees half a library. Raises RuntimeError."""
    logger.info("compiling %s for this processor, which takes a few seconds once", sources[0].name)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="work-", ignore_cleanup_errors=True) as work:
        unfinished = Path(work) / library.name
        link = (f"-L{_TORCH / 'lib'}", "-ltorch_cpu")
        command = [compiler(), *_FLAGS, f"-I{_TORCH / 'include'}", *map(str, sources), "-o", str(unfinished), *link]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=os.environ | {"TMPDIR": work}
        )
        if done.returncode:
            raise RuntimeError(f"{compiler()} cannot compile it: {done.stderr.strip()[-500:]}")
        unfinished.write_bytes(sealed(unfinished.read_bytes()))
        unfinished.chmod(0o700)
        unfinished.replace(library)


def sealed(code: bytes) -> bytes:
    """Return the code followed by its SHA-256, which no loader reads."""
    return code + hashlib.sha256(code).digest()


def _check(library: Path) -> None:
    """Raise OSError if the library is missing or damaged, because loading a part of one kills the process."""
    found = library.read_bytes()
    if sealed(found[: -hashlib.sha256().digest_size]) != found:
        raise OSError(f"{library} is damaged")


def _tidy(folder: Path, name: str) -> None:
    """Remove all libraries of a source but those that were used last. A loaded one is mapped, and needs no file."""
    with contextlib.suppress(OSError):  # another process may remove the same files
        kept = sorted(folder.glob(f"{name}-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in kept[MAX_KEPT:]:
            path.unlink(missing_ok=True)
