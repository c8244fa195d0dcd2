"""C++ of this package, compiled by g++ for this processor and one dtype, and kept for the next start.

An image has libraries for the usual levels of processors, by `python -m app.engine.cpu.library`.
"""

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import ContextVar
from functools import cache as once
from pathlib import Path
from typing import Any, NamedTuple

import torch

from app.engine.cache_folder import cache, room, work_folder

logger = logging.getLogger(__name__)

on_source: ContextVar[Callable[[int, int], None]] = ContextVar("on_source", default=lambda done, total: None)
"""Called with (sources compiled, sources in all)."""
_SECONDS = 900  # A source takes 2 to 5 seconds of a processor, which others may use too. The longest comes first.
_ROOM = 16 << 20
"""Bytes of a disk that suffice by far: the compiler's files and the library take 2 MiB."""
_TORCH = Path(torch.__file__).parent
_FACTS = (b"model name", b"flags", b"Features", b"CPU part")
_FLAGS = ("-O3", "-std=c++20", "-fPIC")
_NATIVE = ("-march=native",)
SOURCES = tuple(map(Path(__file__).with_name, ("linear.cpp", "int8.cpp", "attention.cpp", "rotate.cpp", "decoder.cpp")))
PREBUILT = Path(__file__).with_name("prebuilt")
_KINDS = {torch.float32: "Float32", torch.bfloat16: "BFloat16"}
"""Kinds of numbers in vectors.h."""
DTYPES = tuple(_KINDS)


class Level(NamedTuple):
    """Processors that an image has libraries for: the compiler's flags, and what /proc/cpuinfo says of each of them."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[bytes]


_V3 = frozenset(b"avx avx2 bmi1 bmi2 f16c fma abm movbe".split())
_V4 = _V3 | frozenset(b"avx512f avx512bw avx512cd avx512dq avx512vl".split())
LEVELS = {
    "x86_64": (  # the best comes first
        Level("v4_bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), _V4 | {b"avx512_vnni", b"avx512_bf16"}),
        Level("v4_vnni", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {b"avx512_vnni"}),
        Level("v4", ("-march=x86-64-v4",), _V4),
        Level("v3", ("-march=x86-64-v3",), _V3),
    ),
    "aarch64": (Level("armv8", ("-march=armv8-a",), frozenset({b"asimd"})),),
}
"""AMX is PyTorch's, for its products of many rows: no operator here has it."""


@once
def operators(dtype: torch.dtype) -> Any:
    """Return the registered operators of a dtype, `torch.ops.dflash_server_DTYPE`."""
    return getattr(torch.ops, _namespace(dtype))


def load_operators(dtype: torch.dtype, sources: Sequence[Path] = SOURCES) -> None:
    """Register the operators of a dtype: those of the image, or of C++ sources, which are compiled into one library
    unless an earlier start has kept it.

    Raises RuntimeError or OSError, which say what to do, if they cannot be made here. Operators of one name are
    registered once a process.
    """
    for level in _levels():
        prebuilt = PREBUILT / _name(dtype, level.flags, sources)
        with contextlib.suppress(OSError, RuntimeError):  # missing, damaged, or for another torch
            check_sealed(prebuilt)
            torch.ops.load_library(prebuilt)
            return logger.debug("operators for %s processors: %s", level.name, prebuilt)
    if not shutil.which(compiler()):
        named = f"CXX={compiler()} is not there" if "CXX" in os.environ else "there is no g++"
        raise RuntimeError(f"{named} (Debian and Ubuntu: apt install g++)")
    with cache("libraries") as folder:
        library = folder / _name(dtype, _NATIVE, sources, compiler_version() + processor())
        with contextlib.suppress(OSError):  # missing, or in a read-only folder
            os.utime(library)  # the last use counts
        try:
            check_sealed(library)
            torch.ops.load_library(library)
        except (OSError, RuntimeError):  # missing, damaged, or made for another system's libraries
            with room(folder, _ROOM) as place:
                compile_sources(dtype, _NATIVE, sources, place / library.name)
                torch.ops.load_library(place / library.name)


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def made_by() -> str:
    """Return who made the operators that this process has loaded."""
    if any((PREBUILT / _name(DTYPES[0], level.flags, SOURCES)).exists() for level in _levels()):
        return "compiled with the image"
    return f"compiled by {compiler_version().decode().partition(chr(10))[0]}"


def compiler_version() -> bytes:
    return subprocess.run([compiler(), "--version"], capture_output=True, check=True).stdout


def processor() -> bytes:
    """Return the properties of the processor that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"\n".join(sorted({line for line in lines if line.startswith(_FACTS)}))


def _levels() -> list[Level]:
    """Return the levels of an image's libraries that this processor has, the best first."""
    has = frozenset(processor().split())
    return [level for level in LEVELS.get(platform.machine(), ()) if level.needs <= has]


def _namespace(dtype: torch.dtype) -> str:
    return f"dflash_server_{_KINDS[dtype].lower()}"


def _name(dtype: torch.dtype, flags: Sequence[str], sources: Sequence[Path], facts: bytes = b"") -> str:
    """Return the name of a library, with a hash of everything that its code depends on."""
    digest = hashlib.sha256(f"{_FLAGS} {flags} {dtype} {torch.__version__} {_TORCH}".encode() + facts)
    for path in (*sources, *sorted(sources[0].parent.glob("*.h"))):
        digest.update(path.read_bytes())
    return f"{_KINDS[dtype].lower()}-{digest.hexdigest()[:16]}.so"


def compile_sources(dtype: torch.dtype, flags: Sequence[str], sources: Sequence[Path], library: Path) -> None:
    """Compile one source a core, and link under another name first, so no other process sees half a library."""
    report = on_source.get()
    defined = f"-DOWN={_KINDS[dtype]}", f"-DOPERATORS={_namespace(dtype)}"
    flags = *_FLAGS, *flags, *defined, f"-I{_TORCH / 'include'}", "-c"
    told = "%s compiles the CPU's operators of %s, once, in about 10 s of processor time: into %s"
    logger.info(told, compiler(), _KINDS[dtype].lower(), library)
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
        unfinished.chmod(0o755)
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


def prebuild(folder: Path = PREBUILT) -> None:
    """Compile the operators of all dtypes for all levels of this architecture, for an image."""
    folder.mkdir(exist_ok=True)
    for level in LEVELS.get(platform.machine(), ()):
        for dtype in DTYPES:
            compile_sources(dtype, level.flags, SOURCES, folder / _name(dtype, level.flags, SOURCES))


if __name__ == "__main__":
    prebuild(*map(Path, sys.argv[1:]))
