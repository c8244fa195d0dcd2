"""C++ of this package, compiled by g++ for this processor and kept for the next start."""

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import ContextVar
from pathlib import Path

import torch

from app.engine.cache_folder import cache, room, work_folder

logger = logging.getLogger(__name__)

on_source: ContextVar[Callable[[int, int], None]] = ContextVar("on_source", default=lambda done, total: None)
"""Called with (sources compiled, sources in all)."""
_SECONDS = 900  # A source takes 3 to 25 seconds of a processor, which others may use too. The longest comes first.
_ROOM = 16 << 20
"""Bytes of a disk that suffice by far: the compiler's files and the library take 2 MiB."""
_TORCH = Path(torch.__file__).parent
_FACTS = (b"model name", b"flags", b"Features", b"CPU part")
_FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC")


def load_operators(*sources: Path) -> None:
    """Register the operators of C++ sources, which are compiled into one library unless an earlier start has kept it.

    Raises RuntimeError or OSError, which say what to do, if they cannot be made here. Operators of one name are
    registered once a process.
    """
    if not shutil.which(compiler()):
        named = f"CXX={compiler()} is not there" if "CXX" in os.environ else "there is no g++"
        raise RuntimeError(f"{named} (Debian and Ubuntu: apt install g++)")
    with cache("libraries") as folder:
        library = folder / f"{sources[0].stem}-{_digest(sources)}.so"
        with contextlib.suppress(OSError):  # missing, or in a read-only folder
            os.utime(library)  # the last use counts
        try:
            check_sealed(library)
            torch.ops.load_library(library)
        except (OSError, RuntimeError):  # missing, damaged, or made for another system's libraries
            with room(folder, _ROOM) as place:
                compile_sources(sources, place / library.name)
                torch.ops.load_library(place / library.name)


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
    logger.info(
        "%s compiles the CPU's operators, once, in about a minute of processor time: into %s", compiler(), library
    )
    report(0, len(sources))
    with work_folder(library.parent) as work, ThreadPoolExecutor(os.cpu_count()) as threads:
        compiling = [threads.submit(_run, work, (*flags, str(source))) for source in sources]
        for done, source in enumerate(as_completed(compiling), 1):
            source.result()
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
    command = [compiler(), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=work, env=env, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{compiler()} has not compiled it within {_SECONDS} s") from None
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
