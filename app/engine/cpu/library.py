"""C++ of this package, compiled by g++ for this processor and kept for the next start."""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from pathlib import Path

import torch

from app.engine.cache_folder import cache, work_folder

logger = logging.getLogger(__name__)

on_source: ContextVar[Callable[[int, int], None]] = ContextVar("on_source", default=lambda done, total: None)
"""Called with (sources compiled, sources in all)."""
_SECONDS = 300  # A source takes 3 to 13 seconds of a processor, and the longest comes first.
_TORCH = Path(torch.__file__).parent
_FACTS = (b"model name", b"flags", b"Features", b"CPU part")
_FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC")


def load_operators(*sources: Path) -> None:
    """Register the operators of C++ sources, which are compiled into one library unless an earlier start has kept it.

    Raises RuntimeError or OSError if they cannot be made here. Operators of one name are registered once a process.
    """
    if not shutil.which(compiler()):
        raise RuntimeError("there is no g++")
    with cache("libraries") as folder:
        library = folder / f"{sources[0].stem}-{_digest(sources)}.so"
        try:
            check_sealed(library)
            os.utime(library)  # the last use counts
            torch.ops.load_library(library)
        except (OSError, RuntimeError):  # missing, damaged, or made for another system's libraries
            compile_sources(sources, library)
            torch.ops.load_library(library)


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def compiler_version() -> bytes:
    return subprocess.run([compiler(), "--version"], capture_output=True, check=True).stdout


def processor() -> bytes:
    """Return the properties of the processor that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"\n".join(sorted({line for line in lines if line.startswith(_FACTS)}))


def _digest(sources: Sequence[Path]) -> str:
    """Return a hash of everything that the compiled code depends on."""
    digest = hashlib.sha256(f"{_FLAGS} {torch.__version__} {_TORCH}".encode())
    digest.update(compiler_version() + processor())
    for path in (*sources, *sorted(sources[0].parent.glob("*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def compile_sources(sources: Sequence[Path], library: Path) -> None:
    """Compile one source a core, and link under another name first, so no other process sees half a library."""
    report = on_source.get()
    flags = *_FLAGS, f"-I{_TORCH / 'include'}", "-c"
    report(0, len(sources))
    with work_folder(library.parent) as work, ThreadPoolExecutor(os.cpu_count()) as threads:
        for done, _ in enumerate(threads.map(partial(_run, work), [(*flags, str(source)) for source in sources]), 1):
            report(done, len(sources))
        objects = (f"{source.stem}.o" for source in sources)
        _run(work, ("-shared", *objects, "-o", library.name, f"-L{_TORCH / 'lib'}", "-ltorch_cpu"))
        unfinished = Path(work) / library.name
        unfinished.write_bytes(sealed(unfinished.read_bytes()))
        unfinished.chmod(0o700)
        unfinished.replace(library)


def _run(work: str, arguments: Sequence[str]) -> None:
    """Run the compiler in the folder `work`. Raises RuntimeError."""
    env = os.environ | {"TMPDIR": work}
    done = subprocess.run([compiler(), *arguments], capture_output=True, text=True, cwd=work, env=env, timeout=_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{compiler()} cannot compile it: {done.stderr.strip()[-500:]}")


def sealed(code: bytes) -> bytes:
    """Return the code followed by its SHA-256, which no loader reads."""
    return code + hashlib.sha256(code).digest()


def check_sealed(library: Path) -> None:
    """Raise OSError if the library is missing or damaged, because loading a truncated one kills the process."""
    content = library.read_bytes()
    if sealed(content[: -hashlib.sha256().digest_size]) != content:
        raise OSError(f"{library} is damaged")
